"""Medians of several things that take turns; two things at the same time."""

from __future__ import annotations

import threading
import time

import pytest

from dflash_runtime.engine.measuring.timing import TimeLeft, medians
from dflash_runtime.engine.measuring.together import measure_together


def test_medians_of_parts_without_the_first_round() -> None:
    times, turns = iter([99.0, 3.0, 1.0, 2.0]), list[str]()

    def several() -> tuple[float, float]:
        turns.append("a")
        value = next(times)
        return value, 10 * value

    def other() -> tuple[float]:
        turns.append("b")
        return (7.0,)

    assert medians([several, other], limit_s=0.0, least=3) == [(2.0, 20.0), (7.0,)]
    assert turns == ["a", "b"] * 4


def test_counts_may_begin_after_the_first_round() -> None:
    turns = list[str]()

    def timer() -> tuple[float]:
        turns.append("a")
        return (1.0,)

    medians([timer, timer], limit_s=0.0, least=1, after_first=lambda: turns.append("counts"))
    assert turns[:3] == ["a", "a", "counts"]
    assert turns.count("counts") == 1
    assert len(turns) >= 5


def test_more_rounds_while_there_is_time() -> None:
    calls = 0

    def timer() -> tuple[float]:
        nonlocal calls
        calls += 1
        return (1.0,)

    medians([timer], limit_s=10.0)
    assert 20 < calls < 1000
    assert TimeLeft(-1.0).seconds == 0.0
    assert 4.0 < TimeLeft(10.0).share(0.5) <= 5.0


@pytest.mark.parametrize(("limit_s", "num_calls"), [(0.0, 3), (0.2, 6)])
def test_long_rounds_end_with_the_time(limit_s: float, num_calls: int) -> None:
    calls = 0

    def timer() -> tuple[float]:
        nonlocal calls
        calls += 1
        time.sleep(0.09)
        return (1.0,)

    medians([timer], limit_s=limit_s, least=5)
    assert calls <= num_calls


def test_things_that_take_longer_beside_each_other_are_timed_so() -> None:
    lock, num_running = threading.Lock(), 0

    def timed() -> tuple[float]:
        nonlocal num_running
        with lock:
            num_running += 1
        time.sleep(0.002)
        with lock:
            seconds = float(num_running)
            num_running -= 1
        return (seconds,)

    found = measure_together(("one", timed), ("other", timed), limit_s=0.1)
    assert (found.first, found.second) == ("one", "other")
    assert (found.first_factor, found.second_factor) == (2.0, 2.0)


def test_a_failure_beside_is_raised_and_the_thread_ended() -> None:
    ours = threading.current_thread()

    def failing() -> tuple[float]:
        if threading.current_thread() is not ours:
            raise RuntimeError("it fails beside")
        return (1e-3,)

    with pytest.raises(RuntimeError):
        measure_together(("a", failing), ("b", lambda: (1e-3,)), limit_s=0.01)
    assert not [each for each in threading.enumerate() if each.name == "dflash-together"]
