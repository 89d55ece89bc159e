"""What the key/value cache holds: of a new prompt, how many first positions need no computing.

Knows nothing of keys and values, only of the tokens that they were computed for.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dflash_protocol.ids import I32Array


class CachedPrefix:
    """The tokens whose keys and values are in the cache, from position 0 on.

    `invariant_from`: a position's keys and values have the same bits in whatever chunk of at least
    so many tokens they are computed; those of smaller ones are not kept. Where it is None, only
    chunks that would be computed again just so are.
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
        """What was computed from this position on is about to be overwritten."""
        while self._bounds and self._bounds[-1][1] > first_position:
            first, _ = self._bounds.pop()
            if first < first_position and self._invariant_from is not None:
                self._bounds.append((first, first_position))

    def add(self, first_position: int, token_ids: I32Array) -> None:
        """These tokens were computed, as one chunk. Shapes: token_ids [T]."""
        if first_position != self.num_cached or token_ids.size < (self._invariant_from or 1):
            return
        last = first_position + token_ids.size
        self._token_ids[first_position:last] = token_ids
        if (
            self._invariant_from is not None
        ):  # one stretch of all: a list would grow with every token
            self._bounds.clear()
            first_position = 0
        self._bounds.append((first_position, last))

    def reusable(
        self, prompt: I32Array, chunks: Iterable[tuple[int, int]], *, boundary: int = 0
    ) -> list[range]:
        """Of a prompt's first positions, how many can stay: ascending ranges of numbers, the first
        of which begins with 0. At least one position is left to compute, and as many as are needed
        for the same bits.

        `chunks` are those that the prompt would be computed in without a cache; none of them
        crosses `boundary`. Shapes: prompt [T].
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
