"""Starts and ends the threads of a pool; their compiled loop is in parallel.

Results do not depend on the number of threads.
"""

from __future__ import annotations

import os
import time
from functools import cache
from threading import Thread, current_thread, get_native_id
from weakref import WeakSet, finalize

from dflash_protocol.ids import I64Array
from dflash_runtime.compute.cores import num_at_once
from dflash_runtime.compute.cpu.threads import parallel
from dflash_runtime.compute.topology import read_topology

SPIN_US = 50
"""How long a thread spins for work before it sleeps: several times what waking it takes."""

_TIMEOUT_S = 5.0
"""How long `close` waits for threads in a region; one that hangs ends with the process."""


class Workers:
    """Owns ``num_threads - 1`` threads until closed; none for one thread.

    Kernels are passed the pool's `address`, valid while this object lives. All threads take part in
    regions until `begin` says of what size a pass is. After `close`, and in a forked child, callers
    do all work themselves.
    """

    def __init__(self, num_threads: int, *, spin_us: int = SPIN_US) -> None:
        check_num_threads(num_threads)
        if num_threads > num_at_once(read_topology()):
            spin_us = 0  # spinning would take a core from another thread
        self.num_threads = num_threads
        self._pool = parallel.new_pool(num_threads - 1, 1000 * spin_us)
        self._words = self._pool.data
        self.address = int(self._pool.ctypes.data)
        threads = [
            Thread(
                target=_serve,
                args=(self._pool, worker_idx),
                name=f"cpu-worker-{worker_idx}",
                daemon=True,
            )
            for worker_idx in range(1, num_threads)
        ]
        # Without `close`, when this object is collected or the interpreter ends.
        self._end = finalize(self, _end, self._pool, threads)
        if threads:
            parallel.serve_kernel()
            parallel.stop_kernel()
            parallel.limit_kernel()
            _forget_threads_in_children()
            _all_workers.add(self)
        try:
            for thread in threads:
                thread.start()
        except BaseException:  # no more threads available, or interrupted
            self.close()
            raise

    @property
    def decode_threads(self) -> int:
        """How many threads take part in passes over few rows."""
        return self._words[parallel.FEW] + 1

    def use_for_decode(self, num_threads: int) -> None:
        """Set `decode_threads`, and begin such a pass. Raises: ValueError for more than there
        are."""
        if not 1 <= num_threads <= self.num_threads:
            raise ValueError(f"{num_threads} threads of {self.num_threads}")
        self._words[parallel.FEW] = num_threads - 1
        self.begin(1)

    def begin(self, num_rows: int) -> None:
        """Regions until the next call belong to a pass over this many rows: in one over few of them
        `decode_threads` take part, and the others sleep. Results are the same."""
        words = self._words
        few_or_all = parallel.FEW if num_rows <= parallel.FEW_ROWS else parallel.NUM_WORKERS
        if words[few_or_all] != words[parallel.LIMIT]:
            parallel.limit_kernel()(self.address, num_rows)

    def spin_for(self, spin_s: float) -> None:
        """Threads without work poll for so long before they sleep, if each has a core."""
        if self.num_threads <= num_at_once(read_topology()):
            self._words[parallel.SPIN_NS] = int(1e9 * spin_s)

    def idle(self) -> None:
        """No work is coming for a while: spinning threads sleep and free their cores. The next
        region wakes them as usual."""
        words = self._words
        words[parallel.IDLE] = words[parallel.REGION]

    def close(self) -> None:
        """End the threads. Callers do later work alone."""
        self._end()

    def _forget_threads(self) -> None:
        self._end.detach()
        self._pool[parallel.REGION] = parallel.STOP


_all_workers: WeakSet[Workers] = WeakSet()


@cache
def _forget_threads_in_children() -> None:
    """A child of fork has the pool's memory but not its threads."""

    def forget() -> None:
        for workers in list(_all_workers):
            workers._forget_threads()

    os.register_at_fork(after_in_child=forget)


def check_num_threads(num_threads: int) -> None:
    """Raises: ValueError if no pool can have this many threads."""
    if not 1 <= num_threads <= parallel.MAX_WORKERS + 1:
        raise ValueError(f"num_threads is {num_threads}, expected at least 1")


# Functions, not methods: a thread or finalizer that referred to its Workers would keep it alive.


def _serve(pool: I64Array, worker_idx: int) -> None:
    parallel.serve_kernel()(pool.ctypes.data, worker_idx, get_native_id())


def _end(pool: I64Array, threads: list[Thread]) -> None:
    if not threads:
        return
    parallel.stop_kernel()(pool.ctypes.data)
    deadline_s = time.monotonic() + _TIMEOUT_S
    for thread in threads:
        # A thread may never have started, or be the one whose garbage collection called this.
        if thread.is_alive() and thread is not current_thread():
            thread.join(max(0.0, deadline_s - time.monotonic()))
