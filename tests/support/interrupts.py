"""Ctrl-C in tests: makes sure that SIGINT has its usual effect, and sends it."""

from __future__ import annotations

import signal
import threading


def restore_interrupts() -> None:
    """Restore the default handling of SIGINT in this process and in those it starts.

    Background jobs of a shell script ignore SIGINT, and their children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupt_main_thread() -> None:
    """Send SIGINT to the main thread. Returns before its handler has run."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
