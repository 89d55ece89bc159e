"""Regions: every item is done once, no needless waiting, and code for other machines."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest

from dflash_runtime.compute.cpu.compile.compiling import (
    Kernel,
    RowFunction,
    compile_kernel,
)
from dflash_runtime.compute.cpu.simd import atomics
from dflash_runtime.compute.cpu.simd.types import i64
from dflash_runtime.compute.cpu.simd.untyped import ir, llvm
from dflash_runtime.compute.cpu.threads import parallel, system
from dflash_runtime.compute.cpu.threads.parallel import (
    new_pool,
    run_region,
    serve_kernel,
    stop_kernel,
)
from dflash_runtime.compute.cpu.threads.workers import Workers
from support.cpu_regions import Region, cpu_threads


@contextmanager
def open_workers(num_threads: int, *, spin_us: int = 50) -> Iterator[Workers]:
    workers = Workers(num_threads, spin_us=spin_us)
    try:
        yield workers
    finally:
        workers.close()


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("num_items", [0, 1, 2, 100])
def test_every_item_is_done_once(num_threads: int, num_items: int) -> None:
    region = Region(num_items)
    with open_workers(num_threads) as workers:
        region.run(workers.address, times=500)
    assert region.calls[0] == 500
    assert (region.calls[1:num_threads] <= 500).all()
    assert not region.calls[num_threads:].any()


@pytest.mark.parametrize("spin_us", [0, 50])
def test_very_many_regions(spin_us: int) -> None:
    region = Region(20)
    with open_workers(2, spin_us=spin_us) as workers:
        for _ in range(10):
            region.run(workers.address, times=5000)


@pytest.mark.parametrize("num_threads", [2, 3, 8])
def test_all_workers_take_part_if_there_is_time(num_threads: int) -> None:
    region = Region(5, awaited_workers=num_threads - 1)
    with open_workers(num_threads) as workers:
        for _ in range(20):
            region.run(workers.address)
            assert (region.calls[:num_threads] == 1).all()


def test_a_worker_that_comes_late_is_not_waited_for() -> None:
    pool = new_pool(1, 50_000)
    address = pool.ctypes.data
    before, after = Region(10), Region(10, awaited_workers=1)
    before.run(address, times=3)
    late = threading.Thread(target=lambda: serve_kernel()(address, 1, threading.get_native_id()))
    late.start()
    after.run(address)
    stop_kernel()(address)
    late.join()
    assert not before.calls[1]
    assert after.calls[1] == 1


@pytest.mark.parametrize("spin_us", [0, 50])
def test_passes_over_few_rows_leave_some_workers_asleep(spin_us: int) -> None:
    def run(num_rows: int, num_threads: int) -> None:
        region = Region(5, awaited_workers=num_threads - 1)
        workers.begin(num_rows)
        region.run(workers.address, times=20)
        # One that was about to join when the limit was lowered may do so once.
        assert (region.calls[:num_threads] > 0).all()
        assert (region.calls[num_threads:] <= 1).all()

    with open_workers(4, spin_us=spin_us) as workers:
        assert workers.decode_threads == 4
        workers.use_for_decode(2)
        for _ in range(10):
            run(1, 2)
            run(8, 2)
            run(9, 4)
        workers.use_for_decode(1)
        run(1, 1)
        workers.use_for_decode(4)
        run(1, 4)
        for wrong in (0, 5, -1):
            with pytest.raises(ValueError, match="threads"):
                workers.use_for_decode(wrong)
        assert workers.decode_threads == 4
        workers.use_for_decode(1)
        time.sleep(0.05)
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 0.4  # workers asleep beyond the limit are woken


@pytest.mark.parametrize("spin_us", [0, 50, 20_000])
def test_workers_that_stop_for_a_while_are_waited_for(spin_us: int) -> None:
    """The caller spins, checks for preempted workers, and sleeps."""
    cores = os.sched_getaffinity(0)
    region = Region(2, nap_us=5_000, awaited_workers=1)
    before = cpu_threads()
    with open_workers(2, spin_us=spin_us) as workers:
        for _ in range(10):
            region.run(workers.address)
        (worker,) = cpu_threads() - before
        assert os.sched_getaffinity(worker.native_id or 0) == cores


def test_limits_that_change_within_regions_lose_no_item() -> None:
    region, is_over = Region(12), threading.Event()

    def change(workers: Workers) -> None:
        while not is_over.is_set():
            for num_rows in (1, 100):
                workers.begin(num_rows)

    with open_workers(4) as workers:
        workers.use_for_decode(2)
        other = threading.Thread(target=change, args=(workers,))
        other.start()
        region.run(workers.address, times=3000)
        is_over.set()
        other.join()
    assert (region.items == sum(range(3000))).all()


# -- one pool, several callers --------------------------------------------------------------------


def test_two_callers_at_once_do_not_mix() -> None:
    regions = [Region(10 + caller) for caller in range(3)]
    with open_workers(3) as workers:
        threads = [
            threading.Thread(target=region.run, args=(workers.address, 3000)) for region in regions
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for region in regions:
        assert region.calls[0] == 3000
        assert (region.items == sum(range(3000))).all()


def _nest(args: int, counter: int, worker_idx: int) -> None:
    """A region of its own for each participant: pool, task, and (args, counter) of each."""
    own = args + 16 + 16 * worker_idx
    pool, task = atomics.relaxed_load(args), atomics.relaxed_load(args + 8)
    run_region(pool, task, atomics.relaxed_load(own), atomics.relaxed_load(own + 8))


def _run(pool: int, task: int, args: int, counter: int) -> None:
    run_region(pool, task, args, counter)


def test_a_region_within_a_task_is_its_callers_alone() -> None:
    nest = RowFunction(_nest, i64, i64, i64)
    inner = [Region(7) for _ in range(3)]
    counter = parallel.line_of_words(1)
    with open_workers(3) as workers:
        addresses = [(region.args_address, region.counter_address) for region in inner]
        args = np.array([workers.address, inner[0].task_address, *sum(addresses, ())], np.int64)
        run = compile_kernel(_run, *[i64] * 4)
        for _ in range(100):
            run(workers.address, nest.address, args.ctypes.data, counter.ctypes.data)
    assert inner[0].calls[0] == 100
    for region in inner:
        assert not region.calls[1:].any()


# -- cores ----------------------------------------------------------------------------------------


def _leave_core(stop: int) -> int:
    """The core that was left, or -1 if this thread is still on it."""
    core = system.current_core()
    system.leave_core(core)
    return -1 if system.current_core() == core else core


def _run_until(stop: int) -> int:
    """The core of this thread when the word was no longer 0."""
    while atomics.atomic_load(stop) == 0:
        system.pause()
    return system.current_core()  # type: ignore[no-any-return]


def _fetch(thread_id: int, core: int) -> int:
    system.fetch_thread(thread_id, core)
    return system.cpu_ns(thread_id)  # type: ignore[no-any-return]


@cache
def kernel(function: Callable[..., int]) -> Kernel:
    return compile_kernel(function, *[i64] * function.__code__.co_argcount)


class Runner:
    """A thread that runs a function of one word; it may be bound to some cores."""

    def __init__(self, function: Callable[[int], int], cores: set[int]) -> None:
        self.stop = parallel.line_of_words(1)
        self.result = -1
        self._is_bound = threading.Event()
        kernel(function)
        self.thread = threading.Thread(target=self._run, args=(function, cores))
        self.thread.start()
        self._is_bound.wait()

    def _run(self, function: Callable[[int], int], cores: set[int]) -> None:
        os.sched_setaffinity(0, cores)
        self._is_bound.set()
        self.result = kernel(function)(self.stop.ctypes.data)
        self.cores_afterwards = os.sched_getaffinity(0)

    def join(self) -> int:
        self.stop[0] = 1
        self.thread.join()
        return self.result


CORES = os.sched_getaffinity(0)
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@needs_two_cores
@pytest.mark.parametrize("is_bound", [False, True])
def test_a_thread_leaves_a_core_unless_it_is_bound(is_bound: bool) -> None:
    cores = {min(CORES)} if is_bound else CORES
    runner = Runner(_leave_core, cores)
    assert (runner.join() in cores) is not is_bound
    assert runner.cores_afterwards == cores


@needs_two_cores
@pytest.mark.parametrize("is_bound", [False, True])
def test_a_thread_is_fetched_unless_it_is_bound(is_bound: bool) -> None:
    here, remote = sorted(CORES)[:2]
    cores = {remote} if is_bound else CORES
    deadline = time.monotonic() + 20  # a busy machine's kernel may move it on at once
    while True:
        runner = Runner(_run_until, cores)
        assert runner.thread.native_id is not None
        cpu_ns = kernel(_fetch)(runner.thread.native_id, here)
        result = runner.join()
        assert runner.cores_afterwards == cores
        assert 0 < cpu_ns < 10**10
        if result == (remote if is_bound else here):
            return
        assert not is_bound
        assert time.monotonic() < deadline


# -- other machines -------------------------------------------------------------------------------


def assembly_of(triple: str) -> str:
    """All that depends on the machine, in one function."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        machine = llvm.Target.from_triple(triple).create_target_machine()
    except RuntimeError:
        pytest.skip(f"this LLVM does not know {triple}")
    module = ir.Module()
    module.triple = triple
    word = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(word, [word, word]), "function")
    builder = ir.IRBuilder(function.append_basic_block())
    address, value = function.args
    system.emit_pause(builder)
    core = system.emit_current_core(builder)
    system.emit_leave_core(builder, core)
    system.emit_fetch_thread(builder, value, core)
    system.emit_sleep_while(builder, address, value, word(1000))
    system.emit_wake(builder, address)
    system.emit_cpu_ns(builder, value)
    builder.ret(system.emit_monotonic_ns(builder))
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    return str(machine.emit_assembly(parsed))


@pytest.mark.parametrize(
    ("triple", "pause", "futex"),
    [("x86_64-unknown-linux-gnu", "pause", "$202"), ("aarch64-unknown-linux-gnu", "isb", "#98")],
)
def test_linux_machines_pause_and_sleep(triple: str, pause: str, futex: str) -> None:
    assembly = assembly_of(triple)
    for expected in (pause, futex, "syscall", "sched_getcpu", "sched_setaffinity"):
        assert expected in assembly
    assert "usleep" not in assembly


@pytest.mark.parametrize("triple", ["arm64-apple-darwin", "x86_64-unknown-freebsd"])
def test_other_systems_take_naps(triple: str) -> None:
    assembly = assembly_of(triple)
    assert "usleep" in assembly
    assert "syscall" not in assembly
    assert "affinity" not in assembly
