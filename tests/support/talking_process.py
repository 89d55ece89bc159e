"""Processes that begin on command and whose output tests wait for.

Such a process imports its module, waits for a line on stdin, then calls `main`, so that the slow
imports can be done before the process is needed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module

from support.processes import START_S, environment


class TalkingProcess:
    """Runs `python -m module arguments…` when it is told to begin.

    A thread reads its output all the time, so that it never blocks.
    Owns: the process and a thread.
    """

    def __init__(self, module: str, arguments: Sequence[str], **extra: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.talking_process", module, *arguments],
            env=environment(**extra),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def said(self) -> str:
        with self._changed:
            return "".join(self._lines)

    @property
    def num_lines(self) -> int:
        with self._changed:
            return len(self._lines)

    def begin(self) -> None:
        """Let it call `main`."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; waiting for its output will show why
            self.process.stdin.write("\n")
            self.process.stdin.close()

    def await_line(self, part: str, *, since: int = 0, within_s: float = START_S) -> str:
        """Wait for a line that contains `part`, after the first `since` lines."""
        end_s = time.monotonic() + within_s
        while True:
            with self._changed:
                for line in self._lines[since:]:
                    if part in line:
                        return line
                said = "".join(self._lines)
                self._changed.wait(0.1)
            assert self.process.poll() is None, f"ended before it said {part!r}:\n{said}"
            assert time.monotonic() < end_s, f"not said within {within_s:.0f} s: {part!r}:\n{said}"

    def await_end(self, within_s: float = START_S) -> int:
        """Wait for its end; returns the exit code. All output has been read then."""
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"runs for more than {within_s:.0f} s:\n{self.said}") from None
        self._reader.join(START_S)
        return code

    def close(self) -> None:
        """End it with SIGTERM if it still runs; fails the test if it does not end."""
        process = self.process
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        try:
            self.await_end()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(START_S)
            assert process.stderr is not None
            process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()


@contextmanager
def talking_process(
    module: str, arguments: Sequence[str], **extra: str
) -> Iterator[TalkingProcess]:
    """See TalkingProcess; ended by SIGTERM if the test has not ended it."""
    process = TalkingProcess(module, arguments, **extra)
    try:
        yield process
    finally:
        process.close()


def main() -> int:
    module = import_module(sys.argv[1])
    with suppress(ImportError):  # otherwise imported only when a device is opened
        import_module("cupy")
    if not sys.stdin.readline():
        return 1  # the test process has ended
    del sys.argv[0]
    code: int = module.main()
    return code


if __name__ == "__main__":
    sys.exit(main())
