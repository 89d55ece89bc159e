"""Renders conversations with chat templates, in a small pool of processes that can be killed.

A template is untrusted code, and no sandbox is known to hold: one that escapes its limits costs its
own request some seconds. One process is kept spare, so that the next request does not wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from dflash_adapters.text.chat_messages import (
    LATE_S,
    LENGTH,
    READY,
    ChatRequest,
    ReplyKind,
    decode_reply,
    encode_request,
    max_reply_bytes,
)
from dflash_protocol.errors import (
    DeadlineExceeded,
    ProtocolError,
    RenderingUnavailable,
    SettingsError,
    UnsupportedModel,
    one_line,
)
from dflash_protocol.settings import bare_environment, package_roots

MOST_AT_ONCE = 2
"""Conversations rendered at the same time while one process stays spare."""
_KEPT = 2
_MOST = MOST_AT_ONCE + 1
_TIMEOUT_S = 60.0
"""To wait for a free process; a rendering takes at most seconds."""
_CLOSING_S = 5.0
_LARGE_BYTES = 4 << 20
"""After a larger request a process is replaced, as it may keep the memory."""
_TRIES = 2
_CLOSED = "the engine is being closed"
_FIELD = "tokenizer.chat_template"
_START_S = 30.0
"""For a process to be ready. Usually 0.1 s, on a machine that is not busy."""
_PIPE_BYTES = 1 << 20
"""Capacity of a pipe, where the kernel allows it: fewer process switches for a long chat."""
_PACKAGES = ("dflash_protocol", "dflash_adapters", "jinja2", "markupsafe", "msgpack")


class ChatRenderer:
    """Processes for chat templates; the first starts with `prepare` or the first rendering.

    Owns: the processes, until `close`. Any thread may call any method.
    """

    def __init__(self, command: Sequence[str] | None = None) -> None:
        """`command` replaces that of `rendering_command`."""
        self._command = command
        self._state = threading.Condition()
        # First in, first out, so that the spare process has compiled the template too.
        self._idle: deque[RenderingProcess] = deque()
        self._busy: set[RenderingProcess] = set()
        self._is_closed = False

    def prepare(self) -> None:
        """Start the pool, so that the first conversation does not wait for it."""
        with self._state:
            self._fill()

    def render(self, request: ChatRequest, *, path: Path | str = "chat template") -> str:
        """The text of a conversation; `path` is the model file, for error messages.

        Raises: SettingsError if the template refuses the messages; UnsupportedModel if it is not
        a template, fails, or exceeds its limits; RenderingUnavailable.
        """
        message = encode_request(request)
        process = self._take()
        is_sound = False
        try:
            body = process.ask(
                message,
                deadline_s=request.deadline_s,
                max_reply_bytes=max_reply_bytes(len(message)),
            )
            kind, text = decode_reply(body)
            is_sound = len(message) <= _LARGE_BYTES
        except DeadlineExceeded:
            raise _unsupported("the template took too long", path) from None
        except RenderingEnded as error:
            if self._is_closed:
                raise RenderingUnavailable(_CLOSED) from None
            raise _unsupported(f"its rendering process ended: {error}", path) from None
        except ProtocolError as error:
            raise _unsupported(str(error), path) from None
        finally:
            self._give_back(process, is_sound=is_sound)
        if kind is ReplyKind.REFUSED:
            raise SettingsError(one_line(text))
        if kind is ReplyKind.FAILED:
            raise _unsupported(one_line(text), path)
        return text

    def close(self) -> None:
        """Kill all processes; pending renderings raise RenderingUnavailable. May be repeated."""
        with self._state:
            self._is_closed = True
            for process in self._busy:
                process.kill()
            while self._idle:
                self._idle.pop().end()
            self._state.notify_all()
            self._state.wait_for(lambda: not self._busy, _CLOSING_S)
            while self._busy:  # of a thread that Ctrl-C has ended, or that is stopped
                self._busy.pop().end()

    def _take(self) -> RenderingProcess:
        """A process ready for requests, reserved for this thread until `_give_back`.

        Raises: RenderingUnavailable.
        """
        for _ in range(_TRIES):
            process = self._next()
            try:
                process.await_ready()
                return process
            except RenderingUnavailable as error:
                failure = error  # it may have ended while idle
            except BaseException:
                self._give_back(process, is_sound=False)
                raise
            self._give_back(process, is_sound=False)
        raise failure

    def _next(self) -> RenderingProcess:
        """An idle process, or a new one; marked busy."""
        ends_at = time.monotonic() + _TIMEOUT_S
        with self._state:
            while not self._is_closed:
                process = self._alive() or (self._started() if self._num < _MOST else None)
                if process is not None:
                    self._busy.add(process)
                    self._refill()
                    return process
                if not self._state.wait(ends_at - time.monotonic()):
                    raise RenderingUnavailable("too many conversations are rendered at once")
        raise RenderingUnavailable(_CLOSED)

    def _give_back(self, process: RenderingProcess, *, is_sound: bool) -> None:
        with self._state:
            if is_sound and not self._is_closed:
                self._idle.append(process)
            else:
                process.end()
            self._busy.discard(process)
            self._refill()
            self._state.notify_all()

    def _alive(self) -> RenderingProcess | None:
        """An idle process that still runs. Needs the lock, as do the methods below."""
        while self._idle:
            process = self._idle.popleft()
            if process.is_alive:
                return process
            process.end()
        return None

    @property
    def _num(self) -> int:
        return len(self._idle) + len(self._busy)

    def _fill(self) -> None:
        """Start missing processes, some milliseconds each; they get ready in the background."""
        while not self._is_closed and (self._num < _KEPT or (not self._idle and self._num < _MOST)):
            self._idle.append(self._started())

    def _refill(self) -> None:
        with contextlib.suppress(RenderingUnavailable):  # the next request raises it
            self._fill()

    def _started(self) -> RenderingProcess:
        return RenderingProcess(self._command or rendering_command())


def _unsupported(reason: str, path: Path | str) -> UnsupportedModel:
    return UnsupportedModel(reason, path=path, field=_FIELD)


def rendering_command() -> list[str]:
    """The command that starts a process which renders chat templates."""
    return child_command("chat_child", _PACKAGES)


def child_command(module: str, packages: Sequence[str]) -> list[str]:
    """The command that runs ``main`` of a module of dflash_adapters.text, which imports nothing but
    these packages and Python's."""
    run = (
        "import sys; sys.path += sys.argv[1:]; "
        f"from dflash_adapters.text.{module} import main; main()"
    )
    # Environment, working directory and site hooks do not affect its imports.
    return [
        sys.executable,
        "-I",
        "-S",
        "-W",
        "ignore",
        "-c",
        run,
        *map(str, package_roots(packages)),
    ]


class RenderingEnded(Exception):
    """A rendering process ended during a request; the message says how."""


class RenderingProcess:
    """A process that renders chat templates, or does what else `purpose` says; used by one thread
    at a time.

    It is exec'd in a session of its own and inherits only the pipes of its standard streams. It
    ends when its input does, and so with this process.
    Owns: the process and our ends of its pipes, until `end`.
    Raises: RenderingUnavailable if it cannot be started.
    """

    def __init__(self, command: Sequence[str], purpose: str = "chat templates") -> None:
        self._is_ready, self._purpose = False, purpose
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
                # next chat, or the next grammar
                f"no process for {purpose} can be started: {error.strerror or error}"
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
                # docs: its interpreter lacks a package, or memory is short; it is tried again with
                # the next chat, or the next grammar
                f"the process for {self._purpose} does not start: {error}"
            ) from error
        if not is_ready:
            raise RenderingUnavailable(f"the process for {self._purpose} does not start")
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
