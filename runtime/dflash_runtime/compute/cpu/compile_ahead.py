"""Which kernels a file needs, and compiling them before they are needed, in child processes.

A job compiles some kernels, or loads them if they are compiled already; it has a name that can be
passed to another process. With several processes a first start takes a fraction of the time, shows
progress and can be interrupted, and LLVM's memory is freed when the children exit. Failures are
harmless: kernels missing on disk are compiled on first use.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_adapters.quant import TensorType
from dflash_protocol.process.startup import end_with_parent
from dflash_protocol.settings import child_environment, package_roots
from dflash_runtime.compute.cores import default_counts
from dflash_runtime.compute.cpu.compile.kernel_cache import can_keep, keeping_in, kernel_folder
from dflash_runtime.compute.cpu.compile.tiers import choose_tier, current_tier
from dflash_runtime.compute.cpu.kernels import (
    asked_tasks,
    attention_tasks,
    batch_kernel,
    conv_tasks,
    copy_runs,
    delta_tasks,
    delta_tree,
    dense_tasks,
    device_tasks,
    experts_kernel,
    linear_kernel,
    mail_tasks,
    recurrent_tiles,
    route_tasks,
    step_tasks,
    words,
)
from dflash_runtime.compute.cpu.kernels.attention_elements import element_functions
from dflash_runtime.compute.cpu.threads import pages, parallel
from dflash_runtime.compute.cpu.weights.matrix import row_layout, step_fields
from dflash_runtime.compute.cpu.weights.repacked.quantising import quantise_function
from dflash_runtime.compute.cpu.weights.repacked.step_quantising import quantise_step_function
from dflash_runtime.compute.cpu.weights.rows import expand_function
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.memory import host_memory
from dflash_runtime.compute.topology import read_topology

# -- jobs -----------------------------------------------------------------------------------------

_TYPE_JOBS: dict[str, Callable[[TensorType], object]] = {
    "rows": lambda tensor_type: row_layout(tensor_type, tensor_type.layout.block_elements),
    "expand": expand_function,
    "step_rows": lambda tensor_type: step_fields(tensor_type, 1),
}
_CACHE_JOBS: dict[str, Callable[[KvType], object]] = {"elements": element_functions}

_EXPERT_JOBS: dict[str, Callable[[], object]] = {
    "experts": experts_kernel.expert_functions,
    "workers": lambda: [
        kernel() for kernel in (parallel.serve_kernel, parallel.stop_kernel, parallel.limit_kernel)
    ],
    "expert_batch": experts_kernel.run_batch,
    "quantise": quantise_function,
}
_DENSE_JOBS: dict[str, Callable[[], object]] = {
    "attend": attention_tasks.attend_task,
    "route": route_tasks.route_task,
    "attention": attention_tasks.run_attention,
    "store": attention_tasks.store_task,
    "touch": pages.touch_kernel,
    "norm": dense_tasks.norm_task,
    "rope": dense_tasks.rope_task,
    "gate": dense_tasks.gate_task,
    "linear_tasks": linear_kernel.linear_tasks,
    "linear": linear_kernel.run_linear,
    "embed": linear_kernel.embed_task,
    "step": step_tasks.compile_all,
    "routed": step_tasks.run_routed,
    "words": lambda: (words.run_task(), words.words_kernel(), words.calls_kernel()),
}
_ASKED_JOBS: dict[str, Callable[[], object]] = {"asked": asked_tasks.run_asked}
_DEVICE_JOBS: dict[str, Callable[[], object]] = {
    "graphs": device_tasks.compile_calls,
    "mailed": mail_tasks.compile_calls,
    "copies": copy_runs.compile_all,
}
_STEP_ORDER_JOBS: dict[str, Callable[[], object]] = {"quantise_step": quantise_step_function}
_DAEMON_JOBS: dict[str, Callable[[], object]] = {"batch": batch_kernel.compute_batch_function}
_RECURRENT_JOBS: dict[str, Callable[[], object]] = {
    "tree": delta_tree.tree_task,
    "delta": delta_tasks.delta_task,
    "conv": lambda: (conv_tasks.conv_task(), conv_tasks.keep_task()),
    "products": recurrent_tiles.products_function,
}


def jobs_for(
    tensor_types: Iterable[TensorType],
    kv_type: KvType | None,
    *,
    is_recurrent: bool = False,
    asks_daemons: bool = False,
    beside_device: bool = False,
) -> list[str]:
    """Jobs for experts of these types, with a `kv_type` for a whole model; see
    ComputeBackend.warm_up. The longest come first, so that several processes end at about the same
    time."""
    types = sorted(tensor_types)
    jobs = [*_EXPERT_JOBS]
    jobs += _DENSE_JOBS if kv_type is not None else _DAEMON_JOBS
    jobs += _DEVICE_JOBS if beside_device else ()
    jobs += _RECURRENT_JOBS if is_recurrent else ()
    jobs += _ASKED_JOBS if asks_daemons or beside_device else ()
    jobs += [f"rows.{each.name}" for each in types]
    if beside_device or kv_type is None:  # a daemon's parent may compute on a GPU
        jobs += [*_STEP_ORDER_JOBS, *(f"step_rows.{each.name}" for each in types)]
    if kv_type is not None:
        caches = sorted({kv_type.value, KvType.F32.value})
        jobs += [f"elements.{each}" for each in caches]
        jobs += [f"expand.{each.name}" for each in types]  # for the embedding table
    return jobs


def run_job(job: str) -> None:
    """Raises: KeyError for an unknown job."""
    kind, _, what = job.partition(".")
    if kind in _TYPE_JOBS:
        _TYPE_JOBS[kind](TensorType[what])
    elif kind in _CACHE_JOBS:
        _CACHE_JOBS[kind](KvType(what))
    else:
        parents = _DENSE_JOBS | _RECURRENT_JOBS | _ASKED_JOBS | _DEVICE_JOBS
        (parents | _DAEMON_JOBS | _STEP_ORDER_JOBS | _EXPERT_JOBS)[kind]()


# -- ahead of their use ---------------------------------------------------------------------------

_LOG = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]
"""Called with the number of jobs done, and of all: after each job, and every second. An exception
from it stops the compiling."""

_CHILD = f"from {__name__} import serve_jobs; serve_jobs()"
_PACKAGES = ("dflash_protocol", "dflash_adapters", "dflash_runtime")
_MOST_CHILDREN = 8
_CHILD_BYTES = 160 << 20
"""Most memory of one while it compiles, without pages of libraries."""
_JOB_TIMEOUT_S = 60.0
_POLL_S = 0.1
_REPORT_S = 1.0
_ANSWER_BYTES = 256
_GC_THRESHOLD = 100_000
"""With Python's default threshold garbage collection takes a tenth of a child's time."""


def compile_ahead(jobs: Sequence[str], on_progress: OnProgress) -> None:
    """Run these jobs in child processes, except those done before on this machine.

    Returns when all are done, or have failed. If another process is compiling, waits for it first.
    """
    folder = kernel_folder()
    if folder is None or not _missing(folder, jobs):
        return
    try:
        with _exclusively(folder, jobs, on_progress):
            missing = _missing(folder, jobs)
            num_before = len(jobs) - len(missing)
            _compile(folder, missing, lambda done: on_progress(num_before + done, len(jobs)))
    except OSError as error:
        # docs: each is compiled on its first use instead
        _LOG.info("kernels are not compiled ahead: %s", error)


def _missing(folder: Path, jobs: Sequence[str]) -> list[str]:
    return [job for job in jobs if not _mark(folder, job).exists()]


def _mark(folder: Path, job: str) -> Path:
    return folder / f"{job}.done"


@contextmanager
def _exclusively(folder: Path, jobs: Sequence[str], on_progress: OnProgress) -> Iterator[None]:
    """Hold the lock on compiling; wait for another process that has it while it makes progress.

    Raises: OSError; TimeoutError if it makes none for _JOB_TIMEOUT_S.
    """
    lock = os.open(folder / "ahead.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        num_missing, end_s = len(jobs) + 1, 0.0
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            now_missing = len(_missing(folder, jobs))
            on_progress(len(jobs) - now_missing, len(jobs))
            if now_missing < num_missing:
                num_missing, end_s = now_missing, time.monotonic() + _JOB_TIMEOUT_S
            elif time.monotonic() > end_s:
                raise TimeoutError("another process is compiling and makes no progress")
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(lock)


def _compile(folder: Path, jobs: list[str], on_done: Callable[[int], None]) -> None:
    waiting, num_done = jobs[::-1], 0
    children: list[_Child] = []
    try:
        with selectors.DefaultSelector() as selector:
            for _ in range(min(len(jobs), _num_children())):
                child = _Child(folder.parent)
                children.append(child)
                child.begin(waiting.pop())
                selector.register(child.output, selectors.EVENT_READ, child)
            on_done(num_done)
            end_s = time.monotonic() + _JOB_TIMEOUT_S
            while selector.get_map():
                events = selector.select(_REPORT_S)
                if events:
                    end_s = time.monotonic() + _JOB_TIMEOUT_S
                elif time.monotonic() > end_s:
                    raise TimeoutError(f"no kernel was compiled within {_JOB_TIMEOUT_S:.0f} s")
                else:
                    on_done(num_done)
                for key, _ in events:
                    child = key.data
                    if child.has_finished():
                        _mark(folder, child.job).touch(0o600)
                        num_done += 1
                        on_done(num_done)
                        if waiting and child.begin(waiting.pop()):
                            continue
                    selector.unregister(child.output)
    finally:
        for child in children:
            child.end()


def _num_children() -> int:
    """As many as there are threads, and there is memory."""
    most = min(default_counts(read_topology()).prompts, _MOST_CHILDREN)
    free_bytes = host_memory().free_bytes
    return min(most, max(1, free_bytes // _CHILD_BYTES)) if free_bytes else most


class _Child:
    """One compiling process, from construction until `end`. Raises: OSError if it cannot start."""

    def __init__(self, cache_dir: Path) -> None:
        self.job = ""
        arguments = current_tier().value, str(os.getpid()), str(cache_dir)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(package_roots(_PACKAGES)),
            process_group=0,  # Ctrl-C goes to this process only
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout

    def begin(self, job: str) -> bool:
        """Send a job; False if the process no longer reads."""
        self.job = job
        with suppress(OSError):
            self._input.write(f"{job}\n".encode())
            self._input.flush()
            return True
        return False

    def has_finished(self) -> bool:
        """Whether the process has answered that its job is done; call it when there is output."""
        return os.read(self.output.fileno(), _ANSWER_BYTES) == f"{self.job}\n".encode()

    def end(self) -> None:
        self._process.kill()
        with suppress(OSError):  # a buffered job that was never read
            self._input.close()
        self.output.close()
        self._process.wait()


def serve_jobs() -> None:
    """A child process: runs jobs from stdin, one a line, and echoes each when done.

    Arguments: the tier, the process id of its parent, with which it ends, and the cache folder.
    """
    # The parent may have ended before we asked; then another process has become our parent.
    if not end_with_parent(signal.SIGKILL) or os.getppid() != int(sys.argv[2]):
        return
    choose_tier(sys.argv[1], sys.argv[3])
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    with keeping_in(sys.argv[3]):
        for line in sys.stdin:
            run_job(line.strip())
            if not can_keep():
                return  # the kernel would not be found by other processes
            os.write(1, line.encode())  # unbuffered
