"""Tries grammars of clients in a process that can be killed, before they are compiled in ours."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

from dflash_adapters.text.chat_messages import ReplyKind, decode_reply
from dflash_adapters.text.grammar import MOST_GRAMMAR_BYTES, GrammarSource
from dflash_adapters.text.grammar_messages import encode_source
from dflash_protocol.errors import (
    DeadlineExceeded,
    GrammarError,
    ProtocolError,
    RenderingUnavailable,
)
from dflash_runtime.engine.chat_renderer import RenderingEnded, RenderingProcess, child_command

LONGEST_S = 8.0
"""Wall time of a trial, whose CPU time the process bounds itself, for a busy machine."""
_PACKAGES = ("dflash_protocol", "dflash_adapters", "llguidance", "numpy", "msgpack")
_MOST_REPLY_BYTES = 1 << 16
_KEPT_RESULTS = 256


class GrammarTrials:
    """A process that compiles grammars, one at a time; it starts with `start` or the first one.

    Any thread may call any method. Owns: the process, until `close`.
    """

    def __init__(self, command: Sequence[str] | None = None) -> None:
        """`command` starts another process."""
        self._command = command or child_command("grammar_child", _PACKAGES)
        self._turn = threading.Lock()
        self._process: RenderingProcess | None = None
        self._is_closed = False
        self._reasons: OrderedDict[bytes, str] = OrderedDict()
        """Of the latest grammars, by their hash: why they are refused, or nothing."""

    def start(self) -> None:
        """Start the process, without waiting until it is ready. Raises: RenderingUnavailable."""
        with self._turn:
            self._running()

    def check(self, source: GrammarSource) -> None:
        """Raises: GrammarError for one that is refused, or takes too long to compile;
        RenderingUnavailable."""
        if len(source.text) > MOST_GRAMMAR_BYTES:
            return  # refused at once by whoever compiles it
        message = encode_source(source)
        key = hashlib.sha256(message).digest()
        with self._turn:
            reason = self._reasons.get(key)
            if reason is None:
                reason = self._tried(message)
            self._reasons[key] = reason
            self._reasons.move_to_end(key)
            if len(self._reasons) > _KEPT_RESULTS:
                self._reasons.popitem(last=False)
        if reason:
            raise GrammarError(reason)

    def close(self) -> None:
        """Kill the process; a pending trial raises RenderingUnavailable. May be repeated."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._turn:
            self._end()

    def _tried(self, message: bytes) -> str:
        """Why a grammar is refused; nothing if it is not. Needs the lock, as do those below."""
        process = self._running()
        try:
            process.await_ready()
            kind, text = decode_reply(
                process.ask(message, deadline_s=LONGEST_S, max_reply_bytes=_MOST_REPLY_BYTES)
            )
        except BaseException as error:
            self._end()
            if self._is_closed:
                raise _closed() from None
            if isinstance(error, DeadlineExceeded):
                return f"compiling takes more than {LONGEST_S:g} s"
            if isinstance(error, RenderingEnded | ProtocolError):
                return f"compiling takes too much: {error}"
            raise
        return text if kind is ReplyKind.REFUSED else ""

    def _running(self) -> RenderingProcess:
        """Raises: RenderingUnavailable."""
        if self._process is not None and not self._process.is_alive:
            self._end()
        if self._is_closed:
            raise _closed()
        if self._process is None:
            self._process = RenderingProcess(self._command, "grammars")
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


def _closed() -> RenderingUnavailable:
    return RenderingUnavailable("the engine is being closed")
