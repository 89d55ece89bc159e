"""Metrics of the plan: what it predicted, beside what is measured, and what it gave to devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dflash_runtime.compute.expert_arena import ArenaStats
from dflash_runtime.compute.slot_stats import SlotStats
from dflash_runtime.engine.measured_speeds import MeasuredSpeeds, predicted
from dflash_runtime.experts.telemetry import ExpertMemoryStats, MoveStats
from dflash_runtime.placement.plan import Plan

_WORK = "decode, or prompts of 512 and 4,096 tokens"


def plan_metrics(plan: Plan | None, measured: MeasuredSpeeds, namespace: str) -> Iterator[Metric]:
    """Gauges of a plan; without one only what is measured."""

    def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{namespace}_{name}", text, labels=labels)

    def speeds(name: str, text: str, rates: Mapping[str, float | None]) -> GaugeMetricFamily:
        family = gauge(name, text, "work")
        for work, rate in rates.items():
            if rate is not None:
                family.add_metric([work], rate)
        return family

    yield speeds(
        "measured_tokens_per_second",
        f"Speed of the latest generations, by work: {_WORK}.",
        measured.rates,
    )
    yield speeds(
        "predicted_tokens_per_second",
        f"The plan's speed, by work: {_WORK}.",
        {} if plan is None else dict(predicted(plan)),
    )
    here = gauge(
        "plan_selections_here",
        "The part of written tokens' selections that the plan expects on the parent's device.",
    )
    budget = gauge(
        "plan_device_bytes",
        "A device's memory in the plan: free, and of it trunk, cache, work and experts; disk is "
        "the part of experts that has no room.",
        "device",
        "use",
    )
    experts = gauge("plan_device_experts", "Experts that the plan gives to a device.", "device")
    if plan is not None:
        here.add_metric([], plan.share_here)
        for each in plan.budgets:
            for use, num_bytes in each.bytes_by_use.items():
                budget.add_metric([each.name, use], num_bytes)
            experts.add_metric([each.name], each.num_experts)
    yield from (here, budget, experts)


def _by_outcome(name: str, help_text: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help_text, labels=["outcome"])
    for outcome, count in counts.items():
        family.add_metric([outcome], count)
    return family


def disk_metrics(disk: ArenaStats | None, namespace: str) -> Iterator[Metric]:
    """Counters of experts that are read from the disk when they are used; none if all are in
    memory."""
    if disk is None:
        return
    used = CounterMetricFamily(
        f"{namespace}_experts_used_of_memory_or_disk",
        "Experts of batches: in memory, read from the disk, or used where the file is mapped since "
        "a read failed.",
        labels=["from"],
    )
    used.add_metric(["memory"], disk.found)
    used.add_metric(["disk"], disk.missed - disk.failed)
    used.add_metric(["mapped"], disk.failed)
    yield used
    yield CounterMetricFamily(
        f"{namespace}_expert_disk_bytes",
        "Bytes of experts that were read from the disk.",
        value=disk.read_bytes,
    )
    yield CounterMetricFamily(
        f"{namespace}_expert_disk_seconds",
        "How long batches have waited for reads.",
        value=disk.read_s,
    )
    yield GaugeMetricFamily(
        f"{namespace}_expert_disk_half_life_tokens",
        "After how many tokens a use counts half, as to which experts stay in memory.",
        value=disk.half_life,
    )
    yield GaugeMetricFamily(
        f"{namespace}_expert_disk_slots",
        "Experts that memory has room for at present.",
        value=disk.num_slots,
    )
    yield GaugeMetricFamily(
        f"{namespace}_expert_disk_pinned",
        "Experts that never leave it.",
        value=sum(map(len, disk.pins.experts.values())),
    )
    if disk.share_found is not None and disk.share_found_by_twice is not None:
        shares = GaugeMetricFamily(
            f"{namespace}_expert_disk_share_found",
            "Share of the experts chosen by recent steps that would be in memory if each layer had "
            "an equal part of it: of the same memory, or of twice as much.",
            labels=["memory"],
        )
        shares.add_metric(["same"], disk.share_found)
        shares.add_metric(["twice"], disk.share_found_by_twice)
        yield shares
    ahead = disk.look_ahead
    yield _by_outcome(
        f"{namespace}_experts_prefetched",
        "Experts that a step's layer had read for the next one: used there since, or not.",
        {"used": ahead.prefetched_used, "unused": ahead.prefetched - ahead.prefetched_used},
    )
    yield _by_outcome(
        f"{namespace}_selections_predicted",
        "Experts that layers of steps chose where the layer before had predicted the choice: "
        "right, or wrong.",
        {"right": ahead.predicted, "wrong": ahead.checked - ahead.predicted},
    )


def slot_metrics(slots: SlotStats | None, namespace: str) -> Iterator[Metric]:
    """Metrics of experts that steps keep besides those that live on the device; none if they keep
    none."""
    if slots is None:
        return
    yield GaugeMetricFamily(
        f"{namespace}_expert_slots",
        "Experts of each layer that decode steps can keep on the parent's device besides those "
        "that live there.",
        value=slots.num_slots,
    )
    yield CounterMetricFamily(
        f"{namespace}_selections_in_slots",
        "Those of selections_total whose expert was in a slot of decode steps.",
        value=slots.found,
    )
    yield _by_outcome(
        f"{namespace}_experts_fetched",
        "Experts that decode steps read over the bus: kept in a slot, or dropped.",
        {"kept": slots.kept, "dropped": slots.fetched - slots.kept},
    )
    yield CounterMetricFamily(
        f"{namespace}_experts_fetched_bytes",
        "Bytes of these.",
        value=slots.fetched_bytes,
    )


def memory_metrics(memory: ExpertMemoryStats | None, namespace: str) -> Iterator[Metric]:
    """Memory of the parent's device that experts give back; nothing if they cannot."""
    if memory is None:
        return
    family = GaugeMetricFamily(
        f"{namespace}_expert_device_bytes",
        "Memory of the parent's GPU for experts that may leave it: taken now, at most, at least.",
        labels=["which"],
    )
    held = {"held": memory.held_bytes, "most": memory.most_bytes, "least": memory.least_bytes}
    for which, num_bytes in held.items():
        family.add_metric([which], num_bytes)
    yield family
    yield _by_outcome(
        f"{namespace}_expert_memory_changes",
        "How often experts gave memory of the parent's GPU back, or took it again.",
        {"given_back": memory.num_cuts, "taken": memory.num_returns},
    )


def daemon_memory_metrics(
    memory: Mapping[str, ExpertMemoryStats], namespace: str
) -> Iterator[Metric]:
    """The same of daemons' devices, of those of which experts may leave; nothing without any."""
    if not memory:
        return
    held = GaugeMetricFamily(
        f"{namespace}_daemon_expert_bytes",
        "Bytes of experts that may leave a daemon's GPU: there now, at most, at least.",
        labels=["owner", "which"],
    )
    changes = CounterMetricFamily(
        f"{namespace}_daemon_expert_memory_changes",
        "How often experts gave memory of a daemon's GPU back, or took it again.",
        labels=["owner", "outcome"],
    )
    for name, each in memory.items():
        for which in ("held", "most", "least"):
            held.add_metric([name, which], getattr(each, f"{which}_bytes"))
        changes.add_metric([name, "given_back"], each.num_cuts)
        changes.add_metric([name, "taken"], each.num_returns)
    yield held
    yield changes


def move_metrics(moves: MoveStats, namespace: str) -> Iterator[Metric]:
    """Counters of experts that were moved while serving."""
    yield _by_outcome(
        f"{namespace}_expert_move_rounds",
        "Rounds of moves that were decided on: applied, or given up.",
        {"applied": moves.rounds, "given_up": moves.rounds_not_applied},
    )
    yield CounterMetricFamily(
        f"{namespace}_experts_moved",
        "Experts that came to another owner, each in exchange for one of its own.",
        value=moves.experts_moved,
    )
    yield GaugeMetricFamily(
        f"{namespace}_expert_move_pause_seconds",
        "How long requests had to wait for the last round of moves.",
        value=moves.last_pause_s,
    )
