"""What happened to an engine's owners of experts otherwise than planned."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from dflash_protocol.errors import one_line

_LOG = logging.getLogger(__name__)

_EVENTS_KEPT = 1000


@dataclass(frozen=True, slots=True)
class Event:
    """Something that went otherwise than planned. Times are seconds since the engine was opened."""

    time_s: float
    kind: str
    owner: str
    reason: str


class EventLog:
    """The latest thousand events of one engine; any thread may add and read.

    Knows nobody: links that report here must not keep alive what an engine has loaded.
    """

    def __init__(self) -> None:
        self._opened_s = time.monotonic()
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=_EVENTS_KEPT)

    def add(self, kind: str, owner: str, reason: str) -> None:
        """Note it now. The log is told when a daemon is not there, is back, or answered wrongly."""
        reason = one_line(reason)
        if kind in ("daemon_lost", "daemon_absent", "daemon_refused"):
            _LOG.warning("daemon %s is not there: %s", owner, reason)
        elif kind == "daemon_back":
            _LOG.warning("daemon %s is used again: %s", owner, reason)
        elif kind == "wrong_reply":
            _LOG.error("daemon %s is used no more, it has answered wrongly: %s", owner, reason)
        with self._lock:
            self._events.append(Event(time.monotonic() - self._opened_s, kind, owner, reason))

    def latest(self) -> list[Event]:
        """In the order in which they were added."""
        with self._lock:
            return list(self._events)
