"""Compiles kernels before they are needed, in several child processes.

A first start then takes a fraction of the time, shows progress and can be interrupted, and LLVM's
memory is freed when the children exit. Failures are harmless: kernels missing on disk are compiled
on first use.
"""

from __future__ import annotations

import fcntl
import logging
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_protocol.settings import child_environment, package_roots
from dflash_runtime.compute.cores import usable_cores
from dflash_runtime.compute.cpu.compile.kernel_cache import kernel_folder
from dflash_runtime.compute.cpu.compile.tiers import current_tier

_LOG = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]
"""Called with the number of jobs done, and of all: after each job, and every second. An exception
from it stops the compiling."""

_CHILD = "dflash_runtime.compute.cpu.compile_ahead_child"
_PACKAGES = ("dflash_protocol", "dflash_adapters", "dflash_runtime")
_MOST_CHILDREN = 8
"""Each takes about 200 MB while it compiles."""
_JOB_TIMEOUT_S = 60.0
_POLL_S = 0.1
_REPORT_S = 1.0
_ANSWER_BYTES = 256


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
            for _ in range(min(len(jobs), len(usable_cores()), _MOST_CHILDREN)):
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


class _Child:
    """One compiling process, from construction until `end`. Raises: OSError if it cannot start."""

    def __init__(self, cache_dir: Path) -> None:
        self.job = ""
        arguments = current_tier().value, str(os.getpid()), str(cache_dir)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _CHILD, *arguments],
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
