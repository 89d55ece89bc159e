"""State checkpoints: copies of a sequence's state, from which a later prompt can go on.

Recurrent layers have one state, that after the last token, and sliding-window caches hold the last
positions only: to resume at an earlier position, the state there must have been copied.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

from dflash_protocol.errors import DeviceOutOfMemory
from dflash_runtime.compute.kv_cache import KvCache, Snapshot
from dflash_runtime.compute.sliding_window import MOST_KEPT

LEAST_APART = 64
"""Fewer positions than this are computed again rather than checkpointed."""


class StateCheckpoints:
    """Snapshots of one cache, by their positions. Owns: their memory, which is reused."""

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
        """Positions that can be restored, ascending."""
        return sorted(self._kept)

    @property
    def nbytes(self) -> int:
        """Memory of all snapshots."""
        return sum(each.nbytes for each in (*self._kept.values(), *self._unused))

    def save(self, num_positions: int) -> None:
        """Copy the cache's state, at `num_positions`; skipped if a checkpoint is less than
        `least_apart` before, or there is no memory for it."""
        before = max((each for each in self._kept if each <= num_positions), default=0)
        if num_positions - before < self._least_apart:
            return
        if len(self._kept) == self._most_kept:
            self._unused.append(self._kept.pop(self._least_useful(num_positions)))
        instead_of = self._unused.pop() if self._unused else None
        with suppress(DeviceOutOfMemory, MemoryError):
            self._kept[num_positions] = self._cache.snapshot(num_positions, instead_of)

    def cut(self, num_positions: int) -> None:
        """Drop checkpoints beyond this position, whose tokens are about to change."""
        for each in [each for each in self._kept if each > num_positions]:
            self._unused.append(self._kept.pop(each))

    def restore(self, num_positions: int) -> None:
        """Restore the checkpoint there, if there is one and the cache cannot resume without."""
        if not self._cache.can_resume(num_positions) and num_positions in self._kept:
            self._cache.restore(self._kept[num_positions])

    def _least_useful(self, newest: int) -> int:
        """The checkpoint whose loss costs the fewest positions to compute again."""
        places = [0, *self.positions, newest]
        gaps = {
            place: after - before
            for (before, place), (_, after) in zip(
                pairwise(places), pairwise(places[1:]), strict=False
            )
        }
        return min(gaps, key=lambda place: gaps[place])
