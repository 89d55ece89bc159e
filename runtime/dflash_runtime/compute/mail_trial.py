"""What a trial of a mailbox finds: round trips of words that both sides can work out.

Knows nothing of devices: `backend.DeviceMail` gives a trial, `tools.doctor_mailbox` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Protocol

import numpy as np

from dflash_protocol.ids import I64Array

TRIAL_GENERATION = 0
"""Of memory for a trial."""

_BINS_OF_OCTAVE = 64
_NUM_BINS = 63 * _BINS_OF_OCTAVE


class Medium(StrEnum):
    """Memory that the lines of a mailbox lie in."""

    HOST = "host memory"
    DEVICES = "device memory"


class FaultKind(IntEnum):
    """What can be wrong with a word, or, of MISSING, with a line; as mailbox_probe.cu has it."""

    WRONG = 0
    """Nobody sent it, or nobody sent its check."""
    TORN = 1
    """It stood, for a time or for good, beside the check of another."""
    STALE = 2
    """It had come, and was again what it was a round ago when it was looked at once more."""
    MISSING = 3
    """It has not come in time."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One word that was not what it should be, or its check; of MISSING these are epochs."""

    kind: FaultKind
    round_number: int
    """Of the trial's in this medium, from 0."""
    line: int
    word: int
    expected: int
    found: int


@dataclass(frozen=True, slots=True)
class Faults:
    """What one side has found in what the other sent."""

    counts: Mapping[FaultKind, int]
    first: Fault | None = None

    @property
    def total(self) -> int:
        """Of all kinds."""
        return sum(self.counts.values())

    def __add__(self, later: Faults) -> Faults:
        counts = {kind: self.counts.get(kind, 0) + later.counts.get(kind, 0) for kind in FaultKind}
        return Faults(counts, self.first or later.first)


NO_FAULTS = Faults({})


@dataclass(frozen=True, slots=True)
class TrialBatch:
    """Round trips that followed each other. Shapes: trips_ns [N], of those that were answered."""

    trips_ns: I64Array
    in_requests: Faults
    in_replies: Faults


class MailTrial(Protocol):
    """The asking side of a mailbox with another process, which answers everything."""

    def begin(self, timeout_s: float, is_live: Callable[[], bool]) -> None:
        """Wait until the other side is ready, and see which memory can be used; `is_live` says,
        from now on, whether there is another side.

        Raises: DaemonUnavailable if there is none; SettingsError if it has the same device.
        """

    @property
    def media(self) -> tuple[Medium, ...]:
        """Those that both devices see."""

    @property
    def why_not(self) -> str:
        """Why devices' memory cannot be used; empty if it can."""

    def run(self, medium: Medium, num_rounds: int, *, longest_pause_us: float) -> TrialBatch:
        """So many round trips. With a pause either side waits before it sends, for some time up to
        that, and looks at everything twice.

        Raises: DaemonUnavailable if the other side does not answer at all.
        """

    def close(self) -> None:
        """Give back what is shared."""


@dataclass(slots=True)
class TripTimes:
    """How long round trips took, however many, in bins of 1.1 %."""

    longest_ns: int = 0
    bins: I64Array = field(default_factory=lambda: np.zeros(_NUM_BINS, np.int64))

    def add(self, trips_ns: I64Array) -> None:
        """Shapes: trips_ns [N]."""
        if not trips_ns.size:
            return
        self.longest_ns = max(self.longest_ns, int(trips_ns.max()))
        # A clock that ticks seldom may say that no time has passed.
        places = np.floor(np.log2(np.maximum(trips_ns, 1)) * _BINS_OF_OCTAVE).astype(np.int64)
        self.bins += np.bincount(places, minlength=_NUM_BINS)

    @property
    def num_trips(self) -> int:
        return int(self.bins.sum())

    def quantile_us(self, share: float) -> float:
        """That many, of 1, took no longer, to within 1.1 %; 0 if there are none."""
        if not self.num_trips:
            return 0.0
        place = int(np.searchsorted(np.cumsum(self.bins), share * self.num_trips))
        return min(2 ** ((place + 1) / _BINS_OF_OCTAVE), self.longest_ns) * 1e-3

    def rows(self) -> list[tuple[float, float, int]]:
        """A histogram: from, to, in microseconds, and how many; four rows an octave at most."""
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
