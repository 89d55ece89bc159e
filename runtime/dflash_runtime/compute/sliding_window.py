"""Rows of a layer's cache: of all positions, or, with a sliding window, of those still visible.

In a window the row of position j is row ``j % num_rows``. Knows nothing of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dflash_adapters.spec import Mask
from dflash_protocol.errors import CheckpointMissing

WINDOW_CHUNK = 512
"""Tokens computed at once over a window, which holds them and all that the first of them sees."""

MOST_KEPT = 4
"""Snapshots of a sequence that an engine keeps, each of which may be as large as all windows."""

_ROW_UNIT = 64
"""A window's rows are a multiple of this: kernels take positions in whole blocks."""


class Rows(Protocol):
    """An array of rows, in whatever memory."""

    @property
    def nbytes(self) -> int: ...


def num_rows(mask: Mask, capacity: int) -> int:
    """Positions that there is room for, of a sequence of up to `capacity`."""
    if mask.span is None:
        return capacity
    in_window = -(-(mask.span - 1 + WINDOW_CHUNK) // _ROW_UNIT) * _ROW_UNIT
    return min(capacity, in_window)


@dataclass(frozen=True, slots=True, eq=False)
class WindowSnapshot:
    """A window's rows after so many positions; none of what is no window."""

    num_positions: int
    first_kept: int
    copies: tuple[Rows, ...]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.copies)


class WindowRows:
    """Which positions one layer has rows of, in a sequence of up to `capacity`.

    Arrays are numpy's, unless `empty_like` and `copy` know others.
    """

    __slots__ = ("_first_kept", "_num_positions", "arrays", "is_window", "mask", "num_rows")

    def __init__(self, mask: Mask, capacity: int) -> None:
        self.mask = mask
        self.arrays: tuple[Rows, ...] = ()
        """What the rows are kept in: whoever makes them says so."""
        self.num_rows = num_rows(mask, capacity)
        self.is_window = self.num_rows < capacity
        """Else no row is ever overwritten by that of a later position."""
        self._first_kept = 0
        self._num_positions = 0

    def can_resume(self, num_positions: int) -> bool:
        """Whether there still is all that a token after so many positions sees."""
        return num_positions == 0 or self.mask.first_visible(num_positions) >= self._first_kept

    def require(self, num_positions: int) -> None:
        """Raises: CheckpointMissing if it cannot be resumed after so many positions."""
        if not self.can_resume(num_positions):
            raise CheckpointMissing(wanted=num_positions, kept=self._num_positions)

    def snapshot(self, num_positions: int, instead_of: WindowSnapshot | None) -> WindowSnapshot:
        """Keep what a token after so many positions sees, if it may be overwritten: in the memory
        of a snapshot of this window, if one is given.

        Raises: CheckpointMissing if some of it is overwritten already.
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
        """Have the rows that a snapshot of this window kept."""
        for source, target in zip(snapshot.copies, self.arrays, strict=False):
            self.copy(target, source)
        if self.is_window:
            self._first_kept = snapshot.first_kept
        self._num_positions = snapshot.num_positions

    def parts(self, first_position: int, num_tokens: int) -> Iterator[slice]:
        """Tokens of a chunk that are to be computed together, one part after the other: each part's
        rows are written once its slice has been given.

        Raises: CheckpointMissing if what the first of them sees is gone.
        """
        self.begin(first_position)
        size = WINDOW_CHUNK if self.is_window else max(1, num_tokens)
        for first in range(0, num_tokens, size):
            part = slice(first, min(first + size, num_tokens))
            self.advance(part.stop - part.start)
            yield part

    def begin(self, num_positions: int) -> None:
        """What is computed next comes after so many positions. Raises: CheckpointMissing."""
        self.require(num_positions)
        if num_positions == 0:
            self._first_kept = 0
        self._num_positions = num_positions

    def advance(self, num_tokens: int) -> None:
        """The rows of the next tokens are written, up to WINDOW_CHUNK of them."""
        self._num_positions += num_tokens
        self._first_kept = max(self._first_kept, self._num_positions - self.num_rows)

    def empty_like(self, array: Any) -> Any:
        """An array of the same kind, with anything in it."""
        return np.empty_like(array)

    def copy(self, target: Any, source: Any) -> None:
        """Shapes: both alike."""
        np.copyto(target, source)
