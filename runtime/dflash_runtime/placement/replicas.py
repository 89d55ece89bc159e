"""Replicas: second copies of experts in room that is left over on devices of one numeric class, and
which of an expert's owners answers for it.

Copies change no bit, as any owner of the class computes the same. In steps they let the fullest
owner of a layer have less to do, without moving weights when heat changes; in prompts the owners
share a chunk's pairs (see `experts.pairs.shared_routing`). Owners of other classes get none: their
copies would be for failure only, and the fallback is that already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_protocol.ids import BoolArray, F64Array, I64Array
from dflash_protocol.placement import Placement
from dflash_runtime.placement.cost import LOCAL
from dflash_runtime.placement.options import Option, ParentOptions

_ALIKE = 32
"""Neighbouring tokens of a prompt choose alike: the selections of a chunk vary as if so many tokens
were one. An assumption; with independent tokens, sharing a chunk's pairs would gain hardly anything
(published traces: 45 % of selections repeat at the next token, 80 % within eight)."""

_WORTH = 1e-3
"""Copies are made if they save this part of what their layer's experts take, at least: they
take room that nothing else needs, and time to load."""

_TRIES = 6
"""How often copies that the allocator's rounding makes too large are made fewer."""


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """An assignment with second copies.

    Shapes: holders [sides, L, E], who has each expert; answering [L, E], the one that answers.
    """

    holders: BoolArray
    answering: I64Array
    saved_s: float
    """What they save of the planned request, in seconds."""

    @property
    def num_copies(self) -> int:
        return int(np.maximum(self.holders.sum(axis=0) - 1, 0).sum())


def choose_answering(loads: F64Array, holders: BoolArray, begun_s: F64Array) -> I64Array:
    """Who answers for each expert, so that the fullest owner of each layer has least to do.

    The hottest experts are given first, each to the owner that then ends first; then experts of
    the fullest owner move while that helps. With equal speeds the fullest has at most (owners - 1)
    times the largest load more than in the best choice. Deterministic.
    Shapes: loads [owners, L, E], seconds of each expert's selections there; holders the same, each
    expert that exists has one at least; begun_s [owners, L], what owners take in any case; result
    [L, E], 0 for experts that do not exist.
    """
    num_owners, num_layers, num_experts = holders.shape
    layers = np.arange(num_layers)
    num_holders = holders.sum(axis=0)
    chosen = holders.argmax(axis=0)
    alone = holders & (num_holders == 1)
    total = begun_s + np.where(alone, loads, 0.0).sum(axis=2)
    heat = np.where(num_holders > 1, np.where(holders, loads, 0.0).max(axis=0), -1.0)
    order = np.argsort(-heat, axis=1, kind="stable")
    for place in range(int((num_holders > 1).sum(axis=1).max(initial=0))):
        expert = order[:, place]
        is_open = num_holders[layers, expert] > 1
        own = loads[:, layers, expert]
        ends = np.where(holders[:, layers, expert], total + own, np.inf)
        taker = ends.argmin(axis=0)
        chosen[layers[is_open], expert[is_open]] = taker[is_open]
        total[taker[is_open], layers[is_open]] += own[taker[is_open], layers[is_open]]
    for _ in range(4 * num_experts):
        fullest = total.argmax(axis=0)
        most = total[fullest, layers]
        mine = chosen == fullest[:, None]
        left = most[:, None] - loads[fullest, layers]  # [L, E]
        others = np.arange(num_owners)[:, None, None] != fullest[:, None]
        ends = np.where(
            holders & others & mine, np.maximum(total[:, :, None] + loads, left), np.inf
        )
        by_layer = np.moveaxis(ends, 0, 1).reshape(num_layers, -1)
        best = by_layer.argmin(axis=1)
        moved = layers[by_layer[layers, best] < most * (1 - 1e-9)]
        if not moved.size:
            break
        taker, expert = np.divmod(best[moved], num_experts)
        total[fullest[moved], moved] -= loads[fullest[moved], moved, expert]
        total[taker, moved] += loads[taker, moved, expert]
        chosen[moved, expert] = taker
    return np.asarray(np.where(num_holders > 0, chosen, 0))


def with_replicas(options: ParentOptions, option: Option, context: int) -> Replicas | None:
    """The assignment with copies of hot experts where they save time; None if there are none."""
    best: Replicas | None = None
    for members in _classes(options, option):
        found = _Filling(options, option, context, members).found()
        if found is not None and (best is None or found.saved_s > best.saved_s):
            best = found
    return best


def class_of(options: ParentOptions, owner_name: str) -> str:
    """The numeric class of an owner's device; empty: not known, or the parent's processor."""
    if owner_name in options.daemons:
        return options.daemons[owner_name].numeric_class
    return options.parent.numeric_class if owner_name == options.sides[LOCAL].name else ""


def _classes(options: ParentOptions, option: Option) -> list[tuple[int, ...]]:
    """Devices of one numeric class that have experts, by index of their side; those of daemons also
    without the parent's, which shares no chunk."""
    parent = options.parent
    by_class: dict[str, list[int]] = {}
    for index, side in enumerate(options.sides):
        numeric_class = class_of(options, side.name)
        if index == LOCAL and parent.shares_host_memory:
            numeric_class = ""
        has_some = ((option.owners == index) & options.arrays.exists).any()
        if numeric_class and not side.is_cpu and has_some:
            by_class.setdefault(numeric_class, []).append(index)
    found = [tuple(members) for members in by_class.values()]
    found += [members[1:] for members in found if members[0] == LOCAL]
    return [members for members in found if len(members) > 1]


def replicas_of(options: ParentOptions, option: Option, placement: Placement) -> Replicas | None:
    """The copies of a placement that was asked for; None if it has none."""
    owned = dict(zip(placement.owner_names, placement.owners, strict=True))
    names = [side.name for side in options.sides]
    holders = np.zeros((len(names), *option.owners.shape), np.bool_)
    for index, name in enumerate(names):
        for row, layer_id in enumerate(options.arrays.layer_ids.tolist()):
            if name in owned and layer_id in owned[name].by_layer:
                holders[index, row, owned[name].by_layer[layer_id]] = True
    if (holders.sum(axis=0) <= 1).all():
        return None
    classes = {name: class_of(options, name) for name in placement.owner_names}
    routing = replace(placement, numeric_classes=classes).routing
    side_of = np.array([names.index(name) for name in placement.owner_names])
    answering = option.owners.copy()
    for row, layer_id in enumerate(options.arrays.layer_ids.tolist()):
        owner_index = routing[layer_id].owner_index
        answering[row, : owner_index.size] = side_of[owner_index]
    return Replicas(holders, answering, saved_s=0.0)


def has_room(options: ParentOptions, option: Option, replicas: Replicas, *, context: int) -> bool:
    """Whether owners with copies have room for all that they hold."""
    copied = replicas.holders & (replicas.holders.sum(axis=0) > 1)
    members = np.flatnonzero(copied.any(axis=(1, 2))).tolist()
    limits = _limits(options, option, context, members)
    return all(
        options.used_bytes(np.where(replicas.holders[index], index, -1), index) <= limit
        for index, limit in zip(members, limits, strict=True)
    )


def _limits(
    options: ParentOptions, option: Option, context: int, members: Sequence[int]
) -> list[float]:
    """Bytes of experts that owners have room for."""
    owners = option.owners
    exists = options.arrays.exists
    others = [i for i in range(1, len(options.sides)) if ((owners == i) & exists).any()]
    return [
        options.limit_of(index, option.chunk)
        if index != LOCAL
        else options.expert_limit(context, option.chunk, others, owners=owners)
        for index in members
    ]


class _Filling:
    """Fills the room of one class's devices. Used once."""

    def __init__(
        self, options: ParentOptions, option: Option, context: int, members: Sequence[int]
    ) -> None:
        self._options, self._option, self._members = options, option, np.array(members)
        self._model, arrays = options.model(option.chunk), options.arrays
        owners = option.owners
        sides = range(len(options.sides))
        self._held = np.stack([(owners == index) & arrays.exists for index in sides])
        self._bytes = np.stack([options.expert_bytes[index] for index in members])
        self._limits = np.array(_limits(options, option, context, members))
        used = [options.used_bytes(owners, index) for index in members]
        self._room = np.maximum(self._limits - np.array(used), 0.0)
        self._copies, self._targets = self._candidates()

    def found(self) -> Replicas | None:
        """The copies that are worth it and fit, or None."""
        depths = self._depths()
        seconds = np.stack([self._layers_s(np.minimum(k, self._copies)) for k in depths])
        for _ in range(_TRIES):
            taken = self._taken(depths, seconds)
            if not taken.any():
                return None
            holders = self._holders(taken)
            used = [
                self._options.used_bytes(np.where(holders[index], index, -1), index)
                for index in self._members.tolist()
            ]
            excess = np.array(used) - self._limits
            if (excess <= 0).all():
                rows = np.searchsorted(depths, taken)
                layers = np.arange(taken.size)
                saved_s = float((seconds[0] - seconds[rows, layers]).sum())
                return Replicas(holders, self._answering(holders), saved_s)
            self._room = np.maximum(self._room - np.maximum(excess, 0.0), 0.0)
        return None

    def _depths(self) -> I64Array:
        """Numbers of copies of a layer that are priced."""
        most = int(self._copies.max(initial=0))
        doubled = [0, *(1 << power for power in range(most.bit_length()))]
        return np.array([each for each in doubled if each <= most], np.int64)

    def _candidates(self) -> tuple[I64Array, I64Array]:
        """How many experts of each layer may have a second copy, and where: the hottest to the
        member that has least to do. Devices without experts of a layer get none, as steps would
        have to ask them too; the parent's is asked in any case.

        Shapes: [L]; [L, E] by place of the expert among the layer's hottest, -1 for none.
        """
        arrays, members = self._options.arrays, self._members
        layers = np.arange(len(arrays.layer_ids))
        held = self._held[members]
        able = held.any(axis=2) | (members == LOCAL)[:, None]
        loads = np.where(held, arrays.decode, 0.0).sum(axis=2)
        targets = np.full(arrays.hottest.shape, -1, np.int64)
        for place in range(arrays.hottest.shape[1]):
            expert = arrays.hottest[:, place]
            owner = held[:, layers, expert]  # [members, L]
            takers = np.where(able & ~owner, loads, np.inf)
            target = takers.argmin(axis=0)
            is_some = owner.any(axis=0) & np.isfinite(takers[target, layers])
            targets[is_some, place] = target[is_some]
            half = np.where(is_some, arrays.decode[layers, expert] / 2, 0.0)
            loads[target, layers] += half
            loads[owner.argmax(axis=0), layers] -= half
        return (targets >= 0).sum(axis=1), targets

    def _is_copied(self, counts: I64Array) -> BoolArray:
        """Whether a layer's experts, by place, are among the first so many candidates."""
        is_able = self._targets >= 0
        return np.asarray(is_able & (np.cumsum(is_able, axis=1) <= counts[:, None]))

    def _holders(self, counts: I64Array) -> BoolArray:
        """Who has each expert with so many copies in each layer."""
        holders = self._held.copy()
        rows, places = np.nonzero(self._is_copied(counts))
        experts = self._options.arrays.hottest[rows, places]
        holders[self._members[self._targets[rows, places]], rows, experts] = True
        return holders

    def _answering(self, holders: BoolArray) -> I64Array:
        """Who answers in steps."""
        model, arrays = self._model, self._options.arrays
        most = arrays.most_used
        begun = np.zeros(holders.shape[:2])
        of_one = np.zeros(holders.shape[:2])
        for index, times in enumerate(model.step_times):
            of_one[index] = (
                times[:, 1] if most == 1 else (times[:, most] - times[:, 1]) / (most - 1)
            )
            begun[index] = np.maximum(times[:, 1] - of_one[index], 0.0)
        begun *= holders.any(axis=2)
        return choose_answering(of_one[:, :, None] * arrays.decode, holders, begun)

    def _layers_s(self, counts: I64Array) -> F64Array:
        """Seconds of each layer's experts in the planned request, with a chunk's selections as they
        vary. Shapes: counts, result [L]."""
        model, prefill, members = self._model, self._options.arrays.prefill, self._members
        request = model.request
        holders = self._holders(counts)
        answering = self._answering(holders) if counts.any() else self._option.owners
        rows = min(request.prompt, model.chunk)
        # The parent's device has its experts' rows already: only daemons share.
        is_shared = (holders.sum(axis=0) > 1) & ~holders[LOCAL]
        own = np.stack([
            np.where((answering == index) & ~is_shared, prefill, 0.0)
            for index in range(len(holders))
        ])  # fmt: skip
        pairs = own.sum(axis=2)
        shared = np.where(is_shared, prefill, 0.0).sum(axis=1)
        level = (pairs[members[members != LOCAL]].sum(axis=0) + shared) / (members != LOCAL).sum()
        spread = np.sqrt((own * (1.0 - own)).sum(axis=2) * _ALIKE / rows)
        pairs[members] += spread[members]
        # What several have is given to those with less, until they end together.
        for index in members[members != LOCAL]:
            pairs[index] = np.where(shared > 0, np.maximum(pairs[index], level), pairs[index])
        prompt = np.minimum(*model.prompt_of(self._option.owners, request.prompt, pairs))
        return np.asarray(request.written * model.step_layers_s(answering) + prompt)

    def _taken(self, depths: I64Array, seconds: F64Array) -> I64Array:
        """How many copies each layer gets: what saves most for its bytes first. Shape: [L]."""
        num_layers = seconds.shape[1]
        room, at = self._room.copy(), np.zeros(num_layers, np.int64)
        needed = np.stack([self._bytes_by_member(k) for k in depths])  # [depths, members, L]
        least = _WORTH * seconds[0]
        is_open = np.ones(seconds.shape, np.bool_)
        layers = np.arange(num_layers)
        while True:
            saved = seconds[at, layers] - seconds
            more = needed - needed[at, :, layers].T
            is_open &= (np.arange(depths.size)[:, None] > at) & (saved > least)
            is_open &= (more <= room[:, None]).all(axis=1)
            if not is_open.any():
                return depths[at]
            worth = np.where(is_open, saved / np.maximum(more.sum(axis=1), 1.0), -np.inf)
            depth, layer = np.unravel_index(int(worth.argmax()), worth.shape)
            room -= more[depth, :, layer]
            at[layer] = depth

    def _bytes_by_member(self, depth: int) -> F64Array:
        """Bytes of so many copies in each layer. Shape: result [members, L]."""
        is_copied = self._is_copied(np.minimum(depth, self._copies))
        counts = np.stack([
            (is_copied & (self._targets == row)).sum(axis=1) for row in range(self._members.size)
        ])  # fmt: skip
        return np.asarray(counts * self._bytes)
