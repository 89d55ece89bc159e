"""A bounded queue that is fair between clients: each that has work gets its turn.

Knows nothing of what waits in it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class QueueFull(Exception):
    """There is no room, or none for this client."""


class FairQueue(Generic[T]):
    """Items by client, taken in turn: one of each client that has some. For several threads.

    `capacity` counts all that wait; one client may fill half of it, so that others get in too.
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

    def put(self, client: str, item: T) -> None:
        """Raises: QueueFull."""
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

    def take(self) -> T | None:
        """The next item, as soon as there is one; None once the queue is closed and empty."""
        with self._changed:
            while not self._waiting:
                if self._is_closed:
                    return None
                self._changed.wait()
            client, items = self._waiting.popitem(last=False)
            item = items.popleft()
            self._num_waiting -= 1
            if items:
                self._waiting[client] = items  # behind all others
            return item

    def remove(self, client: str, item: T) -> bool:
        """Take this item out, whatever its turn. False if it does not wait (any more)."""
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
        """Whoever waits for items gets those that are left, then None."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
