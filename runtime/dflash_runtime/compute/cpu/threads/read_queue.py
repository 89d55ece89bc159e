"""The kernel's queue of reads that compiled code begins (threads/system)."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time

from dflash_runtime.compute.cpu.threads.system import READ_SYSCALLS

EVENT_BYTES = 32
"""Of the kernel's struct io_event."""
_TURN_S = 0.1


class ReadQueue:
    """Owns the queue, until it is closed.

    Raises: OSError where there are no such reads.
    """

    def __init__(self, most: int) -> None:
        """`most`: reads that may be pending."""
        if not sys.platform.startswith("linux") or platform.machine() not in READ_SYSCALLS:
            raise OSError("this system has no such reads")
        self._numbers = READ_SYSCALLS[platform.machine()]
        self._library, context = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(0)
        if self._library.syscall(self._numbers["setup"], most, ctypes.byref(context)) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.context = context.value
        """As calls of the system name it."""

    def close(self, num_pending: int, limit_s: float) -> bool:
        """Wait for so many reads that are pending, at most so long. False if some have not ended:
        their memory, which they may still write, must stay. Call it once."""
        events = (ctypes.c_int64 * (max(1, num_pending) * EVENT_BYTES // 8))()
        turn = (ctypes.c_long * 2)(0, int(_TURN_S * 1e9))
        end_s, queue = time.monotonic() + limit_s, ctypes.c_ulong(self.context)
        while num_pending > 0 and time.monotonic() < end_s:
            arguments = ctypes.c_long(1), ctypes.c_long(num_pending), events, turn
            ended = self._library.syscall(self._numbers["getevents"], queue, *arguments)
            num_pending -= max(0, ended)
        if num_pending:
            return False
        # It would wait for reads that are pending, for as long as they take.
        self._library.syscall(self._numbers["destroy"], queue)
        return True
