"""A plain version of what kernels do with a layer's slots of steps (mailbox_post.cuh)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_protocol.ids import AnyArray, I32Array

NOT_KEPT = -2


@dataclass
class PlainSlots:
    """`own_ids`: the processor's local ids of its experts, negative for others. Shapes: [E]."""

    own_ids: I32Array
    num_slots: int
    decay: float
    margin: float = 0.0
    fetches: bool = True
    found: int = 0
    """With pairs whose expert was fetched for an earlier one."""
    fetched: int = 0
    kept: int = 0
    asked: int = 0
    """Pairs that are left to the processor."""
    hot_only: int = 0
    """Steps of which it was asked for nothing."""
    slots: list[int] = field(init=False)
    scores: AnyArray = field(init=False)
    local_ids: I32Array = field(init=False)
    """As `own_ids`, negative for what is in a slot too."""

    def __post_init__(self) -> None:
        self.slots = [-1] * self.num_slots
        self.scores = np.zeros(self.own_ids.size, np.float32)
        self.local_ids = self.own_ids.copy()

    def step(self, chosen: Sequence[int]) -> list[int] | None:
        """A step of one token or several, whose choices follow each other: first pair, slot, expert
        and leaving expert of what is fetched, if anything."""
        asked = [expert for expert in chosen if self.local_ids[expert] >= 0]
        self.found += sum(expert in self.slots for expert in chosen)
        self.asked += len(asked)
        self.hot_only += not asked
        old = self.scores * np.float32(self.decay)
        self.scores = old.copy()
        self.scores[list(set(chosen))] += 1
        distinct = list(dict.fromkeys(asked))
        if len(distinct) < 2 or not self.fetches:
            return None
        expert = distinct[1]
        first, num_pairs = chosen.index(expert), chosen.count(expert)
        self.fetched, self.asked = self.fetched + 1, self.asked - num_pairs
        self.found += num_pairs - 1
        free = [slot for slot, kept in enumerate(self.slots) if kept not in chosen]
        # What float32 has beyond 1 is equal, as kernels order what they have added one to.
        order = sorted(free, key=lambda slot: (self._worth(old, slot) + np.float32(1), slot))
        wanted = old[expert] + np.float32(1)
        kept = order and (
            self.slots[order[0]] < 0
            or wanted > self._worth(old, order[0]) + np.float32(self.margin)
        )
        if not kept:
            return [first, self.num_slots, expert, NOT_KEPT]
        self.kept += 1
        leaving, self.slots[order[0]] = self.slots[order[0]], expert
        self.local_ids[expert] = -1
        if leaving >= 0:
            self.local_ids[leaving] = self.own_ids[leaving]
        return [first, order[0], expert, leaving]

    def _worth(self, scores: AnyArray, slot: int) -> np.float32:
        return np.float32(-1 if self.slots[slot] < 0 else scores[self.slots[slot]])
