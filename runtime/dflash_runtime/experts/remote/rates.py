"""How long a daemon takes for a pair, as measured, and the deadlines that follow."""

from __future__ import annotations

from dflash_protocol.ids import Phase

_DEADLINE_FACTOR = 4.0
_LONGEST_DEADLINE_S = 600.0
_MOST_DOUBLINGS = 4
"""Limit on how often the expected time of a request is doubled while none is answered."""
_RATE_WEIGHT = 0.2


class RateEstimate:
    """Seconds a pair of one daemon by phase: a running mean over all its sessions, and before a
    phase's first reply the rate that the daemon reported. Used by the data thread."""

    def __init__(self, min_deadline_s: float) -> None:
        self._min_deadline_s = min_deadline_s
        self._reported_s = 0.0
        self._measured_s: dict[Phase, float] = {}
        self._num_doublings = 0

    def begin_session(self, pairs_per_s: float) -> None:
        """The daemon of a new session has measured this rate itself."""
        self._reported_s = 1.0 / pairs_per_s

    def deadline_s(self, phase: Phase, num_pairs: int) -> float:
        """The deadline of a request after which this many pairs are in flight."""
        predicted_s = num_pairs * self._measured_s.get(phase, self._reported_s)
        return min(max(self._min_deadline_s, _DEADLINE_FACTOR * predicted_s), _LONGEST_DEADLINE_S)

    def note(self, phase: Phase, s_per_pair: float) -> None:
        """A request has been answered."""
        known = self._measured_s.get(phase, self._reported_s)
        self._measured_s[phase] = known + _RATE_WEIGHT * (s_per_pair - known)

    def note_late(self, phase: Phase) -> None:
        """A request was not answered in time: the next ones get twice as long, up to a limit for a
        daemon that never answers."""
        if self._num_doublings < _MOST_DOUBLINGS:
            self._num_doublings += 1
            self._measured_s[phase] = 2.0 * self._measured_s.get(phase, self._reported_s)

    def forgive(self) -> None:
        """A batch has been answered after trouble: doubling may begin again."""
        self._num_doublings = 0
