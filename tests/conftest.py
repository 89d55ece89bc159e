"""Fixtures for the whole suite, first of all the one that fails it for whatever is left behind."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

# How fast an example is drawn says how busy the machine is, nothing of the test.
hypothesis.settings.register_profile(
    "busy-machine", suppress_health_check=[hypothesis.HealthCheck.too_slow], deadline=None
)
hypothesis.settings.load_profile("busy-machine")

_MARK = "DFLASHTEST_SESSION"
_RUN_DIR = "DFLASH_MOE_EXPERT_COMPUTE_IPC_WORK_DIR"
_PATIENCE_S = 5.0


@pytest.fixture(scope="session", autouse=True)
def run_dir() -> Iterator[Path]:
    """A run directory of this session's own, short enough for sockets; must end up empty.

    Every process of the session inherits a mark in its environment, by which orphans are found.
    """
    folder = Path(tempfile.mkdtemp(prefix="dflash-test-"))
    os.environ[_MARK] = folder.name
    os.environ[_RUN_DIR] = str(folder)
    os.environ["XDG_CONFIG_HOME"] = str(folder.with_name(f"{folder.name}-config"))  # no keys here
    # The machines that run this are slow and busy; tests of deadlines set their own.
    os.environ["DFLASH_MOE_EXPERT_COMPUTE_IPC_DEADLINE_MS"] = "20000"
    yield folder
    orphans = [
        process.info
        for process in psutil.process_iter(["pid", "cmdline"])
        if process.pid != os.getpid() and _is_marked(process, folder.name)
    ]
    shutil.rmtree(folder, ignore_errors=True)
    assert not orphans, f"processes left behind: {orphans}"


@pytest.fixture(autouse=True)
def nothing_left_behind(run_dir: Path) -> Iterator[None]:
    """Fails the test that leaves a child process, a socket file or a shared segment."""
    segments_before = _segments()
    children_before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    deadline_s = time.monotonic() + _PATIENCE_S
    while leftovers := _leftovers(run_dir, segments_before, children_before):
        if time.monotonic() > deadline_s:
            for child in psutil.Process().children(recursive=True):
                if child.pid not in children_before:
                    child.kill()
            shutil.rmtree(run_dir)
            run_dir.mkdir(mode=0o700)
            pytest.fail(f"left behind: {leftovers}")
        time.sleep(0.05)


def _leftovers(run_dir: Path, segments_before: set[str], children_before: set[int]) -> list[str]:
    children = psutil.Process().children(recursive=True)
    return [
        *(f"process {child.pid}" for child in children if child.pid not in children_before),
        *(str(path) for path in run_dir.rglob("*")),
        *sorted(_segments() - segments_before),
    ]


def _segments() -> set[str]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return set()
    return {path.name for path in folder.iterdir() if path.name.startswith(("dflash", "ring-"))}


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        environment = process.environ()
        # Daemons of another launcher are given our settings and nothing else.
        return mark in (environment.get(_MARK), Path(environment.get(_RUN_DIR, "")).name)
    except psutil.Error:
        return False
