"""How long things take: in turns, within a time, as medians."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

Timer = Callable[[], tuple[float, ...]]
"""Does something once; returns the seconds of each part of it that is measured."""

_MOST_ROUNDS = 100


def medians(timers: Sequence[Timer], *, limit_s: float, least: int = 3) -> list[tuple[float, ...]]:
    """The median seconds of each part, by timer. They take turns, so that whatever else the machine
    does meets all of them alike. A first round, which compiles and reads what is missing, is not
    counted; then `least` rounds follow, and more while `limit_s` lasts."""
    for timer in timers:
        timer()
    end_s, rounds = time.perf_counter() + limit_s, list[list[tuple[float, ...]]]()
    while len(rounds) < least or (len(rounds) < _MOST_ROUNDS and time.perf_counter() < end_s):
        rounds.append([timer() for timer in timers])
    return [
        tuple(median(part) for part in zip(*of_timer, strict=True))
        for of_timer in zip(*rounds, strict=True)
    ]


class TimeLeft:
    """A part's time: from when it is made until `limit_s` later."""

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.perf_counter() + limit_s

    @property
    def seconds(self) -> float:
        """0 once it is over."""
        return max(0.0, self._end_s - time.perf_counter())

    def share(self, share: float) -> float:
        """So much of what is left, in seconds."""
        return share * self.seconds
