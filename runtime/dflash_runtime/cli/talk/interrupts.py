"""Ctrl-C in a talk: it leaves a line that is typed, stops an answer, and else does nothing. SIGTERM
ends the program as an exception does, so that the terminal is left as it was."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

_AGAIN_S = 1.0


class Interrupts:
    """Handles SIGINT and SIGTERM within the context, in the main thread.

    Outside of `raised` and `noted` SIGINT is ignored: it came a moment too late for an answer.
    """

    def __init__(self) -> None:
        self._on_press: Callable[[], None] = _ignore
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        handlers = {signal.SIGINT: self._press, signal.SIGTERM: _end}
        for number, handler in handlers.items():
            self._previous[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Within the block Ctrl-C raises KeyboardInterrupt."""
        self._on_press = _raise
        try:
            yield
        finally:
            self._on_press = _ignore

    @contextmanager
    def noted(self) -> Iterator[Callable[[], bool]]:
        """Within the block Ctrl-C makes the yielded function return True.

        Should that change nothing, another one raises KeyboardInterrupt, a second later at least.
        """
        pressed_s: float | None = None

        def note() -> None:
            nonlocal pressed_s
            now_s = time.monotonic()
            if pressed_s is not None and now_s - pressed_s > _AGAIN_S:
                raise KeyboardInterrupt
            pressed_s = now_s if pressed_s is None else pressed_s

        self._on_press = note
        try:
            yield lambda: pressed_s is not None
        finally:
            self._on_press = _ignore

    def _press(self, number: int, frame: FrameType | None) -> None:
        self._on_press()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _ignore() -> None: ...


def _raise() -> None:
    raise KeyboardInterrupt
