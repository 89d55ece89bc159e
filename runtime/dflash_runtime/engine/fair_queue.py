"""Fairness between clients: a bounded queue at which each takes turns."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from itertools import islice
from typing import Generic, TypeVar

from dflash_protocol.errors import QueueFull

T = TypeVar("T")


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
                raise QueueFull("too many requests are waiting; try again later")
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

    def waiting(self, most: int) -> list[T]:
        """The items that would be taken next if no more came, `most` at most."""
        with self._changed:
            turns = deque(deque(islice(items, most)) for items in self._waiting.values())
        found: list[T] = []
        while turns and len(found) < most:
            items = turns.popleft()
            found.append(items.popleft())
            if items:
                turns.append(items)
        return found

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
