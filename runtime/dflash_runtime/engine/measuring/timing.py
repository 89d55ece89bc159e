"""How long things take: in turns, within a time, as medians."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

Timer = Callable[[], tuple[float, ...]]
"""Does something once; returns the seconds of each part of it that is measured."""

_MOST_ROUNDS = 100
_QUICK_S = 0.1


def medians(
    timers: Sequence[Timer],
    *,
    limit_s: float,
    least: int = 3,
    after_first: Callable[[], None] = lambda: None,
) -> list[tuple[float, ...]]:
    """The median seconds of each part, by timer. They take turns, so that whatever else the machine
    does meets all of them alike. A first round, which compiles and reads what is missing, is not
    counted; then rounds follow while `limit_s` lasts: `least` of them if these are done in twice
    that time or _QUICK_S, but at least one. `after_first` is called after the first round."""
    for timer in timers:
        timer()
    after_first()
    began_s, rounds = time.perf_counter(), list[list[tuple[float, ...]]]()
    while True:
        rounds.append([timer() for timer in timers])
        passed_s = time.perf_counter() - began_s
        is_enough = len(rounds) >= least or passed_s > max(2 * limit_s, _QUICK_S)
        if len(rounds) == _MOST_ROUNDS or (passed_s >= limit_s and is_enough):
            break
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
