"""Kernels compiled by other processes: each of them once; failures and delays are harmless."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.cores import ThreadCounts
from dflash_runtime.compute.cpu import backend as backend_module
from dflash_runtime.compute.cpu import compile_ahead as ahead
from dflash_runtime.compute.cpu.backend import CpuBackend
from dflash_runtime.compute.cpu.compile.compiling import RowFunction
from dflash_runtime.compute.cpu.compile.kernel_cache import keeping_in, kernel_folder
from dflash_runtime.compute.cpu.compile_ahead import jobs_for, run_job
from dflash_runtime.compute.cpu.simd.types import i64
from dflash_runtime.compute.cpu.weights import float_tile
from dflash_runtime.compute.cpu.weights.rows import expand_f16, expand_f32
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.memory import HostMemory
from support.processes import START_S, environment, own_children, wait_for_ends

JOBS = ["expand.F32", "expand.F16", "expand.BF16"]

PARENT = """
from dflash_runtime.compute.cpu.compile_ahead import compile_ahead
compile_ahead(["attend", "expert_tasks"], lambda num_done, num_total: print(num_done, flush=True))
"""


def came_from_cache(function: Callable[..., None]) -> bool:
    return RowFunction(function, i64, i64, i64).came_from_cache


def the_folder() -> Path:
    folder = kernel_folder()
    assert folder is not None
    return folder


def marks() -> set[str]:
    return {path.stem for path in the_folder().glob("*.done")}


def no_progress(num_done: int, num_total: int) -> None:
    pass


@pytest.fixture
def one_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a second to start."""
    monkeypatch.setattr(ahead, "_MOST_CHILDREN", 1)


@pytest.mark.usefixtures("cache_dir")
def test_what_is_compiled_ahead_is_loaded_later() -> None:
    seen: list[tuple[int, int]] = []
    ahead.compile_ahead(JOBS, lambda *progress: seen.append(progress))
    assert list(dict.fromkeys(seen)) == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert marks() == set(JOBS)
    assert came_from_cache(expand_f32)
    assert came_from_cache(expand_f16)
    assert not own_children()


def test_a_folder_that_is_given_holds_for_compiling_processes_too(
    cache_dir: Path, tmp_path: Path
) -> None:
    with keeping_in(str(tmp_path / "given")):
        ahead.compile_ahead(JOBS[:1], no_progress)
        assert marks() == set(JOBS[:1])
        assert came_from_cache(expand_f32)
    assert not cache_dir.exists()


def test_what_was_done_before_is_not_done_again(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead.compile_ahead(JOBS[:1], no_progress)
    seen: list[tuple[int, int]] = []
    ahead.compile_ahead(JOBS[:2], lambda *progress: seen.append(progress))
    assert list(dict.fromkeys(seen)) == [(1, 2), (2, 2)]
    monkeypatch.setattr(subprocess, "Popen", None)
    ahead.compile_ahead(JOBS[:2], no_progress)


def test_every_job_of_a_model_can_be_run() -> None:
    types = [TensorType.F32, TensorType.Q8_0]
    jobs = jobs_for(types, KvType.F16, is_recurrent=True, asks_daemons=True)
    assert len(set(jobs)) == len(jobs)
    for job in {*jobs, *jobs_for(types, None, beside_device=True)}:
        run_job(job)


def test_a_model_needs_what_it_has() -> None:
    """Compiling is most of a first start: nothing for types and layers that are not in the file."""
    types = [TensorType.F32, TensorType.Q8_0]
    experts = set(jobs_for(types, None))
    whole = set(jobs_for(types, KvType.F16))
    recurrent = set(jobs_for(types, KvType.F16, is_recurrent=True))
    asking = set(jobs_for(types, KvType.F16, asks_daemons=True))
    in_step_order = {"quantise_step", "step_rows.F32", "step_rows.Q8_0"}
    assert experts - whole == {"batch"} | in_step_order
    assert whole < recurrent
    assert asking - whole == {"asked"}
    beside = {"asked", "graphs", "mailed", "copies"}
    assert set(jobs_for(types, None, beside_device=True)) - experts == beside
    assert set(jobs_for(types, KvType.F16, beside_device=True)) - whole == beside | in_step_order
    rows = {"rows.F32", "rows.Q8_0"}
    assert {job for job in experts if "." in job} - in_step_order == rows
    assert not {"attend", "attention", "delta", "conv"} & experts
    assert recurrent - whole == {"delta", "conv", "products", "tree"}
    assert {job for job in whole if job.startswith("elements.")} == {"elements.f16", "elements.f32"}


@pytest.mark.usefixtures("cache_dir")
def test_float_rows_are_compiled_for_the_kinds_they_have() -> None:
    float_tile.float_rows.cache_clear()
    sizes = {kind: len(kept_code(kind)) for kind in (float_tile.F32, float_tile.F16)}
    float_tile.float_rows.cache_clear()
    # Below 0.8 with AVX512, 0.855 with AVX2; if all kinds were compiled it would be 1.
    assert sizes[float_tile.F32] < 0.9 * sizes[float_tile.F16]


def kept_code(kind: int) -> bytes:
    """What compiling rows of a kind has added to the cache on disk."""
    before = {*the_folder().glob("*.nbc")}
    float_tile.float_rows(kind)
    (path,) = {*the_folder().glob("*.nbc")} - before
    return path.read_bytes()


@pytest.mark.parametrize("job", ["", "nonsense", "rows.Q9_K", "elements.f8"])
def test_a_job_that_does_not_exist_is_an_error(job: str) -> None:
    with pytest.raises((KeyError, ValueError)):
        run_job(job)


@pytest.mark.usefixtures("one_child")
@pytest.mark.parametrize("trouble", ["no interpreter", "no module", "fails at a job"])
def test_trouble_costs_nothing_but_time(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    jobs = JOBS
    if trouble == "no interpreter":
        monkeypatch.setattr(sys, "executable", str(cache_dir / "nothing"))
    elif trouble == "no module":
        monkeypatch.setattr(ahead, "_CHILD", "import dflash_runtime.no_such_module")
    else:
        jobs = ["nonsense", "more nonsense", *JOBS]
    ahead.compile_ahead(jobs, no_progress)
    assert not own_children()
    assert marks() <= set(JOBS)
    assert [came_from_cache(expand_f32) for _ in range(2)] == [False, True]


def test_a_child_that_does_not_answer_is_not_waited_for(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ahead, "_CHILD", "import sys; sys.stdin.read()"
    )  # reads its input and does not answer
    monkeypatch.setattr(ahead, "_JOB_TIMEOUT_S", 0.5)
    begin_s = time.monotonic()
    ahead.compile_ahead(JOBS, no_progress)
    assert time.monotonic() - begin_s < START_S
    assert not own_children()


def test_without_a_cache_nothing_is_compiled_ahead(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir.touch()
    monkeypatch.setattr(subprocess, "Popen", None)
    ahead.compile_ahead(JOBS, no_progress)


@pytest.mark.usefixtures("one_child", "cache_dir")
def test_an_interruption_leaves_no_process_behind() -> None:
    def interrupt(num_done: int, num_total: int) -> None:
        assert own_children()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ahead.compile_ahead(JOBS, interrupt)
    assert not own_children()
    ahead.compile_ahead(JOBS[:1], no_progress)
    assert marks() >= set(JOBS[:1])


def test_a_killed_process_takes_its_children_along(cache_dir: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], env=environment(), stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "0\n"
        theirs = psutil.Process(parent.pid).children()
        assert theirs
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(timeout=START_S)
        wait_for_ends(theirs)


def test_the_work_of_another_process_is_waited_for(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = the_folder()
    seen: list[int] = []
    with (folder / "ahead.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def work() -> None:
            for job in JOBS:
                time.sleep(0.3)
                (folder / f"{job}.done").touch()
            fcntl.flock(lock, fcntl.LOCK_UN)

        worker = threading.Thread(target=work)
        worker.start()
        monkeypatch.setattr(subprocess, "Popen", None)
        ahead.compile_ahead(JOBS, lambda num_done, num_total: seen.append(num_done))
        worker.join()
    assert seen == sorted(seen)
    assert {0, 1, 2} <= set(seen)


def test_another_process_that_does_not_get_on_is_given_up(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_JOB_TIMEOUT_S", 0.3)
    monkeypatch.setattr(subprocess, "Popen", None)
    with (the_folder() / "ahead.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ahead.compile_ahead(JOBS, no_progress)
    assert not marks()


@pytest.mark.usefixtures("one_child", "cache_dir")
def test_a_backend_reports_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "jobs_for", lambda *types, **facts: JOBS)
    seen: list[tuple[int, int]] = []
    backend = CpuBackend(num_threads=1)
    backend.warm_up([TensorType.F16], on_progress=lambda *progress: seen.append(progress))
    backend.close()
    assert list(dict.fromkeys(seen)) == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.usefixtures("one_child")
def test_each_backend_keeps_its_kernels_in_its_own_folder(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever was made last, and whichever thread compiles."""
    monkeypatch.setattr(backend_module, "jobs_for", lambda *types, **facts: JOBS[:1])
    folders = [tmp_path / "first", tmp_path / "second"]
    backends = [CpuBackend(num_threads=1, cache_dir=str(each)) for each in folders]
    for backend, folder in zip(backends, folders, strict=True):
        assert not folder.exists()
        backend.warm_up([TensorType.F32])
        [done] = folder.glob("kernels-*/*.done")
        assert done.stem == JOBS[0]
        backend.close()
    assert not cache_dir.exists()


@pytest.mark.parametrize(
    ("free_mib", "num_children"), [(0, 8), (60, 1), (330, 2), (100_000, 8)], ids=str
)
def test_children_are_as_many_as_memory_has_room_for(
    monkeypatch: pytest.MonkeyPatch, free_mib: int, num_children: int
) -> None:
    """In a small memory cgroup several were killed."""
    free = HostMemory(free_mib << 20, 1 << 40)
    monkeypatch.setattr(ahead, "host_memory", lambda: free)
    monkeypatch.setattr(ahead, "default_counts", lambda topology: ThreadCounts(16, 16))
    assert ahead._num_children() == num_children
