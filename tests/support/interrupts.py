"""Ctrl-C as a test's threads send it."""

from __future__ import annotations

import signal
import threading


def interrupt_main_thread() -> None:
    """Returns at once; the main thread's handler runs when that thread comes to it."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
