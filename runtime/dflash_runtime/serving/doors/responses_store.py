"""Responses that are kept for an hour, so that others can go on from them: bounded, and each for
the key that asked for it."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

KEPT_S = 3600.0
"""After this time a response is forgotten."""
_MOST = 1024
_OVERHEAD_BYTES = 1024
"""Of an entry besides its texts."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One complete response of a client with the API key `key`."""

    key: str
    items: tuple[bytes, ...]
    """JSON lists of the conversation's items, of which the last one is its own output."""
    response: bytes
    """Its JSON."""
    made_s: float = field(default_factory=time.monotonic)

    @property
    def items_bytes(self) -> int:
        return sum(map(len, self.items))

    @property
    def num_bytes(self) -> int:
        return len(self.response) + self.items_bytes + _OVERHEAD_BYTES


class ResponseStore:
    """At most 1,024 responses, and `most_bytes`; those of one key at most half of either. The
    oldest go first. Used in the event loop's thread alone."""

    def __init__(self, most_bytes: int) -> None:
        self.num_bytes = 0
        """Bytes of all that are kept."""
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, response_id: str, *, key: str) -> StoredResponse | None:
        """The response with this id; None if there is none of this key."""
        self._forget_old()
        found = self._kept.get(response_id)
        return None if found is None or found.key != key else found

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response, instead of old ones if need be; one that is larger than the bound of
        its key is not kept."""
        self._forget_old()
        if stored.num_bytes > self._most_bytes // 2:
            return
        own = [name for name, each in self._kept.items() if each.key == stored.key]
        num_bytes = stored.num_bytes + sum(self._kept[name].num_bytes for name in own)
        num_own = len(own) + 1
        for name in own:
            if num_own <= _MOST // 2 and num_bytes <= self._most_bytes // 2:
                break
            num_own, num_bytes = num_own - 1, num_bytes - self._kept[name].num_bytes
            self.remove(name)
        while len(self._kept) >= _MOST or self.num_bytes + stored.num_bytes > self._most_bytes:
            self.remove(next(iter(self._kept)))
        self._kept[response_id] = stored
        self.num_bytes += stored.num_bytes

    def remove(self, response_id: str) -> None:
        """Forget a response that is kept."""
        self.num_bytes -= self._kept.pop(response_id).num_bytes

    def _forget_old(self) -> None:
        oldest_s = time.monotonic() - KEPT_S
        while self._kept and next(iter(self._kept.values())).made_s < oldest_s:
            self.remove(next(iter(self._kept)))
