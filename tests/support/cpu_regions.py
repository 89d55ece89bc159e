"""Parallel regions of the CPU backend's pool whose tasks record which thread ran them."""

from __future__ import annotations

import threading
from functools import cache

import numpy as np

from dflash_protocol.ids import I64Array
from dflash_runtime.compute.cpu.compile.compiling import (
    Kernel,
    RowFunction,
    compile_kernel,
)
from dflash_runtime.compute.cpu.simd import atomics
from dflash_runtime.compute.cpu.simd.types import i64
from dflash_runtime.compute.cpu.simd.vectors import address_of
from dflash_runtime.compute.cpu.threads import system
from dflash_runtime.compute.cpu.threads.parallel import claim, line_of_words, run_region

NUM_ITEMS, ITEMS, CALLS, VALUE, ITEM_NS, NAP_US, AWAITED_WORKERS, ZERO, NUM_FIELDS = range(9)
_MAX_THREADS = 64
_PATIENCE_NS = 20 * 10**9


def cpu_threads() -> set[threading.Thread]:
    """The threads of all pools, including pools of other tests that are not collected yet: their
    threads may end at any time."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("cpu-worker")}


def _note(args: int, counter: int, worker_idx: int) -> None:
    """Add VALUE to each item and 1 to this thread's calls; the caller may wait for workers."""
    calls = atomics.relaxed_load(args + 8 * CALLS)
    atomics.atomic_add(calls + 8 * worker_idx, 1)
    value = atomics.relaxed_load(args + 8 * VALUE)
    item_ns = atomics.relaxed_load(args + 8 * ITEM_NS)
    item = claim(counter)
    while item < atomics.relaxed_load(args + 8 * NUM_ITEMS):
        begin = system.monotonic_ns()
        atomics.atomic_add(atomics.relaxed_load(args + 8 * ITEMS) + 8 * item, value)
        while system.monotonic_ns() - begin < item_ns:
            pass
        nap_us = atomics.relaxed_load(args + 8 * NAP_US)
        if nap_us:
            system.sleep_while(args + 8 * ZERO, 0, nap_us)
        item = claim(counter)
    if worker_idx == 0:
        begin = system.monotonic_ns()
        for other in range(1, atomics.relaxed_load(args + 8 * AWAITED_WORKERS) + 1):
            while atomics.atomic_load(calls + 8 * other) == 0:
                system.pause()
                if system.monotonic_ns() - begin > _PATIENCE_NS:
                    return


def _repeat(pool: int, task: int, args: I64Array, counter: int, ns: I64Array) -> int:
    """Run regions with VALUEs 0, 1, 2 …; returns the number of wrong items and calls."""
    mistakes = expected = 0
    items, calls = args[ITEMS], args[CALLS]
    for region in range(ns.shape[0]):
        atomics.relaxed_store(address_of(args) + 8 * VALUE, region)
        expected += region
        begin = system.monotonic_ns()
        run_region(pool, task, address_of(args), counter)
        ns[region] = system.monotonic_ns() - begin
        mistakes += atomics.relaxed_load(calls) != region + 1
        for item in range(args[NUM_ITEMS]):
            mistakes += atomics.relaxed_load(items + 8 * item) != expected
    return mistakes


@cache
def _task() -> RowFunction:
    return RowFunction(_note, i64, i64, i64)


@cache
def _repeat_kernel() -> Kernel:
    return compile_kernel(_repeat, i64, i64, i64[::1], i64, i64[::1])


class Region:
    """A region that can be run repeatedly, and the record of its tasks."""

    def __init__(
        self, num_items: int, *, item_us: int = 0, nap_us: int = 0, awaited_workers: int = 0
    ) -> None:
        """Items take `item_us`, then sleep; the caller waits for workers, at most 20 s."""
        self.items = np.zeros(num_items, np.int64)
        self.calls = np.zeros(_MAX_THREADS, np.int64)
        self.task_address = _task().address
        self._counter = line_of_words(1)
        self._args = line_of_words(NUM_FIELDS)
        self._args[NUM_ITEMS] = num_items
        self._args[ITEMS] = self.items.ctypes.data
        self._args[CALLS] = self.calls.ctypes.data
        self._args[ITEM_NS] = 1000 * item_us
        self._args[NAP_US] = nap_us
        self._args[AWAITED_WORKERS] = awaited_workers
        self.args_address = int(self._args.ctypes.data)
        self.counter_address = int(self._counter.ctypes.data)

    def run(self, pool_address: int, times: int = 1) -> I64Array:
        """Nanoseconds that each region took; fails if one returned before all items were done."""
        self.items[:] = 0
        self.calls[:] = 0
        ns = np.zeros(times, np.int64)
        mistakes = _repeat_kernel()(
            pool_address, self.task_address, self._args, self.counter_address, ns
        )
        assert mistakes == 0
        return ns
