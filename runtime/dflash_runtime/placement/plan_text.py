"""A plan as a person reads it: what goes where, what was chosen, and what was not."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_runtime.placement.plan import Alternative, DeviceBudget, Plan, RoomStatus

_GIB = 1 << 30
_COLUMN = 8
"""Characters of the first column, at least."""


def plan_text(plan: Plan) -> str:
    """A line for each device that has experts, the choice, the alternatives, the reason.

    Sizes in GiB; speeds in tokens a second, of prompts for 512 and 4,096 tokens.
    """
    width = max([_COLUMN, *(len(each.name) + 2 for each in plan.budgets)])
    lines = [each.name.ljust(width) + _budget(each, plan) for each in plan.budgets]
    forecast = plan.forecast
    lines.append(
        "chosen".ljust(width)
        + f"{plan.name}    {_speed(forecast.decode)} tok/s, prompts "
        + f"{_speed(forecast.prompt_512)} · {_speed(forecast.prompt_4096)}; "
        + f"{plan.share_here * 100:.0f} % of selections here "
        + f"({_evidence(plan.origin.heat_tokens)})"
    )
    others = "; ".join(_alternatives(plan))
    if others:
        lines.append(" " * width + others)
    lines.append(" " * width + plan.reason)
    if plan.room.status is not RoomStatus.OK:
        lines.append(
            " " * width + f"room for experts: {plan.room.status}, {plan.room.had:,} of "
            f"{plan.room.asked:,}; recommended are {plan.room.recommended:,}"
        )
    return "\n".join(lines) + "\n"


def _budget(budget: DeviceBudget, plan: Plan) -> str:
    parts = [f"{budget.free_bytes / _GIB:.1f} GiB "]
    if budget.trunk_bytes:
        parts.append(f"{budget.trunk_bytes / _GIB:.1f} trunk")
    if budget.cache_bytes:
        setup = plan.setup
        parts.append(
            f"{budget.cache_bytes / _GIB:.1f} keys and values ({setup.context:,}, {setup.kv_type})"
        )
    if budget.work_bytes:
        parts.append(f"{budget.work_bytes / _GIB:.1f} work")
    experts = f"{budget.expert_bytes / _GIB:.1f} experts: {budget.num_experts:,}"
    experts += f" of {plan.num_experts:,}"
    if budget.num_replicas:
        experts += f", {budget.num_replicas:,} of them second copies"
    if budget.disk_bytes:
        experts += f", {budget.disk_bytes / _GIB:.1f} of them on the disk"
    if budget.limit_bytes is not None:
        experts += f" (at most {budget.limit_bytes >> 20:,} MiB were asked for)"
    return "  ".join([*parts, experts])


def _alternatives(plan: Plan) -> Iterator[str]:
    """Other options of the same device in one item, the others in one each."""
    here = [
        f"{each.name} {_speed(each.forecast.decode)}"
        for each in plan.alternatives
        if each.forecast is not None and not each.why_not and each.device == str(plan.setup.device)
    ]
    if here:
        yield ", ".join(here)
    for each in plan.alternatives:
        if each.forecast is None or each.why_not or each.device != str(plan.setup.device):
            yield _other(each, plan)


def _other(each: Alternative, plan: Plan) -> str:
    if each.forecast is None and each.device == str(plan.setup.device):
        return f"{each.name} {each.why_not}"
    if each.forecast is None:
        return f"{each.name} on {each.device}: {each.why_not}"
    if each.why_not:
        return f"{each.name} {each.why_not}: would be {_speed(each.forecast.decode)}"
    return f"{each.name} on {each.device} {_speed(each.forecast.decode)}"


def _speed(tokens_per_s: float) -> str:
    """Three digits at most that count."""
    if tokens_per_s < 10:
        return f"{tokens_per_s:.1f}"
    if tokens_per_s < 1000:
        return f"{tokens_per_s:.0f}"
    digits = len(f"{tokens_per_s:.0f}") - 2
    return f"{round(tokens_per_s, -digits):,.0f}"


def _evidence(num_tokens: int) -> str:
    if not num_tokens:
        return "no heat yet: all experts count alike"
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if num_tokens >= size:
            return f"heat of {num_tokens / size:.1f} {unit} tokens"
    return f"heat of {num_tokens} tokens"
