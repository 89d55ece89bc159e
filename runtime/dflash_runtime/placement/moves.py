"""Which experts should change places between owners, while serving.

A round of swaps is worth it if the time that it saves over the next tokens is a multiple of what it
costs. What is saved follows from how often each expert is expected to be chosen, by the heat: hot
experts of slow owners change places with cold ones of fast owners, which have other bits; among
owners of one numeric class the one with most to do gives some of it to another one. Pure: no
device, no clock but tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TypeAlias

import numpy as np

from dflash_adapters.spec import MoeSpec
from dflash_protocol.ids import BoolArray, F64Array, I32Array, I64Array, Phase
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_runtime.compute.room import staged_slots
from dflash_runtime.placement.balancing import Share, apply, best_exchange
from dflash_runtime.placement.heat import ALIKE, Heat, phase_index
from dflash_runtime.placement.situation import ParentDevice, Situation
from dflash_runtime.placement.speeds import Side, copy_rate, host_side, local_side
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER

HORIZON = 2000
"""Written tokens over which a round has to pay off."""
RESTING = 1000
"""Written tokens for which an expert stays where it was moved to."""
FEWEST_TOKENS = 200
"""Written tokens between two decisions."""

_CERTAINTY = 1.0
"""How many standard deviations of what was counted are taken off the gain of a swap: on steady
traffic differences between experts are mostly chance."""
_FASTER = 2.0
"""How many times as fast an owner of another class is that hot experts should come to."""
_MOST_TO_BALANCE = 4
"""Swaps of a layer in a round among owners of one class."""
_HANDOVER_S = 0.1
"""Seconds of a round in which daemons have to be given other experts, whatever their number."""
_Priced: TypeAlias = "tuple[float, float, Swap]"
"""What a swap saves and costs, in seconds."""
_DECODE = phase_index(Phase.DECODE)


@dataclass(frozen=True, slots=True, eq=False)
class OwnerPrice:
    """What experts cost at one owner. Shapes: both [L]."""

    selection_s: F64Array
    """Seconds of a step for each selection that it computes."""
    arrival_s: F64Array
    """Seconds that an expert takes to come there, beside steps."""
    most_layers: int | None = None
    """In how many layers a round may exchange experts there; None: in all."""


@dataclass(frozen=True, slots=True, eq=False)
class MovePrices:
    """What moving experts costs and saves."""

    owners: Mapping[str, OwnerPrice]
    """Those between which they may move, by name."""
    prompt_s: float = 0.0
    """Seconds that a prompt's token takes, if it has to be computed again."""


def move_prices(
    situation: Situation, parent: ParentDevice, *, prompt_s: float = 0.0
) -> MovePrices | None:
    """Of one parent and its processor; None if this, or the copies, were not measured."""
    host, moe = host_side(situation, parent), situation.spec.moe
    rate = copy_rate(situation.box, parent)
    if host is None or not rate or not moe.layers:
        return None
    sizes = np.array([each.expert_bytes for each in moe.layers], np.float64)
    used = np.array([each.num_experts_used for each in moe.layers])
    owners = {
        LOCAL_OWNER: OwnerPrice(
            _selection_s(local_side(situation, parent), sizes, used), sizes / rate
        ),
        HOST_OWNER: OwnerPrice(_selection_s(host, sizes, used), np.zeros(sizes.size)),
    }
    return MovePrices(owners, prompt_s)


def _selection_s(side: Side, sizes: F64Array, used: I64Array) -> F64Array:
    """An owner's fixed part of a layer remains. Shapes: each [L]."""
    times = side.step_s(sizes, int(used.max()))
    rows = np.arange(len(used))
    slope_s = (times[rows, used] - times[rows, 1]) / np.maximum(used - 1, 1)
    return np.asarray(np.where(used == 1, times[rows, 1], slope_s))


def staged_bytes(situation: Situation, parent: ParentDevice) -> int:
    """Memory of the parent's device for experts that are about to move there; 0 if its copies were
    not measured."""
    if not copy_rate(situation.box, parent):
        return 0
    num_slots, slot_bytes = staged_slots(situation.spec.moe.layers, situation.most_swaps)
    return num_slots * slot_bytes


@dataclass(frozen=True, slots=True)
class Swap:
    """Two experts of a layer that change places, by global id."""

    layer_id: int
    arriving: int
    """The one that comes from `of` to `to`."""
    leaving: int
    to: str = LOCAL_OWNER
    of: str = HOST_OWNER


@dataclass(frozen=True, slots=True)
class MoveRound:
    """Swaps that are worth it, the best first."""

    swaps: tuple[Swap, ...]
    saved_s: float
    """Over the next HORIZON written tokens."""
    cost_s: float
    """Of bringing the experts there."""
    num_tokens: int
    """Written tokens counted when it was decided."""

    def is_worth(self, min_gain: float, lost_s: float) -> bool:
        """Whether it still is, if prefixes that took `lost_s` to compute are lost."""
        return self.saved_s >= min_gain * (self.cost_s + lost_s)


class MovePolicy:
    """Decides rounds of swaps for one model. Used by one thread.

    Remembers when experts were moved.
    """

    def __init__(self, moe: MoeSpec, prices: MovePrices, *, most: int, min_gain: float) -> None:
        """`most`: swaps of a round; `min_gain`: how many times what it costs a swap has to save."""
        self._layers = moe.layers
        self._prices, self._most, self._min_gain = prices, most, min_gain
        shape = len(moe.layers), max(each.num_experts for each in moe.layers)
        self._moved_at: I64Array = np.full(shape, -RESTING, np.int64)
        """By tokens counted."""
        self._decided_at = -FEWEST_TOKENS
        self._has_more = False
        """Whether the last round left swaps out that were worth it too."""

    def decide(self, placement: Placement, heat: Heat) -> MoveRound | None:
        """The next round, either across classes or within them; None: nothing is worth it, or too
        few tokens were written since the last decision."""
        now = heat.num_tokens(Phase.DECODE)
        if now >= self._decided_at + FEWEST_TOKENS:
            self._decided_at = now
        elif not self._has_more:
            return None
        layer_ids = [layer.layer_id for layer in self._layers]
        sight = _Sight(placement, self._prices, layer_ids, *self._expected(heat))
        may_move = sight.has & (now >= self._moved_at + RESTING)
        self._has_more = False
        upward, balancing = list[_Priced](), list[_Priced]()
        for row, layer in enumerate(self._layers):
            if layer.layer_id in placement.answering:
                continue  # its copies were planned for where its experts are
            upward += self._upward(sight, may_move[:, row], row)
            balancing += self._balancing(sight, may_move[:, row], row)
        rounds = [self._round(found, now) for found in (upward, balancing) if found]
        return max(filter(None, rounds), key=lambda each: each.saved_s - each.cost_s, default=None)

    def _round(self, found: Sequence[_Priced], now: int) -> MoveRound | None:
        """The best of these swaps, if they are worth a round."""
        moving, best = set[tuple[int, int]](), list[_Priced]()
        layers = {name: set[int]() for name in self._prices.owners}
        for priced in sorted(found, key=lambda each: -each[0]):
            swap = priced[2]
            experts = {(swap.layer_id, each) for each in (swap.arriving, swap.leaving)}
            is_room = all(
                (most := self._prices.owners[name].most_layers) is None
                or len(layers[name] | {swap.layer_id}) <= most
                for name in (swap.to, swap.of)
            )
            if len(best) < self._most and is_room and not moving & experts:
                moving |= experts
                layers[swap.to].add(swap.layer_id)
                layers[swap.of].add(swap.layer_id)
                best.append(priced)
        if not best:
            return None
        saved_s, costs, swaps = zip(*best, strict=True)
        owners = {name for swap in swaps for name in (swap.to, swap.of)}
        cost_s = sum(costs) + (_HANDOVER_S if owners - {LOCAL_OWNER, HOST_OWNER} else 0.0)
        if sum(saved_s) < self._min_gain * cost_s:
            return None
        self._has_more |= len(found) > len(best)
        return MoveRound(swaps, sum(saved_s), cost_s, now)

    def _upward(self, sight: _Sight, may_move: BoolArray, row: int) -> Iterator[_Priced]:
        """Swaps of a layer that bring hot experts of slow owners to fast ones of another class,
        which compute at the same time. Shapes: may_move [N, E]."""
        expected, variance = sight.expected[row], sight.variance[row]
        for to, of in permutations(range(len(sight.names)), 2):
            saved_s = sight.rates_s[of, row]
            is_slower = saved_s >= _FASTER * sight.rates_s[to, row]
            if not is_slower or sight.are_alike(to, of):
                continue
            coming, going = (np.flatnonzero(may_move[each]) for each in (of, to))
            coming = coming[np.argsort(-expected[coming], kind="stable")]
            going = going[np.argsort(expected[going], kind="stable")]
            num = min(coming.size, going.size, self._most)
            coming, going = coming[:num], going[:num]
            gains = expected[coming] - expected[going]
            gains -= _CERTAINTY * np.sqrt(variance[coming] + variance[going])
            saved, cost = gains * saved_s * HORIZON, sight.cost_s(to, of, row)
            for place in np.flatnonzero(saved >= self._least_saved(cost)).tolist():
                swap = Swap(
                    self._layers[row].layer_id,
                    int(coming[place]),
                    int(going[place]),
                    sight.names[to],
                    sight.names[of],
                )
                yield float(saved[place]), cost, swap

    def _balancing(self, sight: _Sight, may_move: BoolArray, row: int) -> Iterator[_Priced]:
        """Swaps of a layer that take work from the owner of a class that has most, as far as the
        layer does not wait for other owners. Shapes: may_move [N, E]."""
        if not sight.groups:
            return
        expected = sight.expected[row]
        doubt = _CERTAINTY * np.sqrt(sight.variance[row])
        loads_s = (sight.has[:, row] * expected).sum(axis=1) * sight.rates_s[:, row]
        for group in sight.groups:
            shares = {
                index: Share(
                    sight.names[index],
                    np.flatnonzero(may_move[index]),
                    float(sight.rates_s[index, row]),
                    float(loads_s[index]),
                    float(np.sqrt((doubt[sight.has[index, row]] ** 2).sum()))
                    * float(sight.rates_s[index, row]),
                )
                for index in group
            }
            least_s = float(np.delete(loads_s, group).max(initial=0.0))
            for _ in range(_MOST_TO_BALANCE):
                of = max(group, key=lambda index: shares[index].load_s)
                found = {
                    to: best_exchange(
                        shares[of], shares[to], expected, doubt=doubt, least_s=least_s
                    )
                    for to in group
                    if to != of
                }
                to, exchange = max(found.items(), key=lambda each: each[1] or (0.0,))
                cost = sight.cost_s(to, of, row)
                if exchange is None or exchange.saved_s * HORIZON < self._least_saved(cost):
                    break
                layer_id, names = self._layers[row].layer_id, sight.names
                _, leaving, arriving = exchange
                swap = Swap(layer_id, leaving, arriving, to=names[to], of=names[of])
                yield exchange.saved_s * HORIZON, cost, swap
                apply(exchange, expected, busy=shares[of], idle=shares[to])

    def _least_saved(self, cost_s: float) -> float:
        """What a swap has to save at least."""
        return max(self._min_gain * cost_s, 1e-12)

    def note_applied(self, done: MoveRound, num_tokens: int) -> None:
        """A round was applied after so many written tokens."""
        rows = {layer.layer_id: row for row, layer in enumerate(self._layers)}
        for swap in done.swaps:
            self._moved_at[rows[swap.layer_id], [swap.arriving, swap.leaving]] = num_tokens

    def _expected(self, heat: Heat) -> tuple[F64Array, F64Array]:
        """How many of a token's selections each expert will have, and the variance of that.

        Shapes: both [L, E].
        """
        expected = np.zeros(self._moved_at.shape)
        for row, layer in enumerate(self._layers):
            each = heat.probabilities(Phase.DECODE, layer.layer_id)
            expected[row, : each.size] = each
        num_tokens = heat.slow[_DECODE].sum(axis=1, keepdims=True) / self._used[:, None]
        return expected, ALIKE * expected / (2.0 * np.maximum(num_tokens, 1.0))

    @property
    def _used(self) -> F64Array:
        return np.array([each.num_experts_used for each in self._layers], np.float64)


class _Sight:
    """What a decision is made from.

    Shapes: expected, variance [L, E]: a token's selections by expert; `has` [N, L, E]: the experts
    that an owner has alone; rates_s [N, L], by owner.
    """

    def __init__(
        self,
        placement: Placement,
        prices: MovePrices,
        layer_ids: Sequence[int],
        expected: F64Array,
        variance: F64Array,
    ) -> None:
        names, classes = placement.owner_names, placement.numeric_classes
        indices = [index for index, name in enumerate(names) if name in prices.owners]
        self.names = [names[index] for index in indices]
        self.expected, self.variance = expected, variance
        self.has: BoolArray = np.zeros((len(indices), *expected.shape), np.bool_)
        for row, layer_id in enumerate(layer_ids):
            holds = placement.local_ids(layer_id) >= 0
            self.has[:, row, : holds.shape[1]] = holds[indices] & (holds.sum(axis=0) == 1)
        self.prices = [prices.owners[name] for name in self.names]
        self.rates_s = np.array([each.selection_s for each in self.prices])
        self._classes = [classes.get(name, "") for name in self.names]
        alike = {name: [i for i, each in enumerate(self._classes) if each == name]
                 for name in self._classes if name}  # fmt: skip
        self.groups = [group for group in alike.values() if len(group) > 1]
        """Indices of owners of one class."""

    def are_alike(self, one: int, other: int) -> bool:
        """Whether two owners compute the same bits."""
        return bool(self._classes[one]) and self._classes[one] == self._classes[other]

    def cost_s(self, to: int, of: int, row: int) -> float:
        """Of a swap between two owners."""
        return float(self.prices[to].arrival_s[row] + self.prices[of].arrival_s[row])


def swapped(placement: Placement, swaps: Sequence[Swap]) -> Placement:
    """The placement after these swaps, where each expert has the local id of the one it replaces.

    Raises: ValueError if an expert is not where a swap expects it.
    """
    owned = {
        name: dict(each.by_layer)
        for name, each in zip(placement.owner_names, placement.owners, strict=True)
    }
    for swap in swaps:
        for name, coming, going in (
            (swap.to, swap.arriving, swap.leaving),
            (swap.of, swap.leaving, swap.arriving),
        ):
            ids: I32Array = owned[name].get(swap.layer_id, np.zeros(0, np.int32)).copy()
            places = np.flatnonzero(ids == going)
            if places.size != 1 or (ids == coming).any():
                raise ValueError(f"layer {swap.layer_id} of {name} has no expert {going} to swap")
            ids[places] = coming
            owned[name][swap.layer_id] = ids
    return replace(placement, owners=tuple(OwnedExperts(each) for each in owned.values()))
