"""Prefix caching: what an engine's one cache holds is reused by prompts that begin alike.

Tracks the tokens of the cached positions. Recurrent layers have one state, that after the last
token, and sliding-window caches hold the last positions only: to resume at an earlier position, the
state there must have been copied, as a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from itertools import pairwise

import numpy as np

from dflash_protocol.errors import DeviceOutOfMemory
from dflash_protocol.ids import I32Array
from dflash_runtime.compute.kv_cache import KvCache, Snapshot
from dflash_runtime.compute.sliding_window import MOST_KEPT

LEAST_APART = 64
"""Fewer positions than this are computed again rather than checkpointed."""


class SequenceReuse:
    """The tokens whose keys and values are in a cache, from position 0 on, and checkpoints of its
    states where it cannot be cut anywhere.

    `invariant_from`: the smallest chunk from which on a position's keys and values have the same
    bits whatever the chunk; positions of smaller chunks are not tracked. If it is None, bits depend
    on the chunk, and only chunks with the same bounds are reused. `num_other_class`: how many
    selections other classes than the class map's have computed, see `HitCounts.other_class`.

    States: the positions up to the last `add` are known, until `go_to` or `cut`. Once
    `num_other_class` has changed, nothing more becomes known until the next `enter`. Used by one
    thread. Owns: the checkpoints' memory.
    """

    def __init__(
        self,
        cache: KvCache,
        num_positions: int,
        *,
        invariant_from: int | None,
        can_be_cut: bool,
        num_other_class: Callable[[], int] = lambda: 0,
    ) -> None:
        self.checkpoints = StateCheckpoints(cache)
        self._cache = cache
        self._token_ids = np.empty(num_positions, np.int32)
        self._bounds: list[tuple[int, int]] = []
        self._invariant_from = invariant_from
        self._smallest = invariant_from or 1
        self._can_be_cut = can_be_cut
        self._scope = "", ""
        self._num_other_class, self._num_at_enter = num_other_class, num_other_class()

    @property
    def num_cached(self) -> int:
        """Positions that are in the cache."""
        return self._bounds[-1][1] if self._bounds else 0

    def enter(self, scope: str, computed_by: str = "") -> None:
        """Drop everything that was computed in another scope, or by something else: a fingerprint
        of all that bits depend on beside weights and tokens. A run begins."""
        self._num_at_enter = self._num_other_class()
        if (scope, computed_by) != self._scope:
            self.cut(0)
            self._scope = scope, computed_by

    def cut(self, first_position: int) -> None:
        """Forget cached positions from this one on, which are about to be overwritten."""
        while self._bounds and self._bounds[-1][1] > first_position:
            first, _ = self._bounds.pop()
            if first < first_position and self._invariant_from is not None:
                self._bounds.append((first, first_position))
        self.checkpoints.cut(first_position)

    def go_to(self, position: int) -> None:
        """Have the cache go on there: where the last chunk ended, or 0, or a reusable position."""
        self.cut(position)
        self.checkpoints.restore(position)

    def add(self, first_position: int, token_ids: I32Array) -> None:
        """Note that these tokens were computed as one chunk, unless another class than the class
        map's has computed some of this run. Shapes: token_ids [T]."""
        if self._num_other_class() != self._num_at_enter:
            return
        if first_position != self.num_cached or token_ids.size < self._smallest:
            return
        last = first_position + token_ids.size
        self._token_ids[first_position:last] = token_ids
        if self._invariant_from is not None:
            self._bounds.clear()  # one range for all: a list would grow with every token
            first_position = 0
        self._bounds.append((first_position, last))

    def boundary(self, prompt: I32Array, stop_ids: Collection[int]) -> int:
        """Where the last turn of a prompt begins: worth a state checkpoint, as a later prompt may
        differ only from there on. 0 if there is none, or none is needed. Shapes: prompt [T]."""
        if self._can_be_cut:
            return 0
        ends = np.flatnonzero(np.isin(prompt, list(stop_ids)))
        place = min(int(ends[-1]) + 1 if ends.size else 0, prompt.size - self._smallest)
        return place if place >= self._smallest else 0

    def num_reusable(
        self, prompt: I32Array, chunks: Iterable[tuple[int, int]], *, boundary: int
    ) -> int:
        """Length of the prompt's prefix that is in the cache or restorable from a checkpoint.
        `chunks`: see `reusable`. Shapes: prompt [T]."""
        ranges = self.reusable(prompt, chunks, boundary=boundary)
        places = {each[-1] for each in ranges} | {self.num_cached}
        places = {each for each in places if self._cache.can_resume(each)}
        places |= {*self.checkpoints.positions}
        return max(place for place in (0, *places) if any(place in each for each in ranges))

    def save_state(self, num_positions: int) -> None:
        """Save a checkpoint of the state at that many positions, where the last chunk has ended;
        nothing if the cache can be cut anywhere, or these positions are not known."""
        if not self._can_be_cut and num_positions <= self.num_cached:
            self.checkpoints.save(num_positions)

    def reusable(
        self, prompt: I32Array, chunks: Iterable[tuple[int, int]], *, boundary: int = 0
    ) -> list[range]:
        """How many of a prompt's first positions may be reused: ascending ranges of such numbers,
        the first from 0. At least one position is left to compute, and as many as the same bits
        need.

        `chunks` are those in which the prompt would be computed without a cache; none crosses
        `boundary`. Shapes: prompt [T].
        """
        num_known = min(self.num_cached, prompt.size)
        differs = np.flatnonzero(self._token_ids[:num_known] != prompt[:num_known])
        num_same = int(differs[0]) if differs.size else num_known
        if self._invariant_from is not None:
            ranges = [range(1)]
            for first, end in ((0, boundary), (boundary, prompt.size)):
                last = min(num_same, end - self._invariant_from)
                ranges.append(range(first, last + 1))
            return [each for each in ranges if each]
        ranges = [range(1)]
        for computed, wanted in zip(self._bounds, chunks, strict=False):
            if computed != wanted or not wanted[1] <= min(num_same, prompt.size - 1):
                break
            ranges.append(range(wanted[1], wanted[1] + 1))
        return ranges


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
