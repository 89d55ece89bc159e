"""Which experts should change places between the parent's device and its processor, while serving.

A round of swaps is worth it if the time that it saves over the next tokens is a multiple of what it
costs. What is saved follows from how often each expert is expected to be chosen, by the heat. Pure:
no device, no clock but tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dflash_adapters.spec import MoeSpec
from dflash_protocol.ids import F64Array, I64Array, Phase
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_runtime.compute.room import staged_slots
from dflash_runtime.placement.heat import ALIKE, Heat, phase_index
from dflash_runtime.placement.situation import ParentDevice, Situation
from dflash_runtime.placement.speeds import copy_rate, host_side
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
_DECODE = phase_index(Phase.DECODE)
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class MovePrices:
    """What an expert of each layer costs and saves. Shapes: saved_s, moved_s [L]."""

    saved_s: F64Array
    """Seconds that a step saves for each selection that the device computes, not the processor."""
    moved_s: F64Array
    """Seconds that copying an expert to the device takes, beside steps."""
    prompt_s: float = 0.0
    """Seconds that a prompt's token takes, if it has to be computed again."""


def move_prices(
    situation: Situation, parent: ParentDevice, *, prompt_s: float = 0.0
) -> MovePrices | None:
    """The prices of one parent; None if its copies, or its processor, were not measured."""
    host, moe = host_side(situation, parent), situation.spec.moe
    rate = copy_rate(situation.box, parent)
    if host is None or not rate or not moe.layers:
        return None
    sizes = np.array([each.expert_bytes for each in moe.layers], np.float64)
    used = np.array([each.num_experts_used for each in moe.layers])
    times = host.step_s(sizes, int(used.max()))
    rows = np.arange(len(used))
    # Beside the device, the processor is what a layer waits for; its fixed part remains.
    saved_s = (times[rows, used] - times[rows, 1]) / np.maximum(used - 1, 1)
    saved_s = np.where(used == 1, times[rows, 1], saved_s)
    return MovePrices(saved_s, sizes / rate, prompt_s)


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
    """The one that comes to the parent's device."""
    leaving: int


@dataclass(frozen=True, slots=True)
class MoveRound:
    """Swaps that are worth it, the best first."""

    swaps: tuple[Swap, ...]
    saved_s: float
    """Over the next HORIZON written tokens."""
    cost_s: float
    """Of copying."""
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
        """The next round; None: nothing is worth it, or too few tokens were written since the last
        decision."""
        now = heat.num_tokens(Phase.DECODE)
        if now >= self._decided_at + FEWEST_TOKENS:
            self._decided_at = now
        elif not self._has_more:
            return None
        expected, variance = self._expected(heat)
        here, there = self._owned(placement)
        is_resting = now < self._moved_at + RESTING
        by_gain: list[tuple[float, float, Swap]] = []
        for row, layer in enumerate(self._layers):
            if layer.layer_id in placement.answering:
                continue  # its copies were planned for where its experts are
            coming = np.flatnonzero(there[row] & ~is_resting[row])
            going = np.flatnonzero(here[row] & ~is_resting[row])
            coming = coming[np.argsort(-expected[row, coming], kind="stable")]
            going = going[np.argsort(expected[row, going], kind="stable")]
            num = min(coming.size, going.size, self._most)
            coming, going = coming[:num], going[:num]
            gains = expected[row, coming] - expected[row, going]
            gains -= _CERTAINTY * np.sqrt(variance[row, coming] + variance[row, going])
            saved = gains * self._prices.saved_s[row] * HORIZON
            cost = float(self._prices.moved_s[row])
            for place in np.flatnonzero(saved >= np.maximum(self._min_gain * cost, 1e-12)).tolist():
                swap = Swap(layer.layer_id, int(coming[place]), int(going[place]))
                by_gain.append((float(saved[place]), cost, swap))
        best = sorted(by_gain, key=lambda each: -each[0])[: self._most]
        self._has_more = len(by_gain) > len(best) > 0
        if not best:
            return None
        saved_s, costs, swaps = zip(*best, strict=True)
        return MoveRound(swaps, sum(saved_s), sum(costs), now)

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

    def _owned(self, placement: Placement) -> tuple[_Mask, _Mask]:
        """Which experts the parent's device has, and which its processor. Shapes: both [L, E]."""
        masks = np.zeros((2, *self._moved_at.shape), np.bool_)
        for mask, name in zip(masks, (LOCAL_OWNER, HOST_OWNER), strict=True):
            if name in placement.owner_names:
                owned = placement.owners[placement.owner_names.index(name)].by_layer
                for row, layer in enumerate(self._layers):
                    mask[row, owned.get(layer.layer_id, [])] = True
        here, there = masks
        return here & ~there, there & ~here


def swapped(placement: Placement, swaps: Sequence[Swap]) -> Placement:
    """The placement after these swaps, where each expert has the local id of the one it replaces.

    Raises: ValueError if an expert is not where a swap expects it.
    """
    owners = list(placement.owners)
    for name in (LOCAL_OWNER, HOST_OWNER):
        index = placement.owner_names.index(name)
        by_layer = dict(owners[index].by_layer)
        for swap in swaps:
            coming, going = swap.arriving, swap.leaving
            if name == HOST_OWNER:
                coming, going = going, coming
            ids = by_layer[swap.layer_id].copy()
            places = np.flatnonzero(ids == going)
            if places.size != 1 or (ids == coming).any():
                raise ValueError(f"layer {swap.layer_id} of {name} has no expert {going} to swap")
            ids[places] = coming
            by_layer[swap.layer_id] = ids
        owners[index] = OwnedExperts(by_layer)
    return replace(placement, owners=tuple(owners))
