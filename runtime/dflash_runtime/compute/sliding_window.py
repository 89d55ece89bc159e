"""Which rows a layer's K/V cache keeps: all positions, or the visible ones of a sliding window.

In a sliding window the row of position j is row ``j % num_rows``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dflash_adapters.spec import Mask
from dflash_protocol.errors import CheckpointMissing

WINDOW_CHUNK = 512
"""Most tokens computed at once in a sliding window, which holds them and all that the first
sees."""

MOST_KEPT = 4
"""Checkpoints of a sequence that an engine keeps; each may be as large as all sliding windows."""

_ROW_UNIT = 64
"""A sliding window's rows are a multiple of this: kernels read positions in whole blocks."""


class CachedArray(Protocol):
    """An array of rows, in host or device memory."""

    @property
    def nbytes(self) -> int: ...


def num_rows(mask: Mask, capacity: int) -> int:
    """Rows allocated for a sequence of up to `capacity` positions."""
    if mask.span is None:
        return capacity
    window_rows = -(-(mask.span - 1 + WINDOW_CHUNK) // _ROW_UNIT) * _ROW_UNIT
    return min(capacity, window_rows)


@dataclass(frozen=True, slots=True, eq=False)
class WindowSnapshot:
    """A sliding window's rows after `num_positions`; no rows for a layer without one."""

    num_positions: int
    first_kept: int
    copies: tuple[CachedArray, ...]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.copies)


class WindowRows:
    """Which positions one layer has rows of, in a sequence of up to `capacity` positions.

    Arrays are numpy's unless a subclass overrides `empty_like` and `copy`.
    """

    __slots__ = ("_first_kept", "_num_positions", "arrays", "is_window", "mask", "num_rows")

    def __init__(self, mask: Mask, capacity: int) -> None:
        self.mask = mask
        self.arrays: tuple[CachedArray, ...] = ()
        """The arrays of rows, set by the cache that allocates them."""
        self.num_rows = num_rows(mask, capacity)
        self.is_window = self.num_rows < capacity
        """Whether rows of later positions overwrite earlier ones."""
        self._first_kept = 0
        self._num_positions = 0

    def can_resume(self, num_positions: int) -> bool:
        """Whether all rows visible to a token after `num_positions` are still there."""
        return num_positions == 0 or self.mask.first_visible(num_positions) >= self._first_kept

    def require(self, num_positions: int) -> None:
        """Raises: CheckpointMissing if the layer cannot resume after `num_positions`."""
        if not self.can_resume(num_positions):
            raise CheckpointMissing(wanted=num_positions, kept=self._num_positions)

    def snapshot(self, num_positions: int, instead_of: WindowSnapshot | None) -> WindowSnapshot:
        """Copy what a token after `num_positions` sees, if it can be overwritten; into the memory
        of `instead_of`, a snapshot of the same window, if given.

        Raises: CheckpointMissing if some of it is already overwritten.
        """
        self.require(num_positions)
        kept = self.arrays if self.is_window else ()
        if instead_of is None:
            copies = tuple(self.empty_like(each) for each in kept)
        else:
            copies = instead_of.copies
        for source, target in zip(kept, copies, strict=True):
            self.copy(target, source)
        return WindowSnapshot(num_positions, self._first_kept, copies)

    def restore(self, snapshot: WindowSnapshot) -> None:
        """Restore the rows of a snapshot of this window."""
        for source, target in zip(snapshot.copies, self.arrays, strict=False):
            self.copy(target, source)
        if self.is_window:
            self._first_kept = snapshot.first_kept
        self._num_positions = snapshot.num_positions

    def parts(self, first_position: int, num_tokens: int) -> Iterator[slice]:
        """Split a chunk into slices of tokens to be computed in turn; the caller writes a slice's
        rows when it gets it.

        Raises: CheckpointMissing if rows that the first token sees are gone.
        """
        self.begin(first_position)
        size = WINDOW_CHUNK if self.is_window else max(1, num_tokens)
        for first in range(0, num_tokens, size):
            part = slice(first, min(first + size, num_tokens))
            self.advance(part.stop - part.start)
            yield part

    def begin(self, num_positions: int) -> None:
        """Continue after `num_positions`. Raises: CheckpointMissing."""
        self.require(num_positions)
        if num_positions == 0:
            self._first_kept = 0
        self._num_positions = num_positions

    def advance(self, num_tokens: int) -> None:
        """Note that rows of the next tokens, up to WINDOW_CHUNK, are being written."""
        self._num_positions += num_tokens
        self._first_kept = max(self._first_kept, self._num_positions - self.num_rows)

    def empty_like(self, array: Any) -> Any:
        """A new uninitialised array of the same kind."""
        return np.empty_like(array)

    def copy(self, target: Any, source: Any) -> None:
        """Shapes: both alike."""
        np.copyto(target, source)
