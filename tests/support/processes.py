"""Starts our programs as separate processes, as a user would."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import psutil

ROOT = Path(__file__).resolve().parents[2]
_SOURCE_ROOTS = [
    str(ROOT / name) for name in ("protocol", "adapters", "daemon", "runtime", "tests")
]
START_S = 60.0
"""Longest a program may take to start on a busy machine with cold kernel caches."""
MOST_POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Of asyncio's pool, which starts them when several are needed at once."""


SESSION_HELPERS: set[int] = set()
"""Process ids of our children that end with the test session."""


def own_children() -> list[psutil.Process]:
    """Our child processes that a test has started."""
    children = psutil.Process().children()
    return [each for each in children if each.pid not in SESSION_HELPERS]


def environment(**extra: str) -> dict[str, str]:
    """This process's environment with our sources importable, before what already is."""
    paths = [*_SOURCE_ROOTS, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **extra}


def run_python(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with benches importable; its child processes end with it."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=8 * START_S,
        check=False,
    )


def run_cli(*arguments: str | Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run ``dflash-moe`` to its end."""
    return subprocess.run(
        [*cli_command(), *map(str, arguments)],
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=4 * START_S,
        check=False,
    )


def run_main(
    main: Callable[[list[str]], int | None], *arguments: str | Path, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a program's `main` to its end within this process, which saves a second of imports.

    For tests of output and exit code. The environment, logging, umask, CPU affinity and signal
    handlers are restored afterwards.
    """
    command = [*map(str, arguments)]
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        _process_state_kept(),
        mock.patch.dict(os.environ, extra),
        mock.patch.multiple(logging.root, handlers=[], level=logging.WARNING),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            code = main(command) or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(command, code, stdout.getvalue(), stderr.getvalue())


@contextlib.contextmanager
def _process_state_kept() -> Iterator[None]:
    """Restore the process-wide state that a program may change."""
    mask = os.umask(0o077)
    os.umask(mask)
    cores = os.sched_getaffinity(0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        os.umask(mask)
        os.sched_setaffinity(0, cores)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def cli_command() -> list[str]:
    """The command that the console script ``dflash-moe`` stands for."""
    return [sys.executable, "-c", "from dflash_runtime.cli import main; main()"]


@contextlib.contextmanager
def running_daemon(
    model: Path,
    listen: str,
    arguments: Sequence[str] = (),
    *,
    module: str = "dflash_daemon",
    **extra: str,
) -> Iterator[subprocess.Popen[str]]:
    """A daemon that is listening; ended with SIGTERM if the test has not ended it itself."""
    command = [sys.executable, "-m", module, str(model), "--listen", listen, *arguments]
    with subprocess.Popen(
        command, env=environment(**extra), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert "listening on" in line, line
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=START_S)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of an address that nothing listens on now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def wait_for_ends(processes: Sequence[psutil.Process], *, within_s: float = START_S) -> None:
    """Fails the test unless these processes, which need not be our children, end in time.

    A zombie counts as ended, as orphans may wait long for init to reap them.
    """

    def have_ended() -> bool:
        return not any(map(_runs, processes))

    wait_until(
        have_ended, f"processes {[each.pid for each in processes]} to end", within_s=within_s
    )


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(
    condition: object, what: str, *, within_s: float = START_S, pause_s: float = 0.01
) -> None:
    """Call `condition` until it is true. Fails the test, naming `what`, if it never is.

    `pause_s` is the time between calls; longer where calls take CPU time from what is awaited.
    """
    assert callable(condition)
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"waited {within_s:.0f} s for {what}"
        time.sleep(pause_s)


def stop(pid: int) -> None:
    """Send SIGSTOP, and return when all threads of the process have stopped.

    One of its threads must run for that. Where others take all cores, it writes on meanwhile.
    """
    os.kill(pid, signal.SIGSTOP)

    def has_stopped() -> bool:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    wait_until(has_stopped, f"process {pid} to stop", pause_s=0.001)
