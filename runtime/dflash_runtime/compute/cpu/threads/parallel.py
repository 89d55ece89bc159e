"""Work shared by threads without leaving compiled code: regions, and the workers that join them.

A caller opens a region; it and whichever workers are idle each call the region's task once, and
take items until none is left. A worker that comes late finds the region closed and is not waited
for. One that loses its core to another process while it holds an item is given the caller's.

Knows nothing of what tasks compute, nor of Python's threads. A task must not raise: nothing carries
exceptions out of it.

The pool is an array of int64; words that are written at different times have their own lines.

    LOCK     1 while somebody is in a region
    REGION   epoch, STOP (for ever), OPEN and, in the low bits, how many workers have entered
    TASK …   what the region is about; written by the caller while nobody can enter
    LEFT     how many workers have left the region
    AWAITED  the LEFT for which the caller sleeps, or 0
    SLEEPY   1 if a worker sleeps or is about to
    REST     the REGION after which workers need not look out for another, but may sleep at once
    MOVING   1 while somebody moves a thread to another core
    INSIDE … for each worker, its thread's id while it is in a region, else 0

Why this is right, also where memory is weakly ordered:

* TASK, ARGS and the counter are written before REGION is opened; a worker reads them after it has
  counted itself in, by replacing exactly the word it saw. Either that word was open and is now one
  larger, or it has changed and the worker has not entered. Epochs do not repeat.
* Closing and reading the number of those inside is one operation. The caller gives up LOCK, and
  with it TASK and LEFT, only when all of them have left: what they wrote comes before LEFT.
* A worker reads REGION, sets SLEEPY, and has the kernel compare REGION again before it sleeps. A
  caller clears SLEEPY, opens REGION, and wakes all if SLEEPY was set before or is set after that.
  In whichever order the two meet, either the caller sees SLEEPY or the kernel sees the new REGION.
  AWAITED and LEFT work in the same way. All sleep is bounded besides: the kernel compares but half
  the word, and with it the epoch's lowest 18 bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from dflash_protocol.ids import I64Array
from dflash_runtime.compute.cpu.compile.compiling import Kernel, compile_kernel, helper
from dflash_runtime.compute.cpu.simd import atomics
from dflash_runtime.compute.cpu.simd.types import I64, i64, primitive, void
from dflash_runtime.compute.cpu.simd.untyped import ir
from dflash_runtime.compute.cpu.threads import system

LINE = 16
"""Words between those that must not disturb each other: two cache lines, as CPUs fetch pairs."""

LOCK, REGION, TASK, LEFT, AWAITED, SLEEPY, REST = range(0, 7 * LINE, LINE)
ARGS, COUNTER, CORE, SPIN_NS, NUM_WORKERS = range(TASK + 1, TASK + 6)
MOVING = REST + 1
INSIDE, CPU_NS = REST + LINE, REST + LINE + 1

OPEN = 1 << 12
STOP = 2 * OPEN
EPOCH = 4 * OPEN

MAX_WORKERS = OPEN - 1

_NUM_LOOKS = 8
"""Looks at a word between two looks at the clock."""

_IDLE_TIMEOUT_US = 500_000
_LEAVE_TIMEOUT_US = 1_000

_LEAVE_SPIN_NS = 10_000
"""How long a caller waits for those inside between two looks after them."""


def line_of_words(num_words: int) -> I64Array:
    """Zeros that begin a line and share none with anything else."""
    num_words = -(-num_words // LINE) * LINE
    room = np.zeros(num_words + LINE, np.int64)
    first = -room.ctypes.data // room.itemsize % LINE
    return room[first : first + num_words]


def new_pool(num_workers: int, spin_ns: int) -> I64Array:
    """The state of a pool that `num_workers` threads are going to serve."""
    pool = line_of_words(INSIDE + LINE * num_workers)
    pool[NUM_WORKERS] = num_workers
    pool[REGION] = 0 if num_workers else STOP
    pool[SPIN_NS] = spin_ns
    pool[REST] = -1
    return pool


@primitive(void, i64, i64, i64, i64)
def _call_task(builder: Any, task: Any, args: Any, counter: Any, worker_idx: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
    builder.call(builder.inttoptr(task, kind.as_pointer()), [args, counter, worker_idx])


# -- for kernels ----------------------------------------------------------------------------------


@helper
def claim(counter: int) -> int:
    """The next item that nobody else has: 0, 1, 2 …"""
    return atomics.relaxed_add(counter, 1)  # type: ignore[no-any-return]


@helper
def run_alone(task: int, args: int, counter: int) -> None:
    """A region without workers, for work that is done before anybody would have come."""
    atomics.relaxed_store(counter, 0)
    _call_task(task, args, counter, 0)


@helper
def run_region(pool: int, task: int, args: int, counter: int) -> None:
    """Have ``task(args, counter, worker_idx)`` called once by each who takes part; then return.

    All are addresses: of a pool, of a function ``void(int64, int64, int64)``, of what that function
    expects, and of a word that `claim` counts in, best on a line of its own. `worker_idx` is 0 for
    the caller and each worker's own number: unique within a region but not among regions, since a
    caller who finds the pool taken, or calls from within a task, does its work alone, as 0.
    """
    atomics.relaxed_store(counter, 0)
    lock, region = pool + 8 * LOCK, pool + 8 * REGION
    is_ours = atomics.relaxed_load(region) & STOP == 0 and atomics.relaxed_load(lock) == 0
    if not is_ours or not atomics.atomic_replace(lock, 0, 1):
        _call_task(task, args, counter, 0)
        return
    sleepy, left = pool + 8 * SLEEPY, pool + 8 * LEFT
    atomics.relaxed_store(pool + 8 * TASK, task)
    atomics.relaxed_store(pool + 8 * ARGS, args)
    atomics.relaxed_store(pool + 8 * COUNTER, counter)
    atomics.relaxed_store(pool + 8 * CORE, system.current_core())
    atomics.relaxed_store(left, 0)
    somebody_sleeps = atomics.relaxed_load(sleepy) != 0
    if somebody_sleeps:
        atomics.relaxed_store(sleepy, 0)
    # Added, so that a STOP which comes at this moment stays.
    num_entered = atomics.relaxed_load(region) & (OPEN - 1)
    atomics.atomic_add(region, EPOCH + OPEN - num_entered)
    if somebody_sleeps or atomics.atomic_load(sleepy) != 0:
        system.wake(region)
    _call_task(task, args, counter, 0)
    num_entered = atomics.atomic_and(region, ~OPEN) & (OPEN - 1)
    if atomics.atomic_load(left) != num_entered:
        _await_leaving(pool, num_entered)
    atomics.atomic_store(lock, 0)


@helper
def run_on(pool: int, task: int, args: int, counter: int) -> None:
    """`run_region`, or `run_alone` if `pool` is 0: for work that is done before help would come."""
    if pool == 0:
        run_alone(task, args, counter)
    else:
        run_region(pool, task, args, counter)


@helper
def _await_leaving(pool: int, num_entered: int) -> None:
    """Spins while it is likely to end soon, then sleeps, so that somebody else can have the core.

    Somebody else is best a worker that is inside but does not run: the core it has lost may be
    taken for milliseconds.
    """
    left, awaited = pool + 8 * LEFT, pool + 8 * AWAITED
    looked_ns = system.monotonic_ns()
    end_spinning_ns = looked_ns + atomics.relaxed_load(pool + 8 * SPIN_NS)
    has_looked = False
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
            if _look_after_workers(pool, now_ns - looked_ns if has_looked else 0):
                end_spinning_ns = now_ns
            looked_ns, has_looked = now_ns, True
    atomics.relaxed_store(awaited, 0)


@helper
def _spin(left: int, num_entered: int) -> None:
    end_ns = system.monotonic_ns() + _LEAVE_SPIN_NS
    while system.monotonic_ns() < end_ns:
        for _ in range(_NUM_LOOKS):
            if atomics.atomic_load(left) == num_entered:
                return
            system.pause()


@helper
def _look_after_workers(pool: int, ns: int) -> bool:
    """Fetch a worker that has been running for less than half of the last `ns`, if there is one."""
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
    """Whether nobody else is moving a thread; if so, MOVING is to be cleared after it.

    A move narrows the cores that a thread may use, then widens them again to what they were: two
    moves at once could take what is narrow for what it was.
    """
    return atomics.atomic_replace(pool + 8 * MOVING, 0, 1)  # type: ignore[no-any-return]


# -- for workers ----------------------------------------------------------------------------------


def _serve(pool: int, worker_idx: int, thread_id: int) -> None:
    """A worker's life: to join one region after another until the pool stops."""
    region, left = pool + 8 * REGION, pool + 8 * LEFT
    inside = pool + 8 * (INSIDE + LINE * (worker_idx - 1))
    last_epoch = 0
    while True:
        word = _await_region(pool, last_epoch)
        if word & STOP:
            return
        if atomics.atomic_replace(region, word, word + 1):
            last_epoch = word // EPOCH
            task = atomics.relaxed_load(pool + 8 * TASK)
            args = atomics.relaxed_load(pool + 8 * ARGS)
            counter = atomics.relaxed_load(pool + 8 * COUNTER)
            atomics.atomic_store(inside, thread_id)
            _call_task(task, args, counter, worker_idx)
            atomics.atomic_store(inside, 0)
            num_left = atomics.atomic_add(left, 1) + 1
            if atomics.atomic_load(pool + 8 * AWAITED) == num_left:
                system.wake(left)


@helper
def _await_region(pool: int, last_epoch: int) -> int:
    """REGION as soon as it says stop, or is open and not the one that this worker was in.

    The caller's core is the caller's. Whom the kernel puts there, since the others are busy or have
    been, would take turns with the caller where it should compute beside it, or even have it wait
    for its own spinning: it goes elsewhere before it enters, or sleeps.
    """
    region = pool + 8 * REGION
    spin_ns = atomics.relaxed_load(pool + 8 * SPIN_NS)
    end_spinning_ns = system.monotonic_ns() + spin_ns
    has_moved = False
    while True:
        for _ in range(_NUM_LOOKS):
            word = atomics.atomic_load(region)
            is_open = word & OPEN and word // EPOCH != last_epoch
            if is_open or word & STOP:
                break
            system.pause()
        core = system.current_core()
        is_in_the_way = core >= 0 and core == atomics.relaxed_load(pool + 8 * CORE)
        if word & STOP:
            return word  # type: ignore[no-any-return]
        if is_open:
            if has_moved or not is_in_the_way:
                return word  # type: ignore[no-any-return]
            if _may_move(pool):
                system.leave_core(core)
                atomics.atomic_store(pool + 8 * MOVING, 0)
            has_moved = True
        elif (
            is_in_the_way
            or word == atomics.relaxed_load(pool + 8 * REST)
            or system.monotonic_ns() >= end_spinning_ns
        ):
            atomics.atomic_store(pool + 8 * SLEEPY, 1)
            system.sleep_while(region, word, _IDLE_TIMEOUT_US)
            has_moved = False
            if atomics.atomic_load(region) != word:  # too late for one region, in time for more
                end_spinning_ns = system.monotonic_ns() + spin_ns


def _stop(pool: int) -> None:
    """Have all workers end, those in a region after that. Callers work alone from now on."""
    region = pool + 8 * REGION
    atomics.atomic_or(region, STOP)
    system.wake(region)


@cache
def serve_kernel() -> Kernel:
    return compile_kernel(_serve, i64, i64, i64)


@cache
def stop_kernel() -> Kernel:
    return compile_kernel(_stop, i64)
