"""One process that renders chat templates, as its parent sees it.

The child is exec'd in a session of its own and inherits only the pipes of its standard streams; it
ends when its input does, and so with this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from dflash_adapters.text.chat_child import LATE_S, READY
from dflash_adapters.text.chat_messages import LENGTH
from dflash_protocol.errors import DeadlineExceeded, ProtocolError, RenderingUnavailable
from dflash_protocol.settings import bare_environment, package_roots

_START_S = 30.0
"""Usually 0.1 s, on a machine that is not busy."""
_PIPE_BYTES = 1 << 20
"""Capacity of a pipe, where the kernel allows it: fewer process switches for a long chat."""
_PACKAGES = ("dflash_protocol", "dflash_adapters", "jinja2", "markupsafe", "msgpack")
_RUN = (
    "import sys; sys.path += sys.argv[1:]; from dflash_adapters.text.chat_child import main; main()"
)
"""Run with -I and -S: environment, working directory and site hooks do not affect its imports."""


def rendering_command() -> list[str]:
    """The command that starts such a process."""
    roots = map(str, package_roots(_PACKAGES))
    return [sys.executable, "-I", "-S", "-W", "ignore", "-c", _RUN, *roots]


class RenderingEnded(Exception):
    """The process ended during a request; the message says how."""


class RenderingProcess:
    """A running child, used by one thread at a time.

    Owns: the process and our ends of its pipes, until `end`.
    Raises: RenderingUnavailable if it cannot be started.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._is_ready = False
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=bare_environment(),
                cwd="/",
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise RenderingUnavailable(
                # docs: too many processes or open files, or no memory; it is tried again with the
                # next chat
                f"no process for chat templates can be started: {error.strerror or error}"
            ) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        for pipe in (self._input, self._output):
            os.set_blocking(pipe.fileno(), False)
            with contextlib.suppress(OSError):  # above the account's limit
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def await_ready(self) -> None:
        """Wait until it accepts requests. Raises: RenderingUnavailable."""
        if self._is_ready:
            return
        try:
            is_ready = self._read(len(READY), time.monotonic() + _START_S) == READY
        except (RenderingEnded, DeadlineExceeded) as error:
            raise RenderingUnavailable(
                # docs: its interpreter lacks Jinja or msgpack, or memory is short; it is tried
                # again with the next chat
                f"the process for chat templates does not start: {error}"
            ) from error
        if not is_ready:
            raise RenderingUnavailable("the process for chat templates does not start")
        self._is_ready = True

    def ask(self, message: bytes, *, deadline_s: float, max_reply_bytes: int) -> bytearray:
        """Send a message and return the body of the reply, within `deadline_s` and `LATE_S`.

        After any exception the process has to be ended.
        Raises: RenderingEnded, DeadlineExceeded; ProtocolError if the answer is too long.
        """
        ends_at = time.monotonic() + deadline_s + LATE_S
        self._write(message, ends_at)
        (num_bytes,) = LENGTH.unpack(self._read(LENGTH.size, ends_at))
        if num_bytes > max_reply_bytes:
            raise ProtocolError("a reply of the rendering process is too long")
        return self._read(num_bytes, ends_at)

    def kill(self) -> None:
        """Kill the process; a pending `ask` raises RenderingEnded. Any thread may call it."""
        self._process.kill()

    def end(self) -> None:
        """Kill the process and release what is owned."""
        self._process.kill()
        self._process.wait()
        self._input.close()
        self._output.close()

    def _write(self, data: bytes, ends_at: float) -> None:
        rest = memoryview(data)
        while rest:
            self._wait(self._input.fileno(), select.POLLOUT, ends_at)
            try:
                rest = rest[os.write(self._input.fileno(), rest) :]
            except BlockingIOError:  # poll promises room for one page, and more is offered
                continue
            except BrokenPipeError:
                raise self._ended() from None

    def _read(self, num_bytes: int, ends_at: float) -> bytearray:
        data = bytearray()
        while len(data) < num_bytes:
            self._wait(self._output.fileno(), select.POLLIN, ends_at)
            part = os.read(self._output.fileno(), min(num_bytes - len(data), _PIPE_BYTES))
            if not part:
                raise self._ended()
            data += part
        return data

    def _wait(self, descriptor: int, events: int, ends_at: float) -> None:
        """Raises: DeadlineExceeded."""
        poller = select.poll()
        poller.register(descriptor, events)
        # Polled before the deadline counts: this process may have been stopped meanwhile.
        if not poller.poll(max(0.0, ends_at - time.monotonic()) * 1e3):
            raise DeadlineExceeded("it did not answer in time")

    def _ended(self) -> RenderingEnded:
        """How it ended. It has closed its output, and exits in a moment."""
        try:
            code = self._process.wait(LATE_S)
        except subprocess.TimeoutExpired:
            return RenderingEnded("it has closed its output")
        if code >= 0:
            return RenderingEnded(f"it ended with exit code {code}")
        if -code == signal.SIGXCPU:
            return RenderingEnded("it took too much of the processor's time")
        named = {number.value: number.name for number in signal.Signals}
        return RenderingEnded(f"it was ended by {named.get(-code, f'signal {-code}')}")
