"""Standard streams as programs find them: closed, full, or with nobody left to read them.

What a program is for does not end because its log cannot be written.
"""

from __future__ import annotations

import io
import os
import sys

_STDERR_FD = 2
_BUFFER_BYTES = 1 << 16


def prepare_standard_streams() -> None:
    """For programs, first of all. Descriptors 0 to 2 that are closed lead nowhere from now on, so
    that no file or socket of ours is opened in their place and written to as a log; and a line
    that stderr does not take, because its disk is full or its reader gone, is dropped.
    """
    for fd in range(_STDERR_FD + 1):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest that is free is this one.
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
    """Descriptor 2; what it does not take is dropped."""

    def __init__(self) -> None:
        super().__init__(_STDERR_FD, "w", closefd=False)

    def write(self, data: object, /) -> int:
        try:
            num_written = super().write(data)  # type: ignore[arg-type]
        except OSError:
            num_written = None
        # None: it is somebody's who does not wait, and it is full.
        return memoryview(data).nbytes if num_written is None else num_written  # type: ignore[arg-type]
