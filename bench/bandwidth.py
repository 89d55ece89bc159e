"""Plain read bandwidth: threads that only sum up memory, in several sequential streams.

The share of it that a kernel reaches shows how much of the machine is unused. Both kinds of memory
are read: the mapped file, where weights are, and anonymous memory in huge pages.
"""

from __future__ import annotations

import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from bench.machine import touch_pages
from numba import njit

from dflash_protocol.ids import AnyArray

STREAMS = (1, 2, 4, 8, 16)
"""Numbers of sequential streams of one thread that are tried."""

_STEP_WORDS = 512
_SAMPLE_BYTES = 1 << 29


@njit(nogil=True)
def add_up(words, num_streams, begin, end):  # type: ignore[no-untyped-def]
    """Sum of words[begin:end], read as `num_streams` runs side by side."""
    run = (end - begin) // num_streams
    total = np.uint64(0)
    for place in range(0, run - _STEP_WORDS + 1, _STEP_WORDS):
        for stream in range(num_streams):
            # A slice: LLVM vectorises the loop over it, since no index can be negative.
            first = begin + stream * run + place
            step = words[first : first + _STEP_WORDS]
            for index in range(_STEP_WORDS):
                total += step[index]
    return total


class Reader:
    """Reads the file at `path`, and anonymous memory, with `num_threads` threads."""

    def __init__(self, path: Path, *, num_threads: int) -> None:
        with path.open("rb") as file:
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped = np.frombuffer(self._mapping, np.uint8)
        touch_pages(mapped)
        anonymous = np.ones(_SAMPLE_BYTES // 8, np.uint64)
        self._memory: dict[str, AnyArray] = {
            "mapped": mapped[: mapped.size // 8 * 8].view(np.uint64),
            "anonymous": anonymous,
        }
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads)
        self.read("anonymous", 1, 0)  # compiles

    def read(self, kind: str, num_streams: int, round_number: int) -> float:
        """Bytes per second of reading half a gibibyte, another part in each round."""
        words = self._memory[kind]
        size = min(_SAMPLE_BYTES // 8, words.size)
        places = (words.size - size) // size + 1
        begin = round_number % places * size
        share = size // self._num_threads

        def part(index: int) -> int:
            first = begin + index * share
            return int(add_up(words, num_streams, first, first + share))

        started_s = time.perf_counter()
        list(self._pool.map(part, range(self._num_threads)))
        return 8 * share * self._num_threads / (time.perf_counter() - started_s)
