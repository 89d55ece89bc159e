"""Fairness between clients within the event loop: a semaphore at which each takes turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dflash_protocol.errors import QueueFull
from dflash_runtime.engine.fair_queue import FairQueue

__all__ = ["QueueFull", "Turns"]


class Turns:
    """A semaphore: at most `num_at_once` clients have a turn, at most `capacity` wait for one.

    Used in the event loop's thread alone.
    """

    def __init__(self, num_at_once: int, capacity: int) -> None:
        self._num_free = num_at_once
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue(capacity)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for this client's turn, and hold it. Raises: QueueFull."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(client)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, client: str) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(client, mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.cancelled():
                self._waiting.remove(client, mine)
            else:  # the turn came at the same time
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next waiting client, if there is one."""
        while len(self._waiting):
            following = self._waiting.take()
            assert following is not None
            if not following.done():
                following.set_result(None)
                return
        self._num_free += 1
