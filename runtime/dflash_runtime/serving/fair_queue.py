"""Fairness between clients: a bounded queue, and a semaphore, at which each takes turns."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class QueueFull(Exception):
    """The queue is full, or this client has filled its half."""


class FairQueue(Generic[T]):
    """Items by client, taken round robin. For several threads.

    `capacity` counts all waiting items; one client may fill half of it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.capacity_of_one = max(1, capacity // 2)
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._num_waiting = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def put(self, client: str, item: T) -> None:
        """Append an item of this client. Raises: QueueFull."""
        with self._changed:
            mine = self._waiting.get(client)
            if self._num_waiting >= self.capacity or (
                mine is not None and len(mine) >= self.capacity_of_one
            ):
                raise QueueFull
            if mine is None:
                mine = self._waiting[client] = deque()
            mine.append(item)
            self._num_waiting += 1
            self._changed.notify()

    def take(self, timeout_s: float | None = None) -> T | None:
        """Wait for the next item; None once the queue is closed and empty.

        Raises: TimeoutError after `timeout_s` without one.
        """
        with self._changed:
            while not self._waiting:
                if self._is_closed:
                    return None
                if not self._changed.wait(timeout_s) and not self._waiting and not self._is_closed:
                    raise TimeoutError
            client, items = self._waiting.popitem(last=False)
            item = items.popleft()
            self._num_waiting -= 1
            if items:
                self._waiting[client] = items  # behind all other clients
            return item

    def remove(self, client: str, item: T) -> bool:
        """Remove an item; False if it is not waiting (any more)."""
        with self._changed:
            items = self._waiting.get(client)
            if items is None or item not in items:
                return False
            items.remove(item)
            self._num_waiting -= 1
            if not items:
                del self._waiting[client]
            return True

    def close(self) -> None:
        """`take` returns the items that are left, then None."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


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
