"""Work that stalls is left behind; errors and Ctrl-C come through."""

from __future__ import annotations

import threading
import time

import pytest

from dflash_protocol.errors import PullFailed
from dflash_runtime.tools.pulling.watched import PullProgress, watched


def test_what_the_work_returns_and_raises_comes_through() -> None:
    assert watched(lambda progress: 7, stall_s=5, least_bytes_per_s=1) == 7

    def fails(progress: PullProgress) -> None:
        raise PullFailed("as it was")

    with pytest.raises(PullFailed, match="as it was"):
        watched(fails, stall_s=5, least_bytes_per_s=1)


@pytest.mark.parametrize("pause_s", [0.02, 60.0])
def test_work_that_moves_too_few_bytes_is_given_up(pause_s: float) -> None:
    """A byte now and then is no more than silence."""
    is_over = threading.Event()

    def slow(progress: PullProgress) -> None:
        try:
            while not is_over.wait(pause_s):
                progress.move(1)
        finally:
            is_over.set()

    began_s = time.monotonic()
    with pytest.raises(PullFailed, match=r"the hub sent .* bytes in 0 s"):
        watched(slow, stall_s=0.3, least_bytes_per_s=1000)
    assert time.monotonic() - began_s < 20
    if pause_s > 1:  # what waits for something else is left behind
        is_over.set()
    assert is_over.wait(20)  # what moves on finds that nobody waits


def test_work_that_goes_on_has_all_the_time_it_needs() -> None:
    def steady(progress: PullProgress) -> int:
        for _ in range(40):
            time.sleep(0.02)
            progress.move(1000)
        return progress.num_done

    seen: list[int] = []
    moved = watched(
        steady, stall_s=0.4, least_bytes_per_s=10, on_progress=lambda p: seen.append(p.num_done)
    )
    assert moved == seen[-1] == 40_000


def test_ctrl_c_does_not_wait_for_the_work() -> None:
    is_over = threading.Event()

    def press(progress: PullProgress) -> None:
        raise KeyboardInterrupt

    def work(progress: PullProgress) -> None:
        is_over.wait(60)
        with pytest.raises(PullFailed):
            progress.move(1)
        is_over.clear()

    with pytest.raises(KeyboardInterrupt):
        watched(work, stall_s=60, least_bytes_per_s=1, on_progress=press)
    is_over.set()
