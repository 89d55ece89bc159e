"""What a process sets up first: usable standard streams, and a signal when its parent ends.

A program must not fail because its log cannot be written: standard streams may be closed, their
disk full or their reader gone.
"""

from __future__ import annotations

import ctypes
import io
import os
import platform
import signal
import sys

_PR_SET_PDEATHSIG = 1
_STDERR_FD = 2
_BUFFER_BYTES = 1 << 16


def prepare_standard_streams() -> None:
    """Open closed descriptors 0 to 2 on /dev/null, and make stderr drop what it cannot write.

    Call it before anything is opened: a file or socket that got descriptor 2 would be written to
    as a log.
    """
    for fd in range(_STDERR_FD + 1):
        try:
            os.fstat(fd)
        except OSError:
            # open() takes the lowest free descriptor, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is sys.__stderr__:  # not one that a caller has put in its place
        encoding = getattr(sys.stderr, "encoding", None)
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_DroppingWriter(), _BUFFER_BYTES),
            encoding=encoding,
            errors="backslashreplace",
            line_buffering=True,
        )


class _DroppingWriter(io.FileIO):
    """Descriptor 2; drops what cannot be written."""

    def __init__(self) -> None:
        super().__init__(_STDERR_FD, "w", closefd=False)

    def write(self, data: object, /) -> int:
        try:
            num_written = super().write(data)  # type: ignore[arg-type]
        except OSError:
            num_written = None
        # None: the descriptor is non-blocking and full.
        return memoryview(data).nbytes if num_written is None else num_written  # type: ignore[arg-type]


def end_with_parent(number: signal.Signals) -> bool:
    """Ask the kernel to send us signal `number` when the thread that spawned us ends.

    False if the parent has ended already. Linux only; elsewhere the caller has to watch the end of
    an inherited pipe.
    """
    parent_pid = os.getppid()
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent_pid
