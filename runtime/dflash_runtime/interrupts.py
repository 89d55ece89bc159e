"""Ctrl-C: held back during critical sections, and repeated presses ignored.

Python raises KeyboardInterrupt in the main thread, at almost any instruction.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_REPEAT_S = 10.0
"""Further presses within this time are ignored: ending takes a moment."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block ends; it is then delivered.

    For work that must not be left half done and takes a bounded time. Only the main thread is ever
    interrupted: in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    was_pressed = False

    def remember(number: int, frame: object) -> None:
        nonlocal was_pressed
        was_pressed = True

    previous = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        # None: not set from Python, and so not to be restored by it.
        signal.signal(signal.SIGINT, signal.default_int_handler if previous is None else previous)
        if was_pressed:
            signal.raise_signal(signal.SIGINT)


def interrupt_once() -> None:
    """Make Ctrl-C interrupt this process once; presses within the next 10 s, while it ends, are
    ignored. For programs; if SIGINT is ignored it stays so."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    pressed_s = -_REPEAT_S

    def interrupt(number: int, frame: object) -> None:
        nonlocal pressed_s
        if time.monotonic() - pressed_s >= _REPEAT_S:
            pressed_s = time.monotonic()
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
