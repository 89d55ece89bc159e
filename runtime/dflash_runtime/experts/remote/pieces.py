"""How a batch is cut into requests: in which execution mode, and in pieces of how many rows.

Mode ``batched`` sends a batch in as few requests as the link's capacity allows, ``stream`` in
slices of a few tokens, so that the daemon computes while more is being sent. Bits are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from statistics import median
from typing import TypeAlias

import numpy as np

from dflash_protocol.batch import Hidden, Pairs, RoutedBatch, SomeRows
from dflash_protocol.ids import Phase
from dflash_protocol.wire.version1 import rectangles

STREAM_TOKENS = 4
"""Most tokens in one slice of mode ``stream``, unless settings say otherwise."""

_TRIAL = ("batched", "stream", "batched", "stream")
_SAMPLES_KEPT = 5
_FEWEST_BETWEEN = 32
"""Batches between two probes, at the least."""
_PROBE_SHARE = 0.01
"""Probes of the slower mode may cost this share of the time, on top of what the faster takes."""
_SLACK = 1.5
"""How much slower than `batched` a probe of `stream` may be found before it is cut short."""

_WINDOW = 16
"""Requests of one batch in flight at a time: as many as the daemon's end holds."""
_PROBE_WINDOW = 4
"""The window while streaming is probed: requests that were sent cannot be recalled."""
_NEARLY_ALL = 0.75
"""From this share of used rows on, a device sends all of them: a gather and the scatter of the
sums need the indices on the device, which takes longer."""


class ExecutionMode(StrEnum):
    """Values of the setting."""

    AUTO = "auto"
    BATCHED = "batched"
    STREAM = "stream"


class ModeChooser:
    """Finds the faster mode for batches of one kind by trying both on real ones.

    First both are tried twice; then the faster one is kept, and the other is probed from time to
    time, less often the more that costs. If it appears to have become faster, both are tried twice
    again.
    """

    def __init__(self) -> None:
        self.favourite = ExecutionMode.BATCHED
        self._samples: dict[ExecutionMode, deque[float]] = {
            mode: deque(maxlen=_SAMPLES_KEPT)
            for mode in (ExecutionMode.BATCHED, ExecutionMode.STREAM)
        }
        self._trial = [ExecutionMode(mode) for mode in _TRIAL]
        self._num_since_probe = 0
        self._spent_since_probe_s = 0.0
        self._probe_excess_s = 0.0

    def next_mode(self) -> ExecutionMode:
        """The mode for the next batch."""
        if self._trial:
            return self._trial[0]
        is_due = self._num_since_probe >= _FEWEST_BETWEEN
        if is_due and self._spent_since_probe_s * _PROBE_SHARE >= self._probe_excess_s:
            return self._other
        return self.favourite

    def stream_limit_s(self) -> float | None:
        """Seconds a pair beyond which streaming should be cut short; None if unknown."""
        samples = self._samples[ExecutionMode.BATCHED]
        return _SLACK * median(samples) if samples else None

    def note(self, mode: ExecutionMode, *, elapsed_s: float, num_pairs: int) -> None:
        """Record the time of a batch, or of the part of it that was sent in this mode."""
        s_per_pair = elapsed_s / num_pairs
        if self._trial:
            self._samples[mode].append(s_per_pair)
            if mode is self._trial[0]:
                self._trial.pop(0)
            if not self._trial:
                self._decide()
            return
        if mode is self.favourite:
            self._samples[mode].append(s_per_pair)
            self._num_since_probe += 1
            self._spent_since_probe_s += elapsed_s
            return
        expected = median(self._samples[self.favourite])
        self._note_probe(elapsed_s - expected * num_pairs)
        if s_per_pair < expected:
            for samples in self._samples.values():
                samples.clear()
            self._trial = [ExecutionMode(each) for each in _TRIAL]

    @property
    def _other(self) -> ExecutionMode:
        is_batched = self.favourite is ExecutionMode.BATCHED
        return ExecutionMode.STREAM if is_batched else ExecutionMode.BATCHED

    def _decide(self) -> None:
        costs = {mode: median(samples) for mode, samples in self._samples.items()}
        self.favourite = min(costs, key=lambda mode: costs[mode])  # batched if equal
        self._note_probe(0.0)

    def _note_probe(self, excess_s: float) -> None:
        self._probe_excess_s = max(0.0, excess_s)
        self._num_since_probe = 0
        self._spent_since_probe_s = 0.0


Piece: TypeAlias = tuple[SomeRows, RoutedBatch]
"""Rows of the step's hidden states, and the batch of them."""


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
    pieces: Iterator[Piece] | None = None
    """What is left to be sent, in requests of up to `max_tokens`; None: the batch is one."""

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
            cut.pieces = rectangles(batch, cut.max_tokens)
        elif num_tokens > cut.max_tokens:
            cut.pieces = slices(cut, rows, pairs, phase=phase)
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


def slices(cut: Cut, rows: Hidden, pairs: Pairs, *, phase: Phase) -> Iterator[Piece] | None:
    """Runs of rows that have pairs, up to `cut.max_tokens` each; None if one holds all of them.

    Each is grouped when it is asked for. Rows that no pair uses are left out, unless so many are
    used as `cut.whole_from` says.
    """
    num_tokens = rows.shape[0]
    firsts = pairs.first_of_token
    is_whole = firsts.size >= (num_tokens if cut.whole_from is None else cut.whole_from)
    if is_whole:
        firsts = np.searchsorted(pairs.token_indices, np.arange(num_tokens))
    if firsts.size <= cut.max_tokens:
        return None
    # Where the pairs of each row begin that is sent; then the number of pairs.
    bounds = [*firsts.tolist(), pairs.num_pairs]

    def pieces() -> Iterator[Piece]:
        last = 0
        while last < firsts.size:
            first, last = last, min(last + cut.max_tokens, firsts.size)
            some = slice(bounds[first], bounds[last])
            if some.start == some.stop:
                continue
            if is_whole:
                span, own = slice(first, last), pairs.part(some, first)
                yield span, RoutedBatch.group(phase, rows.chosen(span), own)
            else:
                batch, used = RoutedBatch.group_used(phase, rows, pairs.part(some))
                assert used is not None  # fewer than all
                yield used, batch

    return pieces()
