"""Fixtures of the whole suite, mainly the one that fails a test which leaves something behind."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import psutil
import pytest

from support import fork_server
from support.examples import SHARE
from support.interrupts import restore_interrupts
from support.wide import mark_the_rest

# Slow generation of examples only shows that the machine is busy.
for _profile, _most in (("all", 100), (SHARE, 34)):
    hypothesis.settings.register_profile(
        _profile,
        max_examples=_most,  # of tests that do not say how many: see `support.examples`
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        deadline=None,
    )
hypothesis.settings.load_profile("all")

# Without bytecode files each of some hundred processes would compile our sources again, a fifth of
# its start-up time. Set before the first test file is imported.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# OpenBLAS's threads spin for each other, on cores that several test processes share. Read when
# numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

restore_interrupts()

_MARK = "DFLASHTEST_SESSION"
_RUN_DIR = "DFLASH_MOE_EXPERT_COMPUTE_IPC_WORK_DIR"
_HEAT = "DFLASH_MOE_EXPERT_COMPUTE_HEAT"
_TIMEOUT_S = 5.0
_TELLS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()
"""Linux may be built without this file."""


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" in config.option.markexpr:
        hypothesis.settings.load_profile(SHARE)
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # by the number of tests, the longest come last


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze the objects that exist after collection: they live until the end, and the garbage
    collector would traverse them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Mark what is slow before it is left out. Run files that start processes first: some are very
    long, and a long last file would keep one worker idle."""
    mark_the_rest(items)
    yield
    items.sort(key=lambda item: item.path.parent.name not in ("e2e", "deploy"))


@pytest.fixture(scope="session", autouse=True)
def run_dir() -> Iterator[Path]:
    """A run directory for this session, short enough for socket paths; must be empty at the end.

    Every process of the session inherits a mark in its environment, by which orphans are found.
    """
    folder = Path(tempfile.mkdtemp(prefix="dflash-test-"))
    os.environ[_MARK] = folder.name
    os.environ[_RUN_DIR] = str(folder)
    os.environ[_HEAT] = "off"  # no files beside the demo model
    os.environ["XDG_CONFIG_HOME"] = str(folder.with_name(f"{folder.name}-config"))  # no keys here
    # The machines that run this are slow and busy; tests of deadlines set their own.
    os.environ["DFLASH_MOE_EXPERT_COMPUTE_IPC_DEADLINE_MS"] = "20000"
    yield folder
    orphans = [
        process.info
        for process in psutil.process_iter(["pid", "cmdline"])
        if process.pid != os.getpid()
        and _is_marked(process, folder.name)
        and not _is_resource_tracker(process.pid)
    ]
    shutil.rmtree(folder, ignore_errors=True)
    assert not orphans, f"processes left behind: {orphans}"


@pytest.fixture(scope="session", autouse=True)
def fast_starts(run_dir: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Where slow tests are left out, our programs start as copies: see `support.fork_server`."""
    if "not slow" not in request.config.option.markexpr or not fork_server.is_possible():
        yield
        return
    with fork_server.installed():
        yield


@pytest.fixture(autouse=True)
def nothing_left_behind(run_dir: Path, fast_starts: None) -> Iterator[None]:
    """Fail a test that leaves a child process, a socket file or a shared segment."""
    segments_before = _segments()
    children_before = _descendants()
    yield
    deadline_s = time.monotonic() + _TIMEOUT_S
    while leftovers := _leftovers(run_dir, segments_before, children_before):
        if time.monotonic() > deadline_s:
            for pid in _descendants() - children_before:
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
            shutil.rmtree(run_dir)
            run_dir.mkdir(mode=0o700)
            pytest.fail(f"left behind: {leftovers}")
        time.sleep(0.05)


def _leftovers(run_dir: Path, segments_before: set[str], children_before: set[int]) -> list[str]:
    return [
        *(
            f"process {pid}"
            for pid in sorted(_descendants() - children_before)
            if not _is_resource_tracker(pid)
        ),
        *(
            os.path.join(folder, name)
            for folder, folders, files in os.walk(run_dir)
            for name in (*folders, *files)
        ),
        *sorted(_segments() - segments_before),
    ]


def _is_resource_tracker(pid: int) -> bool:
    """Python's own helper of processes that `multiprocessing` spawns: it ends with its parent."""
    with suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _descendants() -> set[int]:
    """Process ids of our descendants.

    Called twice per test, so without paths as objects; psutil would look at every process of the
    machine.
    """
    if not _TELLS_CHILDREN:
        return {child.pid for child in psutil.Process().children(recursive=True)}
    found: set[int] = set()
    unseen = [os.getpid()]
    while unseen:
        folder = f"/proc/{unseen.pop()}/task"
        with suppress(OSError):  # it has ended meanwhile
            for task in os.listdir(folder):
                with open(f"{folder}/{task}/children", "rb", buffering=0) as file:
                    pids = [int(pid) for pid in file.readall().split()]
                unseen += pids
                found |= set(pids)
    return found


def _segments() -> set[str]:
    try:
        return {name for name in os.listdir("/dev/shm") if name.startswith(("dflash", "ring-"))}
    except FileNotFoundError:
        return set()


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        environment = process.environ()
        # Daemons of another launcher get our settings and nothing else.
        return mark in (environment.get(_MARK), Path(environment.get(_RUN_DIR, "")).name)
    except psutil.Error:
        return False
