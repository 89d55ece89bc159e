"""Work shared by threads without leaving compiled code: parallel regions, and workers that join.

A caller opens a region; it and all idle workers each call the region's task once, and take items
until none is left. A worker that comes late finds the region closed and is not waited for. A worker
that is preempted while it holds an item is moved to the caller's core.

A task must not raise: exceptions are not carried out of it.

The pool is an array of int64; words that are written at different times are on separate cache
lines.

    LOCK     1 while a caller is in a region
    REGION   epoch, STOP (for ever), OPEN and, in the low bits, how many workers have entered; of
             a closed region also those that came too late
    TASK …   the region's task and its arguments; written by the caller while the region is closed
    LIMIT    workers with a larger number do not join, and sleep until it changes
    FEW      the LIMIT of passes over few rows
    LEFT     how many workers have left the region
    AWAITED  the LEFT for which the caller sleeps, or 0
    SLEEPY   1 if a worker sleeps or is about to
    IDLE     a REGION after whose epoch workers sleep at once instead of spinning for the next
    MOVING   1 while a thread is being moved to another core
    INSIDE … for each worker, its thread's id while it is in a region, else 0

Why this is correct, also with weakly ordered memory:

* TASK, ARGS and the counter are written before REGION is opened; a worker reads them after it has
  entered: it adds 1 to a REGION that it saw open, and has entered if the word was still open when
  it did, maybe of a later epoch. (With a compare-and-swap, many workers would fail in turn.) In an
  epoch a worker adds at most once: the count does not reach OPEN. Epochs do not repeat.
* Closing the region and reading the number of workers inside is one operation. The caller releases
  LOCK, and with it TASK and LEFT, only when all of them have left: their writes come before LEFT.
* A worker reads REGION, sets SLEEPY, and has the kernel compare REGION again before it sleeps. A
  caller clears SLEEPY, opens REGION, and wakes all if SLEEPY was set before or is set after that.
  In either order, the caller sees SLEEPY or the kernel sees the new REGION. AWAITED and LEFT work
  in the same way. Besides, every sleep has a timeout: the kernel compares only half the word, and
  with it the epoch's lowest 18 bits.
* LIMIT saves work, and is no promise: a worker that read it before it was lowered may still join.
  Those beyond it sleep on LIMIT and leave SLEEPY alone, so that no region wakes them. `stop` sets
  STOP, then LIMIT: a worker sees the one, or the kernel sees the other.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from dflash_protocol.ids import I64Array
from dflash_runtime.compute.cpu.compile.compiling import Kernel, compile_kernel, helper
from dflash_runtime.compute.cpu.simd import atomics
from dflash_runtime.compute.cpu.simd.types import I64, emit_call, i64, primitive, void
from dflash_runtime.compute.cpu.simd.untyped import ir
from dflash_runtime.compute.cpu.threads import system

LINE = 16
"""Words between those that must not share cache lines: two lines, as CPUs fetch pairs."""

LOCK, REGION, TASK, LEFT, AWAITED, SLEEPY, IDLE = range(0, 7 * LINE, LINE)
ARGS, COUNTER, CORE, SPIN_NS, NUM_WORKERS, LIMIT, FEW = range(TASK + 1, TASK + 8)
MOVING = IDLE + 1
INSIDE, CPU_NS = IDLE + LINE, IDLE + LINE + 1

OPEN = 1 << 12
STOP = 2 * OPEN
EPOCH = 4 * OPEN

MAX_WORKERS = OPEN - 1

FEW_ROWS = 8
"""Passes over up to this many rows read more than they compute: decode steps, verify passes."""

_NUM_POLLS = 8
"""Reads of a word between two reads of the clock."""

_IDLE_TIMEOUT_US = 500_000
_LEAVE_TIMEOUT_US = 1_000

_LEAVE_SPIN_NS = 10_000
"""How long a caller spins between two checks for preempted workers."""


def line_of_words(num_words: int) -> I64Array:
    """Zeros on cache lines of their own."""
    num_words = -(-num_words // LINE) * LINE
    room = np.zeros(num_words + LINE, np.int64)
    first = -room.ctypes.data // room.itemsize % LINE
    return room[first : first + num_words]


def new_pool(num_workers: int, spin_ns: int) -> I64Array:
    """The state of a pool that `num_workers` threads will serve."""
    pool = line_of_words(INSIDE + LINE * num_workers)
    pool[NUM_WORKERS] = pool[LIMIT] = pool[FEW] = num_workers
    pool[REGION] = 0 if num_workers else STOP
    pool[SPIN_NS] = spin_ns
    pool[IDLE] = -1
    return pool


@primitive(void, i64, i64, i64, i64)
def call_task(builder: Any, task: Any, args: Any, counter: Any, worker_idx: Any) -> None:
    """Call a function ``void(int64, int64, int64)`` by its address."""
    emit_call(builder, ir.VoidType(), task, [args, counter, worker_idx])


# -- for kernels ----------------------------------------------------------------------------------


@helper
def claim(counter: int) -> int:
    """Take the next item: 0, 1, 2 …"""
    return atomics.relaxed_add(counter, 1)  # type: ignore[no-any-return]


@primitive(i64)
def new_counter(builder: Any) -> Any:
    """Address of a word for `claim`, with a LINE of words behind it; it lives until the kernel
    returns."""
    with builder.goto_entry_block():
        counter = builder.alloca(ir.ArrayType(I64, 2 * LINE))
    counter.align = 8 * LINE
    return builder.ptrtoint(counter, I64)


@helper
def run_alone(task: int, args: int, counter: int) -> None:
    """A region without workers, for work that takes less time than waking them."""
    atomics.relaxed_store(counter, 0)
    call_task(task, args, counter, 0)


@helper
def run_region(pool: int, task: int, args: int, counter: int) -> None:
    """Have ``task(args, counter, worker_idx)`` called once by every participant; then return.

    All are addresses: of a pool, of a function ``void(int64, int64, int64)``, of that function's
    arguments, and of a word that `claim` counts in, best on its own cache line. `worker_idx` is 0
    for the caller, else the worker's number: unique within a region but not among regions, since a
    caller that finds the pool busy, or calls from within a task, does its work alone, as 0.
    """
    atomics.relaxed_store(counter, 0)
    lock, region = pool + 8 * LOCK, pool + 8 * REGION
    is_ours = atomics.relaxed_load(region) & STOP == 0 and atomics.relaxed_load(lock) == 0
    if not is_ours or not atomics.atomic_replace(lock, 0, 1):
        call_task(task, args, counter, 0)
        return
    sleepy, left = pool + 8 * SLEEPY, pool + 8 * LEFT
    atomics.relaxed_store(pool + 8 * TASK, task)
    atomics.relaxed_store(pool + 8 * ARGS, args)
    atomics.relaxed_store(pool + 8 * COUNTER, counter)
    atomics.relaxed_store(pool + 8 * CORE, system.current_core())
    atomics.relaxed_store(left, 0)
    has_sleepers = atomics.relaxed_load(sleepy) != 0
    if has_sleepers:
        atomics.relaxed_store(sleepy, 0)
    # So that neither a concurrent STOP is overwritten nor a late worker counted.
    word = atomics.relaxed_load(region)
    while not atomics.atomic_replace(region, word, (word & ~(OPEN - 1)) + EPOCH + OPEN):
        word = atomics.relaxed_load(region)
    if has_sleepers or atomics.atomic_load(sleepy) != 0:
        system.wake(region)
    call_task(task, args, counter, 0)
    num_entered = atomics.atomic_and(region, ~OPEN) & (OPEN - 1)
    if atomics.atomic_load(left) != num_entered:
        _await_workers(pool, num_entered)
    atomics.atomic_store(lock, 0)


@helper
def run_on(pool: int, task: int, args: int, counter: int) -> None:
    """`run_region`, or `run_alone` if `pool` is 0."""
    if pool == 0:
        run_alone(task, args, counter)
    else:
        run_region(pool, task, args, counter)


@helper
def _set_limit(pool: int, num_workers: int) -> None:
    """From now on the first `num_workers` alone join regions; those that sleep are woken."""
    limit = pool + 8 * LIMIT
    atomics.atomic_store(limit, num_workers)
    system.wake(limit)


@helper
def begin_pass(pool: int, num_rows: int) -> None:
    """Regions until the next call belong to a pass over this many rows: only the first FEW workers
    join those of a pass over few."""
    num_workers = atomics.relaxed_load(pool + 8 * (FEW if num_rows <= FEW_ROWS else NUM_WORKERS))
    if atomics.relaxed_load(pool + 8 * LIMIT) != num_workers:
        _set_limit(pool, num_workers)


@helper
def _await_workers(pool: int, num_entered: int) -> None:
    """Spin for a short time, then sleep, so that another thread can have the core.

    Preferably a preempted worker: the core it has lost may be taken for milliseconds.
    """
    left, awaited = pool + 8 * LEFT, pool + 8 * AWAITED
    checked_ns = system.monotonic_ns()
    end_spinning_ns = checked_ns + atomics.relaxed_load(pool + 8 * SPIN_NS)
    has_checked = False
    num_left = atomics.atomic_load(left)
    while num_left != num_entered:
        if system.monotonic_ns() < end_spinning_ns:
            _spin(left, num_entered)
        else:
            atomics.atomic_store(awaited, num_entered)
            num_left = atomics.atomic_load(left)
            if num_left != num_entered:
                system.sleep_while(left, num_left, _LEAVE_TIMEOUT_US)
        num_left = atomics.atomic_load(left)
        if num_left != num_entered:
            now_ns = system.monotonic_ns()
            if _fetch_preempted(pool, now_ns - checked_ns if has_checked else 0):
                end_spinning_ns = now_ns
            checked_ns, has_checked = now_ns, True
    atomics.relaxed_store(awaited, 0)


@helper
def _spin(left: int, num_entered: int) -> None:
    end_ns = system.monotonic_ns() + _LEAVE_SPIN_NS
    while system.monotonic_ns() < end_ns:
        for _ in range(_NUM_POLLS):
            if atomics.atomic_load(left) == num_entered:
                return
            system.pause()


@helper
def _fetch_preempted(pool: int, ns: int) -> bool:
    """Move one worker here that ran for less than half of the last `ns`; returns whether there was
    one."""
    has_fetched = False
    for worker in range(atomics.relaxed_load(pool + 8 * NUM_WORKERS)):
        inside = pool + 8 * (INSIDE + LINE * worker)
        cpu_ns = pool + 8 * (CPU_NS + LINE * worker)
        thread_id = atomics.atomic_load(inside)
        if thread_id != 0:
            before, now = atomics.relaxed_load(cpu_ns), system.cpu_ns(thread_id)
            atomics.relaxed_store(cpu_ns, now)
            if not has_fetched and 2 * (now - before) < ns and _may_move(pool):
                system.fetch_thread(thread_id, system.current_core())
                atomics.atomic_store(pool + 8 * MOVING, 0)
                has_fetched = True
    return has_fetched


@helper
def _may_move(pool: int) -> bool:
    """Whether no other thread is moving one; if so, the caller must clear MOVING afterwards.

    A move narrows a thread's affinity, then restores it: a concurrent move could take the narrowed
    one for the original.
    """
    return atomics.atomic_replace(pool + 8 * MOVING, 0, 1)  # type: ignore[no-any-return]


# -- for workers ----------------------------------------------------------------------------------


def _serve(pool: int, worker_idx: int, thread_id: int) -> None:
    """A worker's loop: join one region after another until the pool stops."""
    region, left = pool + 8 * REGION, pool + 8 * LEFT
    inside = pool + 8 * (INSIDE + LINE * (worker_idx - 1))
    last_epoch = 0
    while True:
        word = _await_region(pool, worker_idx, last_epoch)
        if word & STOP:
            return
        word = atomics.atomic_add(region, 1)
        if word & OPEN:
            last_epoch = word // EPOCH
            task = atomics.relaxed_load(pool + 8 * TASK)
            args = atomics.relaxed_load(pool + 8 * ARGS)
            counter = atomics.relaxed_load(pool + 8 * COUNTER)
            atomics.atomic_store(inside, thread_id)
            call_task(task, args, counter, worker_idx)
            atomics.atomic_store(inside, 0)
            num_left = atomics.atomic_add(left, 1) + 1
            if atomics.atomic_load(pool + 8 * AWAITED) == num_left:
                system.wake(left)


@helper
def _await_region(pool: int, worker_idx: int, last_epoch: int) -> int:
    """Wait until REGION says stop, or this worker may join it and its epoch is not `last_epoch`;
    return it.

    A worker does not stay on the caller's core. One that the kernel has scheduled there, because
    other cores were busy, would alternate with the caller instead of computing beside it, or even
    delay it by spinning: it moves away before it enters, or sleeps.
    """
    region = pool + 8 * REGION
    spin_ns = atomics.relaxed_load(pool + 8 * SPIN_NS)
    end_spinning_ns = system.monotonic_ns() + spin_ns
    has_moved = False
    while True:
        for _ in range(_NUM_POLLS):
            word = atomics.atomic_load(region)
            is_open = word & OPEN and word // EPOCH != last_epoch
            if is_open or word & STOP:
                break
            system.pause()
        if word & STOP:
            return word  # type: ignore[no-any-return]
        limit = atomics.relaxed_load(pool + 8 * LIMIT)
        if worker_idx > limit:
            system.sleep_while(pool + 8 * LIMIT, limit, _IDLE_TIMEOUT_US)
            end_spinning_ns = system.monotonic_ns() + spin_ns
            continue
        core = system.current_core()
        is_on_callers_core = core >= 0 and core == atomics.relaxed_load(pool + 8 * CORE)
        if is_open:
            if has_moved or not is_on_callers_core:
                return word  # type: ignore[no-any-return]
            if _may_move(pool):
                system.leave_core(core)
                atomics.atomic_store(pool + 8 * MOVING, 0)
            has_moved = True
        elif (
            is_on_callers_core
            or word // EPOCH == atomics.relaxed_load(pool + 8 * IDLE) // EPOCH
            or system.monotonic_ns() >= end_spinning_ns
        ):
            atomics.atomic_store(pool + 8 * SLEEPY, 1)
            system.sleep_while(region, word, _IDLE_TIMEOUT_US)
            has_moved = False
            if atomics.atomic_load(region) != word:  # too late for this region; spin for the next
                end_spinning_ns = system.monotonic_ns() + spin_ns


def _stop(pool: int) -> None:
    """End all workers, those in a region afterwards. Callers work alone from now on."""
    region = pool + 8 * REGION
    atomics.atomic_or(region, STOP)
    system.wake(region)
    _set_limit(pool, MAX_WORKERS)


def _limit(pool: int, num_rows: int) -> None:
    begin_pass(pool, num_rows)


@cache
def serve_kernel() -> Kernel:
    return compile_kernel(_serve, i64, i64, i64)


@cache
def stop_kernel() -> Kernel:
    return compile_kernel(_stop, i64)


@cache
def limit_kernel() -> Kernel:
    """`begin_pass`, for Python: (pool, num_rows)."""
    return compile_kernel(_limit, i64, i64)
