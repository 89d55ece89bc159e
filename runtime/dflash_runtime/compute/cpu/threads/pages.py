"""Memory in pages, which a pool of threads touches before they are used.

The system allocates a page when it is first touched, and whatever touches it waits: 1 to 2 µs for
4 KiB, some 0.1 ms for a huge page; milliseconds in virtual machines whose host waits until then,
too.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
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

HUGE_PAGE = 2 << 20
_PAGE = 4096


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


def touch(ranges: Iterable[tuple[int, int]], workers: Workers | None) -> None:
    """Have every page of these ranges allocated; the threads take one range after another.

    A range is an address, a multiple of 8, and a number of bytes. What is there stays as it is,
    even if another thread writes it meanwhile.
    """
    ends = [(address, address + num_bytes) for address, num_bytes in ranges]
    if not ends:
        return
    words = line_of_words(LINE + 2 + 2 * len(ends))
    words[LINE] = len(ends)
    words[LINE + 2 : LINE + 2 + 2 * len(ends)] = np.ravel(ends)
    kernel, task = touch_kernel()
    kernel(words, 0 if workers is None else workers.address, task.address)


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
