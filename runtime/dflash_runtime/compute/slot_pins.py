"""Experts that do not leave the slots of steps once they are there: of each layer the hottest of
those that live elsewhere, when enough tokens were counted. See gpu/run/step_slots.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_adapters.spec import MoeLayer
from dflash_protocol.ids import I32Array, I64Array


@dataclass(frozen=True, slots=True)
class WarmPins:
    """What is asked for."""

    num_experts: int = 0
    """So many of a layer's hottest, in half of the slots at most: the others follow the text."""
    after: int = 0
    """Tokens of steps that are counted first."""


NO_PINS = WarmPins()


class SlotPins:
    """Which experts are pinned. Used by the thread that runs the model."""

    def __init__(self, wishes: WarmPins) -> None:
        self._wishes = wishes
        self._uses: dict[int, I64Array] = {}
        """By layer id, how often steps chose each expert. Shapes: [E]."""
        self._pinned: dict[int, frozenset[int]] = {}

    @property
    def experts(self) -> Mapping[int, Sequence[int]]:
        """Global ids by layer id; of layers with pinned experts only."""
        return {layer_id: sorted(ids) for layer_id, ids in sorted(self._pinned.items()) if ids}

    def is_pinned(self, layer_id: int, expert: int) -> bool:
        return expert in self._pinned.get(layer_id, ())

    def has_chosen(self, layer_id: int) -> bool:
        return layer_id in self._pinned

    def count(self, layer: MoeLayer, selections: I64Array) -> bool:
        """Add what steps have chosen; whether a layer's experts are to be chosen now.

        Shapes: selections [E].
        """
        if not self._wishes.num_experts:
            return False
        uses = self._uses.setdefault(layer.layer_id, np.zeros(layer.num_experts, np.int64))
        uses += selections
        is_enough = uses.sum() >= self._wishes.after * layer.num_experts_used
        return bool(is_enough) and not self.has_chosen(layer.layer_id)

    def choose(self, layer_id: int, own_ids: I32Array, *, num_slots: int) -> frozenset[int]:
        """Pin a layer's hottest experts, instead of those that were before; their global ids.

        Shapes: own_ids [E], negative for experts that live on the device, or are nowhere.
        """
        uses = np.where(own_ids >= 0, self._uses[layer_id], 0)
        hottest = np.argsort(-uses, kind="stable")[: min(self._wishes.num_experts, num_slots // 2)]
        chosen = self._pinned[layer_id] = frozenset(hottest[uses[hottest] > 0].tolist())
        return chosen
