"""Stop strings: a text ends before the first of them, however tokens divide it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace

from dflash_protocol.errors import SettingsError
from dflash_runtime.engine.generation import GeneratedToken


class StopFinder:
    """Finds the stop string that ends first in a text that comes in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self.held = ""
        """Text that may be the beginning of a stop string; once one was found, that and what came
        behind it."""
        self.stop: str | None = None
        """The stop string that was found: `push` needs no more text."""

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None

    def push(self, text: str) -> str:
        """Take a piece; returns the text that became final."""
        self.held += text
        found = [
            (place + len(stop), place, stop)
            for stop in self._stops
            if (place := self.held.find(stop)) >= 0
        ]
        if found:
            _, place, self.stop = min(found)
            return self._release(place)
        return self._release(len(self.held) - self._num_uncertain())

    def finish(self) -> str:
        """After the last piece: returns what was held back."""
        return "" if self.is_stopped else self._release(len(self.held))

    def _num_uncertain(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self.held)), longest, -1):
                if self.held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _release(self, length: int) -> str:
        text, self.held = self.held[:length], self.held[length:]
        return text


def checked_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings of an argument. Raises: SettingsError for an empty one, or what is none."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for each in stops:
        if not isinstance(each, str) or not each:
            raise SettingsError("stop: must be texts of at least one character")
    return stops


def until_stop(
    tokens: Generator[GeneratedToken], stops: Sequence[str], on_stop: Callable[[], None]
) -> Generator[GeneratedToken]:
    """The tokens before a stop string, each once its text is certain not to be part of one; the
    text of the last one ends where the stop string begins. `tokens` are closed at the end, and
    then `on_stop` is called if one was found."""
    finder = StopFinder(stops)
    with contextlib.closing(tokens):
        yield from _before_stop(tokens, finder)
    if finder.is_stopped:
        on_stop()


def _before_stop(tokens: Iterator[GeneratedToken], finder: StopFinder) -> Iterator[GeneratedToken]:
    waiting: deque[GeneratedToken] = deque()
    num_final = 0  # characters of the waiting tokens
    for token in tokens:
        waiting.append(token)
        num_final += len(finder.push(token.text))
        while waiting and len(waiting[0].text) <= num_final:
            if finder.is_stopped and not num_final:
                break
            first = waiting.popleft()
            num_final -= len(first.text)
            yield first
        if finder.is_stopped:
            if num_final:
                yield replace(waiting[0], text=waiting[0].text[:num_final])
            return
    yield from waiting
