"""Execution modes: how a batch is cut into requests, and which way is faster.

``batched`` sends a batch in as few requests as the link's capacity allows, ``stream`` in slices of
a few tokens, so that the daemon computes while more is being sent. Bits are the same. Times are
passed in.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from statistics import median

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
