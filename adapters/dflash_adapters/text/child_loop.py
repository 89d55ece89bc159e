"""The loop of a process that does for its parent what may take too long, and can be killed.

It reads requests from standard input and writes replies to standard output, one at a time, until
the input ends. The kernel limits its memory and CPU time, the parent limits wall time, and the
kernel ends it at once when its input ends, even in the middle of a request. It can write no file.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import resource
import select
import signal
from collections.abc import Callable, Iterator

from dflash_adapters.text.chat_messages import (
    LATE_S,
    LENGTH,
    MAX_REQUEST_BYTES,
    READY,
    ReplyKind,
    encode_reply,
)
from dflash_protocol.errors import ProtocolError

_INPUT, _OUTPUT = 0, 1
_OPEN_FILES = 16
_CHUNK_BYTES = 1 << 20
"""Maximum capacity of a pipe."""


def serve(answer: Callable[[bytearray], tuple[ReplyKind, str]]) -> None:
    """Answer requests until the end of input. `answer` gets a message's body; what may take long
    in it is within `bounded`."""
    # The parent may have ignored or blocked the signals that end this process.
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for which, most in (
        (resource.RLIMIT_CORE, 0),  # a core dump would contain conversations
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
    ):
        resource.setrlimit(which, (most, most))
    with contextlib.suppress(OSError):  # first candidate of the OOM killer
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        try:
            os.write(fd, b"1000")
        finally:
            os.close(fd)
    fcntl.fcntl(_INPUT, fcntl.F_SETOWN, os.getpid())
    _write(READY)
    while (body := _next_body()) is not None:
        kind, text = answer(body)
        del body
        _write(encode_reply(kind, text))


@contextlib.contextmanager
def bounded(deadline_s: float, memory_bytes: int) -> Iterator[None]:
    """Within this context this process may use CPU time for `deadline_s` and a bit more, and that
    much address space; the kernel ends it with SIGIO if its input ends."""
    _limit(resource.RLIMIT_AS, memory_bytes)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + deadline_s + LATE_S))
    with _ended_with_input():
        yield


def _limit(which: int, most: int) -> None:
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


@contextlib.contextmanager
def _ended_with_input() -> Iterator[None]:
    """Within this context the kernel ends this process with SIGIO if its input ends."""
    flags = fcntl.fcntl(_INPUT, fcntl.F_GETFL)
    fcntl.fcntl(_INPUT, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        poller = select.poll()
        poller.register(_INPUT, 0)
        if poller.poll(0):  # it has ended before
            raise SystemExit
        yield
    finally:
        fcntl.fcntl(_INPUT, fcntl.F_SETFL, flags)


def _next_body() -> bytearray | None:
    """The next message; None at the end of input. Raises: ProtocolError if it is too long."""
    head = _read(LENGTH.size)
    if head is None:
        return None
    (num_bytes,) = LENGTH.unpack(head)
    if num_bytes > MAX_REQUEST_BYTES:
        raise ProtocolError("a request to render is too long")
    return _read(num_bytes)


def _read(num_bytes: int) -> bytearray | None:
    data = bytearray()
    while len(data) < num_bytes:
        part = os.read(_INPUT, min(num_bytes - len(data), _CHUNK_BYTES))
        if not part:
            return None
        data += part
    return data


def _write(data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(_OUTPUT, rest) :]
