"""Workers: how the threads of a pool start, sleep and end, whichever way a process ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from dflash_runtime.compute.cpu.threads import parallel
from dflash_runtime.compute.cpu.threads.workers import Workers
from support.cpu_regions import Region, cpu_threads
from support.processes import ROOT, START_S, environment


def test_close_ends_the_threads_and_the_caller_works_alone() -> None:
    before = cpu_threads()
    workers = Workers(3)
    region = Region(10, awaited_workers=2)
    region.run(workers.address)
    assert len(cpu_threads() - before) == 2
    for _ in range(2):
        workers.close()
        assert cpu_threads() <= before
    alone = Region(10)
    alone.run(workers.address, times=10)
    assert not alone.calls[1:].any()


def test_threads_end_with_their_owner() -> None:
    before = cpu_threads()
    workers = Workers(2)
    Region(10).run(workers.address)
    del workers
    gc.collect()
    assert cpu_threads() <= before


@pytest.mark.parametrize("has_time", [True, False])
def test_close_waits_for_a_region_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, has_time: bool
) -> None:
    if not has_time:
        monkeypatch.setattr("dflash_runtime.compute.cpu.threads.workers._TIMEOUT_S", 0.05)
    before = cpu_threads()
    workers = Workers(2)
    region = Region(2, item_us=500_000, awaited_workers=1)
    caller = threading.Thread(target=region.run, args=(workers.address,))
    caller.start()
    while not region.calls[1]:
        time.sleep(0.001)
    workers.close()
    assert bool(cpu_threads() - before) is not has_time
    caller.join()
    for thread in cpu_threads() - before:
        thread.join()


def test_a_thread_that_cannot_be_started_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cpu_threads()
    start = threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if thread.name == "cpu-worker-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(RuntimeError, match="can't start"):
        Workers(4)
    assert cpu_threads() <= before


def test_idle_threads_use_no_core() -> None:
    workers = Workers(4)
    Region(10).run(workers.address)

    def cpu_s() -> float:
        begin_s = time.process_time()
        time.sleep(0.3)
        return time.process_time() - begin_s

    time.sleep(0.1)
    assert min(cpu_s() for _ in range(3)) < 0.03
    workers.close()


def test_threads_that_share_cores_do_not_spin_for_long() -> None:
    num_cores = len(os.sched_getaffinity(0))
    for num_threads, is_longer in ((num_cores, True), (num_cores + 1, False)):
        workers = Workers(num_threads)
        before_ns = workers._pool[parallel.SPIN_NS]
        workers.spin_for(1e-3)
        assert (workers._pool[parallel.SPIN_NS] == 1_000_000) == is_longer
        assert is_longer or workers._pool[parallel.SPIN_NS] == before_ns
        workers.close()


def test_spinning_threads_sleep_when_told_to_and_come_back() -> None:
    spin_s = 2.0  # long enough for a share of a busy machine's cores
    usable = os.sched_getaffinity(0)
    # A worker on the caller's core sleeps anyway: each has its own, if there are two.
    own, other = min(usable), max(usable)
    before = cpu_threads()
    workers = Workers(2, spin_us=int(1e6 * spin_s))
    for thread in cpu_threads() - before:
        assert thread.native_id is not None
        os.sched_setaffinity(thread.native_id, {other})
    os.sched_setaffinity(0, {own})
    region = Region(10, awaited_workers=1)

    def spins() -> bool:
        region.run(workers.address)
        begin_s, end_s = time.process_time(), time.monotonic() + spin_s
        while time.process_time() - begin_s < 0.1 and time.monotonic() < end_s:
            time.sleep(0.02)
        return time.process_time() - begin_s >= 0.1

    def cpu_s_of_a_pause() -> float:
        region.run(workers.address)
        begin_s = time.process_time()
        workers.idle()
        time.sleep(0.2)
        return time.process_time() - begin_s

    try:
        assert any(spins() for _ in range(5)), "it spins for work"
        assert min(cpu_s_of_a_pause() for _ in range(3)) < 0.03
    finally:
        workers.close()
        os.sched_setaffinity(0, usable)


def test_a_pass_sets_the_limit_whatever_another_thread_has_set() -> None:
    workers = Workers(3)
    try:
        workers.use_for_decode(1)
        workers.begin(parallel.FEW_ROWS + 1)
        parallel.limit_kernel()(workers.address, 1)  # a decode step that began at the same time
        workers.begin(parallel.FEW_ROWS + 1)
        assert workers._pool[parallel.LIMIT] == 2
    finally:
        workers.close()


def test_a_pool_has_at_least_one_thread() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Workers(0)


# -- ends of processes ----------------------------------------------------------------------------

_SETUP = f"""
import os, sys, time
sys.path.append({str(ROOT / "tests")!r})
from support.cpu_regions import Region, cpu_threads
from dflash_runtime.compute.cpu.threads.workers import Workers
workers = Workers(3)
region = Region(10, awaited_workers=2)
region.run(workers.address)
"""


def python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _SETUP + code],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_ends_without_close() -> None:
    with python("") as process:
        output, errors = process.communicate(timeout=START_S)
    assert (process.returncode, output, errors) == (0, "", "")


def test_ctrl_c_ends_a_process_that_computes() -> None:
    code = """
print("computing", flush=True)
while True:
    Region(100, item_us=10).run(workers.address)
"""
    with python(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "computing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=START_S)
    assert process.returncode == -signal.SIGINT
    assert errors.endswith("KeyboardInterrupt\n")


def test_a_child_of_fork_works_alone_and_its_parent_as_before() -> None:
    code = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
child = os.fork()
if not child:
    alone = Region(10)
    alone.run(workers.address, times=10)
    assert not alone.calls[1:].any()
    own = Workers(3)
    region.run(own.address)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
region.run(workers.address)
assert region.calls[2]
"""
    with python(code) as process:
        output, errors = process.communicate(timeout=START_S)
    assert (process.returncode, output, errors) == (0, "", "")


# -- neighbours -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_busy_neighbour_does_not_multiply_the_time() -> None:
    alone, shared = Workers(1), Workers(2)
    region = Region(30, item_us=10)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            time.sleep(0.2)
            ns = [[region.run(w.address, 50) for w in (alone, shared)] for _ in range(20)]
        finally:
            neighbour.kill()
    of_one, of_two = np.array(ns).mean(axis=(0, 2))
    shared.close()
    # Nor do two threads take longer than one while another process holds the other core.
    assert of_two < 1.5 * of_one
