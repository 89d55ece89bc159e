"""Ending with the process that started us. Knows nothing of what either is for."""

from __future__ import annotations

import ctypes
import os
import platform
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> bool:
    """Ask the kernel for a signal when the thread that spawned us ends.

    False if that has happened already. Where there is no such service, the end of a pipe that we
    inherit has to do.
    """
    parent_pid = os.getppid()
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent_pid
