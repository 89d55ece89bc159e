"""From the option that was chosen to the plan that says all about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_protocol.ids import BoolArray, I32Array
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.placement.cost import LOCAL, PROMPTS, Price
from dflash_runtime.placement.moves import staged_bytes
from dflash_runtime.placement.options import Option, ParentOptions
from dflash_runtime.placement.plan import (
    TIE,
    Alternative,
    DeviceBudget,
    ExpertRoom,
    Forecast,
    Origin,
    Plan,
    RoomStatus,
    Setup,
    recommended_experts,
)
from dflash_runtime.placement.replicas import Replicas, class_of
from dflash_runtime.placement.situation import Situation
from dflash_runtime.placement.split import HOST_OWNER, make_placement
from dflash_runtime.placement.wishes import MoeMode, Wishes


@dataclass(frozen=True, slots=True, eq=False)
class ParentChoice:
    """The best option of one parent."""

    options: ParentOptions
    context: int
    option: Option
    others: tuple[Option, ...]
    replicas: Replicas | None = None
    """Second copies; the option's price is with them."""

    def held(self, index: int) -> BoolArray:
        """The experts that an owner has, copies included. Shape: [L, E]."""
        if self.replicas is not None:
            return np.asarray(self.replicas.holders[index])
        return np.asarray((self.option.owners == index) & self.options.arrays.exists)

    def num_copies(self, index: int) -> int:
        """How many of an owner's experts are second copies."""
        return int((self.held(index) & (self.option.owners != index)).sum())


def forecast_of(price: Price) -> Forecast:
    """Speeds of a price."""
    return Forecast(
        1.0 / max(price.step_s, 1e-9),
        *(length / max(price.prompt_s[length], 1e-9) for length in PROMPTS),
    )


def plan_of(
    situation: Situation,
    wishes: Wishes,
    chosen: ParentChoice,
    *,
    alternatives: tuple[Alternative, ...],
) -> Plan:
    """The plan of a choice."""
    options, option = chosen.options, chosen.option
    arrays, moe = options.arrays, situation.spec.moe
    owned: dict[str, OwnedExperts] = {}
    for index, side in enumerate(options.sides):
        mask = chosen.held(index)
        by_layer = {
            layer_id: np.flatnonzero(mask[row]).tolist()
            for row, layer_id in enumerate(arrays.layer_ids.tolist())
        }
        experts = OwnedExperts.from_lists(by_layer)
        if experts.num_experts or side.name in options.daemons:
            owned[side.name] = experts
    room = _room(options, wishes, chosen)
    prompts_here = arrays.layer_ids[option.price.offloaded].tolist()
    return Plan(
        Origin(situation.model_identity, situation.box.key, situation.shares.num_tokens),
        Setup(
            options.parent.device,
            chosen.context,
            options.kv_type,
            option.chunk,
            options.parent.cache_slots,
        ),
        replace(
            make_placement(moe, owned),
            answering=_answering(chosen, tuple(owned)),
            numeric_classes={name: class_of(options, name) for name in owned},
        ),
        tuple(prompts_here),
        option.mode,
        option.name,
        forecast_of(option.price),
        option.price.share_here,
        _budgets(chosen),
        room,
        alternatives,
        _reason(chosen, alternatives, wishes) + _replicas_reason(chosen),
    )


def _answering(chosen: ParentChoice, owner_names: tuple[str, ...]) -> dict[int, I32Array]:
    """Who answers for experts that have copies, by layer id; see `Placement.answering`."""
    if chosen.replicas is None:
        return {}
    places = [
        owner_names.index(side.name) if side.name in owner_names else -1
        for side in chosen.options.sides
    ]
    answering = np.array(places, np.int32)[chosen.replicas.answering]
    has_copy = chosen.replicas.holders.sum(axis=0) > 1
    return {
        layer.layer_id: np.where(has_copy[row], answering[row], np.int32(-1))[: layer.num_experts]
        for row, layer in enumerate(chosen.options.situation.spec.moe.layers)
        if has_copy[row].any()
    }


def _room(options: ParentOptions, wishes: Wishes, chosen: ParentChoice) -> ExpertRoom:
    """How many experts the parent's device could hold, as it is set up."""
    moe = options.situation.spec.moe
    total, recommended = moe.num_experts_total, recommended_experts(moe)
    asked = total
    if wishes.experts.num_local is not None:
        asked = wishes.experts.num_local * len(moe.layers)
    limit = options.expert_limit(chosen.context, chosen.option.chunk, range(1, len(options.sides)))
    sizes = np.sort(np.repeat(options.expert_bytes[LOCAL], options.arrays.num_experts))
    here = int(((chosen.option.owners == LOCAL) & options.arrays.exists).sum())
    had = max(here, int((np.cumsum(sizes) <= limit).sum()))
    status = RoomStatus.OK
    if not total:
        status = RoomStatus.EMPTY
    elif not had:
        status = RoomStatus.BUDGET_EXHAUSTED
    elif had < recommended:
        status = RoomStatus.BELOW_RECOMMENDED
    return ExpertRoom(status, had, asked, recommended)


def _budgets(chosen: ParentChoice) -> tuple[DeviceBudget, ...]:
    options, owners = chosen.options, chosen.option.owners
    exists = options.arrays.exists
    present = [i for i in range(1, len(options.sides)) if ((owners == i) & exists).any()]
    needs = options.needs(chosen.context, chosen.option.chunk, group=present)
    result = []
    for index in (LOCAL, *present):
        side = options.sides[index]
        held = chosen.held(index)
        num_experts, num_copies = int(held.sum()), chosen.num_copies(index)
        used = options.used_bytes(np.where(held, index, -1), index)
        is_mapped = index == LOCAL and options.parent.is_host
        of_disk = is_mapped or side.name == HOST_OWNER
        disk = chosen.option.price.disk_bytes if of_disk else 0
        if index == LOCAL:
            work = needs.total - needs.weights - needs.cache
            if any(options.sides[i].name == HOST_OWNER for i in present):
                work += staged_bytes(options.situation, options.parent)
            budget = DeviceBudget(
                str(options.parent.device), options.free_bytes(), needs.weights, needs.cache, work,
                used, num_experts, disk, num_copies,
            )  # fmt: skip
        else:
            daemon = options.daemons.get(side.name)
            free = options.host_bytes() if daemon is None else daemon.free_bytes
            if daemon is None and options.parent.shares_host_memory:
                free = max(0, free - needs.total - options.used_bytes(owners, LOCAL))
                if disk:  # the device's allocator rounds, what was priced does not
                    disk = max(disk, used - free)
            work = 0
            if daemon is not None:
                work = int(daemon.free_bytes - options.room_of(index, chosen.option.chunk))
            budget = DeviceBudget(side.name, free, 0, 0, work, used, num_experts, disk, num_copies)
        asked = options.asked_limit(index)
        result.append(replace(budget, limit_bytes=None if np.isinf(asked) else int(asked)))
    return tuple(result)


def _reason(chosen: ParentChoice, alternatives: Sequence[Alternative], wishes: Wishes) -> str:
    """One sentence that says why."""
    option = chosen.option
    if not wishes.fits:
        return f"Nothing was planned: {_unplanned(option.mode, str(chosen.options.parent.device))}."
    if wishes.experts.names_places:
        return "Experts are where they were asked for."
    if wishes.experts.mode is not None:
        return f"It is the fastest with --moe-mode={wishes.experts.mode}."
    if option.mode is MoeMode.RESIDENT:
        return f"All experts fit {chosen.options.parent.device}."
    possible = [each for each in alternatives if each.forecast is not None and not each.why_not]
    share = f"{option.price.share_here * 100:.0f} % of the selections stay on the device"
    if not possible:
        return f"Nothing else fits; {share}."
    best = max(possible, key=lambda each: each.forecast.decode if each.forecast else 0.0)
    assert best.forecast is not None
    ratio = forecast_of(option.price).decode / best.forecast.decode
    if ratio * TIE < 1.0:
        return (
            f"The planned request is not faster with {best.name}, within {(TIE - 1) * 100:.0f} %, "
            f"though that writes {1 / ratio:.2f} times as fast; {share}."
        )
    if ratio < 1.0:
        return (
            f"It is simpler than {best.name}, and as fast within {(TIE - 1) * 100:.0f} %; {share}."
        )
    return f"It writes {ratio:.2f} times as fast as {best.name}; {share}."


def _unplanned(mode: MoeMode, device: str) -> str:
    """Where experts are without a plan."""
    if mode is MoeMode.RESIDENT:
        return f"{device} computes all experts"
    return "experts are where they were asked for, or in equal shares"


def _replicas_reason(chosen: ParentChoice) -> str:
    """A second sentence, on copies, if there are any."""
    if chosen.replicas is None or chosen.replicas.saved_s <= 0:
        return ""
    num_copies, saved_s = chosen.replicas.num_copies, chosen.replicas.saved_s
    percent = 100 * saved_s / (chosen.option.price.request_s + saved_s)
    saved = f"{percent:.1f} %" if percent >= 0.1 else "less than 0.1 %"
    return f" {num_copies:,} experts have a second copy, which saves {saved} of the time."
