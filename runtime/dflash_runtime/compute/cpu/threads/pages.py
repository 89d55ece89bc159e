"""Memory in pages, which a pool of threads touches before they are used.

The system allocates a page when it is first touched, and whatever touches it waits: 1 to 2 µs for
4 KiB, some 0.1 ms for a huge page; milliseconds in virtual machines whose host waits until then,
too.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from functools import cache

import numpy as np

from dflash_protocol.ids import I64Array, U8Array
from dflash_runtime.compute.cpu.compile.compiling import (
    Kernel,
    RowFunction,
    compile_kernel,
    compile_task,
)
from dflash_runtime.compute.cpu.simd import atomics
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import i64
from dflash_runtime.compute.cpu.threads.parallel import LINE, claim, line_of_words, run_on
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.host_room import HUGE_PAGE

_PAGE = 4096
_NEVER = 1 << 62


def zero_pages(num_bytes: int) -> U8Array:
    """Zero bytes from a page's boundary on, a huge page's if they fill one. None is allocated yet.

    Not from numpy: memory that it reuses would be allocated. Raises: MemoryError.
    """
    unit = HUGE_PAGE if num_bytes >= HUGE_PAGE else _PAGE
    try:
        room = mmap.mmap(-1, num_bytes + unit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for {num_bytes} bytes") from error
    if unit == HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            room.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(room, np.uint8)
    first = -pages.ctypes.data % unit
    return pages[first : first + num_bytes]


class TouchSchedule:
    """Ranges of memory that are touched as a sequence grows; those of one call by all threads.

    Shapes: wanted_after [N], ascending: a range is touched once there are more positions; ranges
    [N, 2], first address, a multiple of 8, and end. The memory belongs to the caller. Without
    `workers` the caller of `touch` does it alone. Used by one thread at a time.
    """

    __slots__ = ("_next", "_num_touched", "_ranges", "_wanted_after", "_workers")

    def __init__(
        self, wanted_after: I64Array, ranges: I64Array, workers: Workers | None = None
    ) -> None:
        self._wanted_after, self._ranges, self._workers = wanted_after, ranges, workers
        self._num_touched = 0
        self._next = _NEVER
        self._set_next()

    def touch(self, num_positions: int) -> None:
        """Have every page allocated that is wanted for so many positions. What is there stays as it
        is, even if another thread writes it meanwhile."""
        if num_positions <= self._next:
            return
        end = int(np.searchsorted(self._wanted_after, num_positions))
        ranges = self._ranges[self._num_touched : end]
        words = line_of_words(LINE + 2 + ranges.size)
        words[LINE] = ranges.shape[0]
        words[LINE + 2 : LINE + 2 + ranges.size] = ranges.ravel()
        kernel, task = touch_kernel()
        kernel(words, 0 if self._workers is None else self._workers.address, task.address)
        self._num_touched = end
        self._set_next()

    def _set_next(self) -> None:
        left = self._wanted_after[self._num_touched :]
        self._next = int(left[0]) if left.size else _NEVER


def _touch_task(args: int, counter: int, worker_idx: int) -> None:
    """Words: the number of ranges, 0, and the first address and the end of each range."""
    num_ranges = atomics.relaxed_load(args)
    # Only at run time known to be 0: the compiler would make a plain read of adding a constant 0,
    # and a read does not allocate.
    nothing = atomics.relaxed_load(args + 8)
    while True:
        item = claim(counter)
        if item >= num_ranges:
            return
        place = atomics.relaxed_load(args + 16 + 16 * item)
        end = atomics.relaxed_load(args + 24 + 16 * item)
        while place < end:
            atomics.relaxed_add(place, nothing)
            place = (place // _PAGE + 1) * _PAGE


def _touch(words: I64Array, pool: int, task: int) -> None:
    """Words: a counter and, a line later, those of the task."""
    counter = v.address_of(words)
    run_on(pool, task, counter + 8 * LINE, counter)


@cache
def touch_kernel() -> tuple[Kernel, RowFunction]:
    """The kernel, and the task whose address it is passed."""
    return compile_kernel(_touch, i64[::1], i64, i64), compile_task(_touch_task)
