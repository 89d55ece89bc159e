"""How much longer the processor's experts and a device's work take when both run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from dflash_runtime.engine.measuring.timing import Timer, medians
from dflash_runtime.placement.box import Together

_ROUNDS = 5


def measure_together(
    first: tuple[str, Timer], second: tuple[str, Timer], *, limit_s: float
) -> Together:
    """`first` runs again and again on a thread of its own, `second` on this one, for at least
    `limit_s` / 2; both also alone before. Each has a name, as in Together."""
    (first_name, first_timer), (second_name, second_timer) = first, second
    ((first_s, *_),) = medians([first_timer], limit_s=limit_s / 4)
    ((second_s, *_),) = medians([second_timer], limit_s=limit_s / 4)
    with _repeated(first_timer) as times:
        second_together_s = _median_for(second_timer, limit_s / 2)
        first_together_s = median(times[1:] or times) if times else first_s
    return Together(
        first_name,
        second_name,
        max(1.0, first_together_s / first_s),
        max(1.0, second_together_s / second_s),
    )


def _median_for(timer: Timer, limit_s: float) -> float:
    end_s, times = time.perf_counter() + limit_s, list[float]()
    while len(times) < _ROUNDS or time.perf_counter() < end_s:
        times.append(timer()[0])
    return median(times)


@contextmanager
def _repeated(timer: Timer) -> Iterator[list[float]]:
    """Runs a timer on a thread until the block ends; the times so far. Its error is raised."""
    times, errors, is_over = list[float](), list[BaseException](), threading.Event()

    def run() -> None:
        try:
            while not is_over.is_set():
                times.append(timer()[0])
        except BaseException as error:  # raised where it is waited for
            errors.append(error)

    thread = threading.Thread(target=run, name="dflash-together", daemon=True)
    thread.start()
    try:
        yield times
    finally:
        is_over.set()
        thread.join()
    if errors:
        raise errors[0]
