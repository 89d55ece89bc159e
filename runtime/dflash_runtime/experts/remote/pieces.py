"""How a batch is cut into requests: in which mode, and in pieces of how many rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Protocol, TypeAlias

import numpy as np

from dflash_protocol.batch import Hidden, Pairs, RoutedBatch, SomeRows
from dflash_protocol.ids import Phase
from dflash_protocol.wire.version1 import rectangles
from dflash_runtime.experts.remote.modes import ExecutionMode, ModeChooser

_WINDOW = 16
"""Requests of one batch in flight at a time: as many as the daemon's end holds."""
_PROBE_WINDOW = 4
"""The window while streaming is probed: requests that were sent cannot be recalled."""
_NEARLY_ALL = 0.75
"""From this share of used rows on, a device sends all of them: a gather and the scatter of the
sums need the indices on the device, which takes longer."""

Piece: TypeAlias = tuple[SomeRows, RoutedBatch]
"""Rows of the step's hidden states, and the batch of them."""


class Pieces(Protocol):
    """What is left to be sent of a batch."""

    def next(self, max_tokens: int) -> Piece | None:
        """The next piece, of at most `max_tokens` rows that have pairs; None at the end."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a session's data path takes."""

    max_tokens: int
    version: int
    moved_window: int = 0
    """Requests that devices copy which may be in flight; 0 if the CPU copies."""


@dataclass(slots=True, eq=False)
class Cut:
    """How one batch is sent."""

    max_tokens: int
    """Most tokens of a request."""
    whole_from: int | None = None
    """All rows are sent if at least so many are used; None: if all are used."""
    window: int = _WINDOW
    mode: ExecutionMode = ExecutionMode.BATCHED
    chooser: ModeChooser | None = None
    """Told how long this batch took; None if the mode is fixed."""
    pieces: Pieces | None = None
    """None: the batch is one request."""

    def has_enough(self, num_replies: int) -> bool:
        """Whether so many replies tell if a probe of streaming is to be ended."""
        return self.window == _PROBE_WINDOW and num_replies >= _PROBE_WINDOW

    def end_if_slow(self, elapsed_s: float, *, num_pairs: int, max_tokens: int) -> None:
        """Send the rest at once if streaming turns out much slower, by the pairs answered so
        far."""
        chooser = self.chooser
        if chooser is None or self.mode is not ExecutionMode.STREAM:
            return
        limit_s = chooser.stream_limit_s()
        if limit_s is None or elapsed_s <= limit_s * num_pairs:
            return
        chooser.note(ExecutionMode.STREAM, elapsed_s=elapsed_s, num_pairs=num_pairs)
        self.chooser = None
        self.window, self.max_tokens = _WINDOW, max_tokens

    def note(self, elapsed_s: float, num_pairs: int) -> None:
        """All of the batch has been answered."""
        if self.chooser is not None and num_pairs:
            self.chooser.note(self.mode, elapsed_s=elapsed_s, num_pairs=num_pairs)


_ONE_TOKEN = Cut(max_tokens=1)


class Cutter:
    """Cuts the batches of one owner, in a fixed mode or in the one that has been faster for batches
    of a kind."""

    def __init__(self, mode: ExecutionMode, stream_tokens: int) -> None:
        self._mode = mode
        self._stream_tokens = stream_tokens
        self._choosers: dict[tuple[Phase, int], ModeChooser] = {}

    def cut(self, limits: Limits, rows: Hidden, pairs: Pairs, *, phase: Phase) -> Cut:
        """How to send these pairs. Shapes: rows [T, H]."""
        num_tokens, is_ragged = rows.shape[0], limits.version > 1
        if num_tokens == 1 and is_ragged:
            return _ONE_TOKEN
        is_moved = limits.moved_window > 0 and rows.is_on_device
        cut = Cut(limits.max_tokens)
        if is_moved:
            cut.whole_from = ceil(_NEARLY_ALL * num_tokens)
            cut.window = limits.moved_window  # pieces without a slot are sent while waiting
        # Few tokens, for which the parent waits layer by layer.
        mode = ExecutionMode.BATCHED if phase is Phase.VERIFY else self._mode
        # Devices copy and compute large requests at a higher rate.
        if mode is ExecutionMode.AUTO and is_ragged and not is_moved:
            self._choose(cut, phase, num_tokens, pairs)
        elif mode is ExecutionMode.STREAM:
            cut.mode = mode
        if cut.mode is ExecutionMode.STREAM:
            cut.max_tokens = min(self._stream_tokens, limits.max_tokens)
        if not is_ragged:
            batch = RoutedBatch.group(phase, rows, pairs)
            cut.pieces = _Rectangles(rectangles(batch, cut.max_tokens))
        elif num_tokens > cut.max_tokens:
            slices = Slices(phase, rows, pairs, whole_from=cut.whole_from)
            if slices.num_rows > cut.max_tokens:
                cut.pieces = slices
        return cut

    def _choose(self, cut: Cut, phase: Phase, num_tokens: int, pairs: Pairs) -> None:
        """Choose the mode of a batch that is neither copied by devices nor small."""
        if num_tokens <= self._stream_tokens:
            return
        num_used = pairs.first_of_token.size
        if num_used > self._stream_tokens:
            kind = (phase, num_used.bit_length())
            chooser = cut.chooser = self._choosers.setdefault(kind, ModeChooser())
            cut.mode = chooser.next_mode()
            if cut.mode is not chooser.favourite:
                cut.window = _PROBE_WINDOW


class Slices:
    """Implements Pieces: runs of rows that have pairs, each grouped when it is asked for.

    Rows that no pair uses are left out, unless at least `whole_from` (None: all) are used.
    """

    def __init__(
        self, phase: Phase, rows: Hidden, pairs: Pairs, *, whole_from: int | None = None
    ) -> None:
        self._phase = phase
        self._rows = rows
        self._pairs = pairs
        self._next = 0
        num_tokens = rows.shape[0]
        firsts = pairs.first_of_token
        self._is_whole = firsts.size >= (num_tokens if whole_from is None else whole_from)
        if self._is_whole:
            firsts = np.searchsorted(pairs.token_indices, np.arange(num_tokens))
        self._bounds = [*firsts.tolist(), pairs.num_pairs]
        """Where the pairs of each row begin that is sent; then the number of pairs."""

    @property
    def num_rows(self) -> int:
        """Rows that are sent in all."""
        return len(self._bounds) - 1

    def next(self, max_tokens: int) -> Piece | None:
        while self._next < self.num_rows:
            first, last = self._next, min(self._next + max_tokens, self.num_rows)
            self._next = last
            some = slice(self._bounds[first], self._bounds[last])
            if some.start == some.stop:
                continue
            if self._is_whole:
                span = slice(first, last)
                pairs = self._pairs.part(some, first)
                return span, RoutedBatch.group(self._phase, self._rows.chosen(span), pairs)
            pairs = self._pairs.part(some)
            batch, used = RoutedBatch.group_used(self._phase, self._rows, pairs)
            assert used is not None  # fewer than all
            return used, batch
        return None


class _Rectangles:
    """Implements Pieces in the form of the protocol's version 1; they are cut already."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces

    def next(self, max_tokens: int) -> Piece | None:
        return next(self._pieces, None)
