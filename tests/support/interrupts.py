"""Ctrl-C in a suite: as its tests expect it, and as their threads send it."""

from __future__ import annotations

import signal
import threading


def have_interrupts() -> None:
    """Have Ctrl-C interrupt this process, and those that it starts, though it may be ignored.

    A shell has a script's background jobs ignore it, and whatever they start inherits that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupt_main_thread() -> None:
    """Returns at once; the main thread's handler runs when that thread comes to it."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
