"""Whether what was predicted from a box still holds. Pure: the caller measures."""

from __future__ import annotations

TOLERANCE = 0.25
"""Predictions may be off by this share."""
STALE_AFTER_S = 60.0
_WINDOW_S = 5.0
"""Service that is compared as a whole: single steps vary."""


class PredictionWatch:
    """Compares predicted times with measured ones.

    States: fresh; stale, once all service of a minute was off by more than TOLERANCE in the same
    direction, until `reset`. Used by one thread.
    """

    def __init__(self) -> None:
        self._predicted_s = self._measured_s = 0.0
        self._off_s = 0.0
        """Service that was off without a break; below 0: faster than predicted."""
        self._ratio = 1.0

    @property
    def is_stale(self) -> bool:
        """Whether the box should be measured anew."""
        return abs(self._off_s) >= STALE_AFTER_S

    @property
    def ratio(self) -> float:
        """Measured time divided by the predicted one, of the last whole window; 1 before."""
        return self._ratio

    def add(self, *, predicted_s: float, measured_s: float) -> None:
        """Add a piece of service, such as a step. Times that are not positive are ignored."""
        if not (predicted_s > 0.0 and measured_s > 0.0) or self.is_stale:
            return
        self._predicted_s += predicted_s
        self._measured_s += measured_s
        if self._measured_s < _WINDOW_S:
            return
        self._ratio = ratio = self._measured_s / self._predicted_s
        direction = (ratio > 1.0 + TOLERANCE) - (ratio < 1.0 - TOLERANCE)
        if direction * self._off_s <= 0.0:  # right again, or off the other way
            self._off_s = 0.0
        self._off_s += direction * self._measured_s
        self._predicted_s = self._measured_s = 0.0

    def reset(self) -> None:
        """Begin anew, with another box."""
        self._predicted_s = self._measured_s = self._off_s = 0.0
        self._ratio = 1.0
