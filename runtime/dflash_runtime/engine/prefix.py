"""Prefix caching: how many of a new prompt's first positions are in the key/value cache.

Tracks the tokens of the cached positions, not their keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dflash_protocol.ids import I32Array


class CachedPrefix:
    """The tokens whose keys and values are in the cache, from position 0 on.

    `invariant_from`: the smallest chunk from which on a position's keys and values have the same
    bits whatever the chunk; positions of smaller chunks are not tracked. If it is None, bits depend
    on the chunk, and only chunks with the same bounds are reused.
    """

    def __init__(self, num_positions: int, *, invariant_from: int | None) -> None:
        self._token_ids = np.empty(num_positions, np.int32)
        self._bounds: list[tuple[int, int]] = []
        self._invariant_from = invariant_from

    @property
    def num_cached(self) -> int:
        """Positions that are in the cache."""
        return self._bounds[-1][1] if self._bounds else 0

    def cut(self, first_position: int) -> None:
        """Forget positions from this one on, which are about to be overwritten."""
        while self._bounds and self._bounds[-1][1] > first_position:
            first, _ = self._bounds.pop()
            if first < first_position and self._invariant_from is not None:
                self._bounds.append((first, first_position))

    def add(self, first_position: int, token_ids: I32Array) -> None:
        """Note that these tokens were computed as one chunk. Shapes: token_ids [T]."""
        if first_position != self.num_cached or token_ids.size < (self._invariant_from or 1):
            return
        last = first_position + token_ids.size
        self._token_ids[first_position:last] = token_ids
        if self._invariant_from is not None:
            self._bounds.clear()  # one range for all: a list would grow with every token
            first_position = 0
        self._bounds.append((first_position, last))

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
