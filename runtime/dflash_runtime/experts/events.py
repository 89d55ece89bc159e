"""The log of unplanned events of an engine's owners of experts."""

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
    """An unplanned event. Time is in seconds since the engine was opened."""

    time_s: float
    kind: EventKind
    owner: str
    reason: str


class EventLog:
    """The latest thousand events of one engine; thread-safe.

    Holds no references to its users: links that report here must not keep an engine's weights
    alive.
    """

    def __init__(self) -> None:
        self._opened_s = time.monotonic()
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=_EVENTS_KEPT)

    def add(self, kind: EventKind, owner: str, reason: str) -> None:
        """Add an event now. Loss, return and wrong replies of a daemon are also logged."""
        reason = one_line(reason)
        if kind in _NOT_THERE:
            # docs: it was lost, or did not answer when the server started; other owners compute its
            # experts until it is back. `… before it was ready`: the start waits for its successor
            _LOG.warning("daemon %s is not there: %s", owner, reason)
        elif kind is EventKind.DAEMON_BACK:
            # docs: it is back; the reason says how long it was away, since it was lost or found
            # absent
            _LOG.warning("daemon %s is used again: %s", owner, reason)
        elif kind is EventKind.WRONG_REPLY:
            # docs: a checked reply is not what the parent computes; see
            # [operations.md](operations.md#when-a-daemon-answers-wrongly)
            _LOG.error("daemon %s answered wrongly and is not used any more: %s", owner, reason)
        with self._lock:
            self._events.append(Event(time.monotonic() - self._opened_s, kind, owner, reason))

    def latest(self) -> list[Event]:
        """Events in the order in which they were added."""
        with self._lock:
            return list(self._events)
