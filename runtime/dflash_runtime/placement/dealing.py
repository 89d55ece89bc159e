"""Which of several owners gets which of the experts that do not stay on the parent's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dflash_protocol.ids import BoolArray, F64Array, I64Array
from dflash_runtime.placement.cost import CostModel
from dflash_runtime.placement.search import SplitProblem, solve

_PRICED = 8
"""How many numbers of experts are priced where devices and processors share a layer's."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Owners that share the experts of others, by index in the model's `sides`.

    Shapes: parts and limits [owners], expert_bytes [owners, L].
    """

    others: tuple[int, ...]
    parts: F64Array
    """The part of the experts' selections that each has, in sum 1."""
    limits: F64Array
    """Bytes of experts that each has room for."""
    expert_bytes: F64Array

    @classmethod
    def of(
        cls,
        model: CostModel,
        others: Sequence[int],
        limits: Sequence[float],
        *,
        expert_bytes: F64Array,
        num_elsewhere: float,
    ) -> Group:
        """Parts by speed, as far as memory reaches: devices first, processors what is left.

        `num_elsewhere`: about how many experts they share, of those that are hottest but the
        parent's.
        """
        arrays, kept = model.arrays, np.array(limits, np.float64)
        of_expert = np.maximum(expert_bytes.mean(axis=1), 1.0)
        room = np.minimum(kept / of_expert, num_elsewhere) / max(num_elsewhere, 1.0)
        speed = np.array([
            1.0 / max(1e-12, float(model.step_times[index][:, arrays.most_used].sum()))
            for index in others
        ])  # fmt: skip
        parts, left = np.zeros(len(others)), 1.0
        is_cpu = np.array([model.sides[index].is_cpu for index in others])
        # Devices get the hottest, so that their selections are more than their experts.
        coldest = np.sort(arrays.decode[arrays.exists])[: max(1, int(num_elsewhere))]
        in_devices = min(coldest.size, int(room[~is_cpu].sum() * num_elsewhere))
        if in_devices:
            of_devices = coldest[coldest.size - in_devices :].sum() / coldest.sum()
            room[~is_cpu] *= max(1.0, of_devices * num_elsewhere / in_devices)
        for tier in (~is_cpu, is_cpu):
            for _ in range(len(others)):  # what does not fit one goes to the others
                open_ = tier & (parts < room - 1e-12)
                if left <= 1e-12 or not open_.any():
                    break
                weights = np.where(open_, speed, 0.0)
                more = np.minimum(left * weights / weights.sum(), room - parts)
                parts += np.maximum(more, 0.0)
                left = 1.0 - float(parts.sum())
        total = float(parts.sum())
        parts = parts / total if total > 0 else np.full(len(others), 1 / len(others))
        return cls(tuple(others), parts, kept, expert_bytes)


def deal(model: CostModel, group: Group, elsewhere: BoolArray) -> I64Array | None:
    """The owner of each expert that is `elsewhere`, LOCAL for the others; None if they do not fit.

    Owners of a tier get hot and cold experts in turns. If devices have not room for all, they get
    the hottest ones, and processors the others.
    Shapes: elsewhere, result [L, E].
    """
    owners = np.zeros(elsewhere.shape, np.int64)
    if len(group.others) == 1:
        used = float((elsewhere.sum(axis=1) * group.expert_bytes[0]).sum())
        owners[elsewhere] = group.others[0]
        return owners if used <= group.limits[0] * (1 + 1e-12) else None
    is_cpu = np.array([model.sides[index].is_cpu for index in group.others])
    on_devices = elsewhere
    if is_cpu.any() and not is_cpu.all():
        on_devices = _in_devices(model, group, elsewhere, is_cpu)
    for tier, mask in ((~is_cpu, on_devices), (is_cpu, elsewhere & ~on_devices)):
        if tier.any() and mask.any():
            _take_turns(model, group, np.flatnonzero(tier), mask, owners)
        elif mask.any():
            _take_turns(model, group, np.flatnonzero(~tier), mask, owners)
    return owners if _moved_within_limits(model, group, owners) else None


def dealt_by_price(model: CostModel, group: Group, elsewhere: BoolArray) -> I64Array | None:
    """As `deal`, for a group of devices and processors: how many of each layer's experts devices
    get is chosen by what layers then take, local ones included. None if there are not both.

    Each number is priced for all layers at once, some numbers only, the others on straight lines.
    """
    is_cpu = np.array([model.sides[index].is_cpu for index in group.others])
    if is_cpu.all() or not is_cpu.any():
        return None
    devices, cpus = np.flatnonzero(~is_cpu), np.flatnonzero(is_cpu)
    most = elsewhere.sum(axis=1)
    rank = _ranks(model, elsewhere)

    def assignment(in_devices: I64Array) -> I64Array:
        owners = np.zeros(elsewhere.shape, np.int64)
        first = elsewhere & (rank < in_devices[:, None])
        _take_turns(model, group, devices, first, owners)
        _take_turns(model, group, cpus, elsewhere & ~first, owners)
        return owners

    width = int(most.max())
    numbers = np.unique(np.linspace(0, width, min(width, _PRICED) + 1).astype(np.int64))
    # A layer that is whole in devices may need no stop: that number is priced for each.
    seconds = np.stack([model.layers_s(assignment(np.minimum(each, most))) for each in numbers])
    times = np.full((width + 1, most.size), np.inf)
    for layer in range(most.size):
        known = numbers < most[layer]
        last = seconds[np.searchsorted(numbers, most[layer]), layer]
        count = int(most[layer])
        if known.any():
            times[:count, layer] = np.interp(
                np.arange(count), numbers[known], seconds[known, layer]
            )
        times[count, layer] = last
    problem = SplitProblem(
        times,
        most,
        group.expert_bytes[devices].max(axis=0),
        group.expert_bytes[cpus].max(axis=0),
        float(group.limits[devices].sum()),
        float(group.limits[cpus].sum()),
    )
    found = solve(problem)
    if found is None:
        return None
    owners = assignment(found)
    return owners if _moved_within_limits(model, group, owners) else None


def _in_devices(
    model: CostModel, group: Group, elsewhere: BoolArray, is_cpu: BoolArray
) -> BoolArray:
    """Which experts the devices of a group have room for: the hottest ones."""
    limit = float(group.limits[~is_cpu].sum())
    sizes = group.expert_bytes[~is_cpu].max(axis=0)[:, None] * elsewhere
    heat = np.where(elsewhere, model.arrays.decode, -1.0).reshape(-1)
    order = np.argsort(-heat, kind="stable")
    fits = np.cumsum(sizes.reshape(-1)[order]) <= limit
    result = np.zeros(elsewhere.size, np.bool_)
    result[order[fits]] = True
    return result.reshape(elsewhere.shape) & elsewhere


def _take_turns(
    model: CostModel, group: Group, members: I64Array, mask: BoolArray, owners: I64Array
) -> None:
    """Deal experts by heat, each to the member that lacks most of its part."""
    turns = _turns(tuple(group.parts[members].tolist()), mask.shape[1])
    rank = _ranks(model, mask)
    members_of = np.array(group.others)[members]
    owners[mask] = members_of[turns[rank[mask]]]


@lru_cache(maxsize=256)
def _turns(parts: tuple[float, ...], num_turns: int) -> I64Array:
    """Who is dealt each expert: the member that lacks most of its part. Shapes: result [turns]."""
    total = sum(parts)
    each = [part / total if total > 0 else 1 / len(parts) for part in parts]
    members, counts, turns = range(len(parts)), [0] * len(parts), []
    for turn in range(num_turns):
        # Of equals the last after odd turns: so the hottest do not all go to the first.
        order = members if turn % 2 == 0 else reversed(members)
        pick = max(order, key=lambda member: each[member] * (turn + 1) - counts[member])
        turns.append(pick)
        counts[pick] += 1
    return np.array(turns, np.int64)


def _ranks(model: CostModel, mask: BoolArray) -> I64Array:
    """The place of each masked expert by heat among those of its layer. Shapes: [L, E]."""
    hottest = model.arrays.hottest
    counted = np.cumsum(np.take_along_axis(mask, hottest, axis=1), axis=1) - 1
    result = np.empty_like(hottest)
    np.put_along_axis(result, hottest, counted, axis=1)
    return result


def _moved_within_limits(model: CostModel, group: Group, owners: I64Array) -> bool:
    """Move the coldest experts of owners that lack room to those that have some; False if there is
    none."""
    heat = model.arrays.decode
    used = np.array([
        float(((owners == index).sum(axis=1) * group.expert_bytes[row]).sum())
        for row, index in enumerate(group.others)
    ])  # fmt: skip
    for row, index in enumerate(group.others):
        if used[row] <= group.limits[row]:
            continue
        layers, experts = np.nonzero(owners == index)
        for at in np.argsort(heat[layers, experts], kind="stable"):
            if used[row] <= group.limits[row]:
                break
            layer, expert = layers[at], experts[at]
            room = group.limits - used - group.expert_bytes[:, layer]
            room[row] = -1.0
            taker = int(np.argmax(room))
            if room[taker] < 0:
                return False
            owners[layer, expert] = group.others[taker]
            used[row] -= group.expert_bytes[row, layer]
            used[taker] += group.expert_bytes[taker, layer]
        if used[row] > group.limits[row]:
            return False
    return True
