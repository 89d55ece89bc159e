"""Unplanned events of an engine's owners of experts: their kinds, and the log of them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from dflash_protocol.errors import one_line

_LOG = logging.getLogger(__name__)

_EVENTS_KEPT = 1000


class EventKind(StrEnum):
    """As in `/props`, `--json` and the summary of `generate`.

    The members' docstrings are the table in docs/reference.md (`make docs`).
    """

    BREAKER_CLOSED = "breaker_closed"
    """a daemon's circuit breaker closed: it is used again"""
    BREAKER_HALF_OPEN = "breaker_half_open"
    """one request is let through as a probe"""
    BREAKER_OPEN = "breaker_open"
    """its requests keep failing: it is not asked for 0.5 to 30 s"""
    DAEMON_ABSENT = "daemon_absent"
    """a daemon did not answer when the server started; other owners compute its experts until it
    does"""
    DAEMON_BACK = "daemon_back"
    """a daemon that was lost or absent is used again; the reason says how long it was away"""
    DAEMON_LOST = "daemon_lost"
    """a session ended, or the daemon ended before the first one and is tried again; other owners
    compute its experts until there is a new session"""
    DAEMON_REFUSED = "daemon_refused"
    """a daemon came back but cannot be used, for example with other weights; reported once, and
    tried again at most every 30 s"""
    NOT_FINITE = "not_finite"
    """a reply was NaN or infinite although the request was not; another owner computed it. Often:
    check that daemon's memory and device"""
    NUMERIC_CLASS_DIFFERS = "numeric_class_differs"
    """a daemon, or the fallback, has another backend, kernel or processor than the parent: tokens
    may differ in the last bits; those of prompts alone, if the parent is on a GPU"""
    REQUEST_FAILED = "request_failed"
    """one request failed and the session goes on"""
    WEIGHTS_UNCHECKED = "weights_unchecked"
    """a daemon speaks version 1 of the protocol: its weights could not be compared with ours"""
    WRONG_REPLY = "wrong_reply"
    """a checked reply was wrong: it was not used, and the daemon is not used again until the parent
    is restarted"""


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
