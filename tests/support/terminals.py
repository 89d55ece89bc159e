"""A terminal of any size for a program: keys go in, and the screen is what a person would see."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pyte

from support.interrupts import restore_interrupts
from support.processes import START_S, environment, wait_until

CTRL_C, CTRL_D, ENTER, ALT_ENTER, UP = "\x03", "\x04", "\r", "\x1b\r", "\x1b[A"


class Terminal:
    """Runs a program in a pseudo-terminal; a thread draws what it writes.

    Owns: the process, the thread and the terminal.
    """

    def __init__(self, command: Sequence[str], *, columns: int, rows: int, **extra: str) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self._written = bytearray()
        self._fd, child_fd = pty.openpty()
        fcntl.ioctl(child_fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        restore_interrupts()
        own = {name: text for name, text in environment().items() if name not in _NOT_PASSED}
        self.process = subprocess.Popen(
            # The first terminal that the leader of a session opens controls it: keys send signals.
            ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(child_fd), *command],
            env={**own, "TERM": "xterm-256color", **extra},
            start_new_session=True,
        )
        self._child_fd = child_fd
        self._thread = threading.Thread(target=self._draw, daemon=True)
        self._thread.start()

    @property
    def written(self) -> bytes:
        """Every byte that the program wrote."""
        with self._lock:
            return bytes(self._written)

    @property
    def title(self) -> str:
        """The window's title."""
        with self._lock:
            return str(self._screen.title)

    def lines(self) -> list[str]:
        """The rows of the screen, without blanks at their ends, nor empty rows at the bottom."""
        with self._lock:
            rows = [row.rstrip() for row in self._screen.display]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def text(self) -> str:
        """The screen's rows, as one text."""
        return "\n".join(self.lines())

    def resize(self, *, columns: int, rows: int) -> None:
        """Change its size."""
        with self._lock:
            self._screen.resize(rows, columns)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Type keys."""
        os.write(self._fd, keys.encode())

    def send(self, text: str) -> None:
        """Type a message and send it."""
        self.press(text + ENTER)

    def wait_for(self, is_there: str | Callable[[str], bool], within_s: float = START_S) -> str:
        """Wait until the screen has a text, or a condition holds of it; returns the screen."""

        end_s = time.monotonic() + within_s
        while True:  # what is drawn anew may be gone a moment later
            shown = self.text()
            if is_there in shown if isinstance(is_there, str) else is_there(shown):
                return shown
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"not seen: {is_there!r}\n{shown}\n{self.written[-2000:]!r}"
            time.sleep(0.01)

    def wait_for_end(self, within_s: float = START_S) -> int:
        """Wait for the program's end; returns its exit code."""
        code = self.process.wait(within_s)
        wait_until(lambda: not select.select([self._fd], [], [], 0)[0], "its last output")
        time.sleep(_DRAWN_S)
        return code

    @property
    def is_as_before(self) -> bool:
        """Whether it echoes what is typed, line by line, as before the program."""
        flags = termios.tcgetattr(self._child_fd)[3]
        return bool(flags & termios.ECHO) and bool(flags & termios.ICANON)

    def close(self) -> None:
        """Kill what still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(START_S)
        os.close(self._child_fd)
        self._thread.join(START_S)
        os.close(self._fd)

    def _draw(self) -> None:
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:  # the program has ended
                return
            if not data:
                return
            with self._lock:
                self._written += data
                self._stream.feed(data)


_DRAWN_S = 0.1
"""For what was read to be drawn."""
_NOT_PASSED = frozenset({"NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "LINES", "TERM"})


@contextlib.contextmanager
def terminal(
    command: Sequence[str], *, columns: int = 80, rows: int = 40, **extra: str
) -> Iterator[Terminal]:
    """See Terminal."""
    opened = Terminal(command, columns=columns, rows=rows, **extra)
    try:
        yield opened
    finally:
        opened.close()
