"""A plain version of which experts the processor's arena keeps (kernels/arena_tasks): one pool of
slots for all layers, in which every expert that is used finds a place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dflash_runtime.compute.half_lives import HALF_LIVES

_OLDEST = -40.0
_SOON = 2.0
_EQUAL = 1e-12
"""What adding in another order may make of equal uses."""

EMPTY = (-1, -1)


@dataclass
class PlainArena:
    """Steps and small batches only: chunks of prompts count otherwise, and read ahead."""

    num_slots: int
    num_layers: int
    slots: list[tuple[int, int]] = field(init=False)
    """Layer and expert of each; `EMPTY`."""
    _uses: dict[tuple[int, int], tuple[int, list[float]]] = field(default_factory=dict)
    """The call of its layer that used it last, and its uses then, as each half-life counts."""
    _calls: dict[int, int] = field(default_factory=dict)
    _called_at: dict[int, int] = field(default_factory=dict)
    """The last batch of each layer."""
    _batch: int = 0

    def __post_init__(self) -> None:
        self.slots = [EMPTY] * self.num_slots

    def use(
        self,
        layer: int,
        experts: Iterable[int],
        half_life: float,
        *,
        after: Sequence[tuple[int, int]] = (),
    ) -> int:
        """A batch's experts come, each if it is not there; how many were. `half_life`: what
        decides; `after`: what slots are said to hold then, which decides between such as have equal
        uses."""
        self._batch += 1
        self._calls[layer] = self._calls.get(layer, 0) + 1
        self._called_at[layer] = self._batch
        wanted = [(layer, expert) for expert in sorted({*experts})]
        missing = [each for each in wanted if each not in self.slots]
        for each in wanted:
            uses = [self._uses_of(each, half_life) + 1.0 for half_life in HALF_LIVES]
            self._uses[each] = self._calls[layer], uses
        for each in missing:
            if EMPTY in self.slots:
                self.slots[self.slots.index(EMPTY)] = each
                continue
            others = [slot for slot, held in enumerate(self.slots) if held not in wanted]
            worth = {slot: self._worth(self.slots[slot], half_life) for slot in others}
            least = min(worth.values())
            equal = [slot for slot in others if worth[slot] < least + _EQUAL]
            said = [slot for slot in equal if after and after[slot] == each]
            self.slots[(said or equal)[0]] = each
        return len(wanted) - len(missing)

    def _uses_of(self, expert: tuple[int, int], half_life: float) -> float:
        call, uses = self._uses.get(expert, (0, [0.0] * len(HALF_LIVES)))
        since = self._calls[expert[0]] - call
        return uses[HALF_LIVES.index(half_life)] * math.exp2(-since / half_life)

    def _worth(self, held: tuple[int, int], half_life: float) -> float:
        uses = self._uses_of(held, half_life)
        logarithm = max(_OLDEST, math.log(uses) if uses else -math.inf)
        since = (self._batch - self._called_at.get(held[0], 0)) / self.num_layers
        return logarithm + _SOON * min(1.0, since)
