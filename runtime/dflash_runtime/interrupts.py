"""Ctrl-C where it must wait, and where one is enough.

Python has it raise KeyboardInterrupt in the main thread at almost any instruction.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_IMPATIENCE_S = 10.0
"""So long after the first Ctrl-C another one is taken for the same wish: ending takes a moment."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until this ends; it then does what it would have done.

    For what must be gone through as a whole, and takes a bounded time. Only the main thread is ever
    interrupted: in others there is nothing to do.
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
    """From now on Ctrl-C interrupts this process once: whoever presses it again while everything is
    being ended gets nothing done sooner. For programs; where it is ignored it stays so."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    pressed_s = -_IMPATIENCE_S

    def interrupt(number: int, frame: object) -> None:
        nonlocal pressed_s
        if time.monotonic() - pressed_s >= _IMPATIENCE_S:
            pressed_s = time.monotonic()
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
