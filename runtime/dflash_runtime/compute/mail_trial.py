"""Results of a mailbox trial: round trips of words that both sides can compute.

`backend.DeviceMail` makes a trial, `tools.doctor_mailbox` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Protocol

import numpy as np

from dflash_protocol.ids import I64Array

TRIAL_GENERATION = 0
"""Generation number of memory for a trial."""

_BINS_OF_OCTAVE = 64
_NUM_BINS = 63 * _BINS_OF_OCTAVE


class Medium(StrEnum):
    """Memory that a mailbox's lines lie in."""

    HOST = "host memory"
    DEVICES = "device memory"


class FaultKind(IntEnum):
    """What can be wrong with a word, or, for MISSING, with a line; as in mailbox_probe.cu."""

    WRONG = 0
    """The word, or its check word, was never sent."""
    TORN = 1
    """The word was seen, briefly or for good, with another word's check."""
    STALE = 2
    """The word had arrived, and a second read returned the previous round's."""
    MISSING = 3
    """It did not arrive in time."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One word, or its check word, that was wrong; for MISSING `expected` and `found` are
    epochs."""

    kind: FaultKind
    round_number: int
    """Round in this medium, from 0."""
    line: int
    word: int
    expected: int
    found: int


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults that one side found in what the other sent."""

    counts: Mapping[FaultKind, int]
    first: Fault | None = None

    @property
    def total(self) -> int:
        """Number of faults of all kinds."""
        return sum(self.counts.values())

    def __add__(self, later: Faults) -> Faults:
        counts = {kind: self.counts.get(kind, 0) + later.counts.get(kind, 0) for kind in FaultKind}
        return Faults(counts, self.first or later.first)


NO_FAULTS = Faults({})


@dataclass(frozen=True, slots=True)
class TrialBatch:
    """Consecutive round trips. Shapes: trips_ns [N], those that were answered."""

    trips_ns: I64Array
    in_requests: Faults
    in_replies: Faults


class MailTrial(Protocol):
    """The asking side of a mailbox trial; another process answers."""

    def begin(self, timeout_s: float, is_live: Callable[[], bool]) -> None:
        """Wait until the other side is ready, and find which memory can be used; from now on
        `is_live` says whether the other side still runs.

        Raises: DaemonUnavailable if it does not; SettingsError if it has the same device.
        """

    @property
    def media(self) -> tuple[Medium, ...]:
        """Media that both devices see."""

    @property
    def why_not(self) -> str:
        """Why device memory cannot be used; empty if it can."""

    def run(self, medium: Medium, num_rounds: int, *, longest_pause_us: float) -> TrialBatch:
        """Run `num_rounds` round trips. With a pause each side waits up to `longest_pause_us`
        before it sends, and reads everything twice.

        Raises: DaemonUnavailable if the other side never answers.
        """

    def close(self) -> None:
        """Free the shared memory."""


@dataclass(slots=True)
class TripTimes:
    """A histogram of round-trip times, any number of them, in bins of 1.1 %."""

    longest_ns: int = 0
    bins: I64Array = field(default_factory=lambda: np.zeros(_NUM_BINS, np.int64))

    def add(self, trips_ns: I64Array) -> None:
        """Shapes: trips_ns [N]."""
        if not trips_ns.size:
            return
        self.longest_ns = max(self.longest_ns, int(trips_ns.max()))
        # A coarse clock may report 0.
        places = np.floor(np.log2(np.maximum(trips_ns, 1)) * _BINS_OF_OCTAVE).astype(np.int64)
        self.bins += np.bincount(places, minlength=_NUM_BINS)

    @property
    def num_trips(self) -> int:
        return int(self.bins.sum())

    def quantile_us(self, share: float) -> float:
        """Time that a fraction `share` of the trips did not exceed, to within 1.1 %; 0 without
        trips."""
        if not self.num_trips:
            return 0.0
        place = int(np.searchsorted(np.cumsum(self.bins), share * self.num_trips))
        return min(2 ** ((place + 1) / _BINS_OF_OCTAVE), self.longest_ns) * 1e-3

    def rows(self) -> list[tuple[float, float, int]]:
        """The histogram as (from, to, count), in microseconds; at most four rows an octave."""
        (used,) = np.nonzero(self.bins)
        if not used.size:
            return []
        step = _BINS_OF_OCTAVE // 4
        first, last = int(used[0]) // step, int(used[-1]) // step
        return [
            (
                2 ** (row / 4) * 1e-3,
                2 ** ((row + 1) / 4) * 1e-3,
                int(self.bins[row * step : (row + 1) * step].sum()),
            )
            for row in range(first, last + 1)
        ]
