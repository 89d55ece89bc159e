"""States of a sequence that are kept, so that a later prompt can go on from where it differs.

Recurrent layers have one state, that of the tokens computed last, and sliding-window caches hold
the last positions alone: to go on from earlier ones, what there was then must have been copied.
Knows nothing of tokens, nor of what is in a state.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

from dflash_adapters.ops import KvCache, Snapshot
from dflash_protocol.errors import DeviceOutOfMemory
from dflash_runtime.compute.sliding_window import MOST_KEPT

LEAST_APART = 64
"""Positions that are sooner computed again than a state is copied."""


class StateCheckpoints:
    """Snapshots of one cache, by their positions. Owns: their memory, which is used again."""

    def __init__(
        self, cache: KvCache, *, most_kept: int = MOST_KEPT, least_apart: int = LEAST_APART
    ) -> None:
        self._cache = cache
        self._most_kept = most_kept
        self._least_apart = least_apart
        self._kept: dict[int, Snapshot] = {}
        self._unused: list[Snapshot] = []

    @property
    def positions(self) -> list[int]:
        """Where a sequence can be gone on from, besides where it is; ascending."""
        return sorted(self._kept)

    @property
    def nbytes(self) -> int:
        """Memory of all snapshots."""
        return sum(each.nbytes for each in (*self._kept.values(), *self._unused))

    def save(self, num_positions: int) -> None:
        """Copy the state, which is that after so many positions; unless one is kept nearby, or
        there is no memory for it."""
        before = max((each for each in self._kept if each <= num_positions), default=0)
        if num_positions - before < self._least_apart:
            return
        if len(self._kept) == self._most_kept:
            self._unused.append(self._kept.pop(self._least_needed(num_positions)))
        instead_of = self._unused.pop() if self._unused else None
        with suppress(DeviceOutOfMemory, MemoryError):
            self._kept[num_positions] = self._cache.snapshot(num_positions, instead_of)

    def cut(self, num_positions: int) -> None:
        """Positions from there on are about to become other tokens'."""
        for each in [each for each in self._kept if each > num_positions]:
            self._unused.append(self._kept.pop(each))

    def restore(self, num_positions: int) -> None:
        """Have the cache go on from there, if it does not anyway and the state is kept."""
        if not self._cache.can_resume(num_positions) and num_positions in self._kept:
            self._cache.restore(self._kept[num_positions])

    def _least_needed(self, newest: int) -> int:
        """The one without which the fewest positions would have to be computed again."""
        places = [0, *self.positions, newest]
        gaps = {
            place: after - before
            for (before, place), (_, after) in zip(
                pairwise(places), pairwise(places[1:]), strict=False
            )
        }
        return min(gaps, key=lambda place: gaps[place])
