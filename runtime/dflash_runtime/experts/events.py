"""What happened to an engine's owners of experts otherwise than planned."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from dflash_protocol.errors import one_line
from dflash_runtime.experts.event_kinds import EventKind

_LOG = logging.getLogger(__name__)

_EVENTS_KEPT = 1000
_NOT_THERE = (EventKind.DAEMON_LOST, EventKind.DAEMON_ABSENT, EventKind.DAEMON_REFUSED)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that went otherwise than planned. Times are seconds since the engine was opened."""

    time_s: float
    kind: EventKind
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

    def add(self, kind: EventKind, owner: str, reason: str) -> None:
        """Note it now. The log is told when a daemon is not there, is back, or answered wrongly."""
        reason = one_line(reason)
        if kind in _NOT_THERE:
            # docs: it was lost, or did not answer when the server started; its experts are computed
            # elsewhere until it is back. `… before it was ready`: the start waits for its successor
            _LOG.warning("daemon %s is not there: %s", owner, reason)
        elif kind is EventKind.DAEMON_BACK:
            # docs: it is back: the reason says for how long it was away, since it was lost or found
            # absent
            _LOG.warning("daemon %s is used again: %s", owner, reason)
        elif kind is EventKind.WRONG_REPLY:
            # docs: a reply that was checked is not what the parent computes; see
            # [operations.md](operations.md#when-a-daemon-answers-wrongly)
            _LOG.error("daemon %s is used no more, it has answered wrongly: %s", owner, reason)
        with self._lock:
            self._events.append(Event(time.monotonic() - self._opened_s, kind, owner, reason))

    def latest(self) -> list[Event]:
        """In the order in which they were added."""
        with self._lock:
            return list(self._events)
