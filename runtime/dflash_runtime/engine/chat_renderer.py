"""Renders conversations with chat templates, in a small pool of processes that can be killed.

A template is untrusted code, and no sandbox is known to hold: one that escapes its limits costs its
own request some seconds. One process is kept spare, so that the next request does not wait.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from dflash_adapters.text.chat_messages import (
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
from dflash_runtime.engine.chat_process import (
    RenderingEnded,
    RenderingProcess,
    rendering_command,
)

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
