"""Memory that the system allocates when it is touched, and the pool that touches it ahead."""

from __future__ import annotations

import mmap
import threading

import numpy as np
import pytest

from dflash_protocol.ids import I64Array, U8Array
from dflash_runtime.compute.cpu.threads.pages import TouchSchedule, zero_pages
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.host_room import HUGE_PAGE
from support.allocated import allocated_bytes

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NOHUGEPAGE)


def ranges_of(memory: U8Array, num_ranges: int) -> I64Array:
    size = memory.nbytes // num_ranges
    firsts = memory.ctypes.data + np.arange(num_ranges) * size
    return np.stack([firsts, firsts + size], axis=1)


def test_new_memory_is_zero_and_not_allocated() -> None:
    for num_bytes in (1, 5000, MIB, 8 * MIB):
        used = zero_pages(num_bytes)
        used[:] = 1
        del used  # not to be given out again as it is
        memory = zero_pages(num_bytes)
        assert memory.shape == (num_bytes,)
        assert memory.ctypes.data % (HUGE_PAGE if num_bytes >= HUGE_PAGE else 4096) == 0
        assert allocated_bytes(memory) == 0
        assert not memory.any()
        memory[-1] = 1


def test_memory_that_there_cannot_be_is_refused() -> None:
    with pytest.raises(MemoryError):
        zero_pages(1 << 60)


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_ranges_are_touched_when_they_are_wanted(num_threads: int) -> None:
    memory = zero_pages(8 * MIB)
    workers = Workers(num_threads) if num_threads else None
    schedule = TouchSchedule(
        np.array([-1, 0, 10, 10, 10, 10, 99, 1000]), ranges_of(memory, 8), workers
    )
    allocated = {0: 1, 1: 2, 5: 2, 10: 2, 11: 6, 3: 6, 99: 6, 5000: 8, 6000: 8}
    for num_positions, num_ranges in allocated.items():
        schedule.touch(num_positions)
        assert allocated_bytes(memory) == num_ranges * MIB
    assert not memory.any()
    if workers is not None:
        workers.close()


def test_a_schedule_may_be_empty() -> None:
    TouchSchedule(np.empty(0, np.int64), np.empty((0, 2), np.int64)).touch(10)


def test_what_is_written_meanwhile_stays() -> None:
    """Pages are touched by an addition of 0 that no other write can fall into."""
    memory = zero_pages(4 * MIB)
    words = memory.view(np.int64)[::512]
    stops = threading.Event()

    def touch() -> None:
        while not stops.is_set():
            TouchSchedule(np.full(4, -1), ranges_of(memory, 4)).touch(0)

    toucher = threading.Thread(target=touch)
    toucher.start()
    try:
        for number in range(1, 2000):
            words[:] = number
            assert (words == number).all()
    finally:
        stops.set()
        toucher.join()
