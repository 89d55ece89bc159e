"""Events from the engine's thread to one reader in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

E = TypeVar("E")


class EventChannel(Generic[E]):
    """Events of one job. Never blocks the writer; holds at most the tokens of a generation."""

    def __init__(self, loop: asyncio.AbstractEventLoop, is_last: Callable[[E], bool]) -> None:
        """`is_last` tells the event that nothing follows."""
        self._loop, self._is_last = loop, is_last
        self._events: deque[E] = deque()
        self._is_awake = asyncio.Event()
        self._is_woken = False
        self._has_ended = asyncio.Event()

    def put(self, event: E) -> None:
        """Add an event, from any thread."""
        self._events.append(event)
        # Waking the loop is the engine's thread's largest cost here: once is enough for all events
        # that the reader has not yet taken.
        try:
            if self._is_last(event):
                self._loop.call_soon_threadsafe(self._end)
            elif not self._is_woken:
                self._is_woken = True
                self._loop.call_soon_threadsafe(self._is_awake.set)
        except RuntimeError:
            return  # the loop is closed: there is no reader

    async def take(self) -> list[E]:
        """Wait for events; returns all there are."""
        while not self._events:
            await self._is_awake.wait()
            self._is_awake.clear()
            self._is_woken = False
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    async def ended(self) -> None:
        """Wait for the last event."""
        await self._has_ended.wait()

    async def pause(self, seconds: float) -> None:
        """Let events gather for a while, or until the last one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.ended()

    def _end(self) -> None:
        self._is_awake.set()
        self._has_ended.set()
