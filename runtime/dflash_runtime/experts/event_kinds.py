"""Kinds of events: unplanned changes of owners of experts.

The members' docstrings are the table in docs/reference.md (`make docs`).
"""

from __future__ import annotations

from enum import StrEnum


class EventKind(StrEnum):
    """As in `/props`, `--json` and the summary of `generate`."""

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
    may differ in the last bits"""
    REQUEST_FAILED = "request_failed"
    """one request failed and the session goes on"""
    WEIGHTS_UNCHECKED = "weights_unchecked"
    """a daemon speaks version 1 of the protocol: its weights could not be compared with ours"""
    WRONG_REPLY = "wrong_reply"
    """a checked reply was wrong: it was not used, and the daemon is not used again until the parent
    is restarted"""
