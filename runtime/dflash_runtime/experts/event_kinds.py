"""Kinds of events: what happens to owners of experts otherwise than planned.

The docstrings are what docs/reference.md says of each (`make docs`).
"""

from __future__ import annotations

from enum import StrEnum


class EventKind(StrEnum):
    """As in `/props`, `--json` and the summary of `generate`."""

    BREAKER_CLOSED = "breaker_closed"
    """a daemon's circuit breaker closed: it is used again"""
    BREAKER_HALF_OPEN = "breaker_half_open"
    """one request is let through to see"""
    BREAKER_OPEN = "breaker_open"
    """its requests keep failing: it is not asked for 0.5 to 30 s"""
    DAEMON_ABSENT = "daemon_absent"
    """a daemon did not answer when the server started; its experts are computed elsewhere until it
    does"""
    DAEMON_BACK = "daemon_back"
    """a daemon that was lost or absent is used again; the reason says how long it was away"""
    DAEMON_LOST = "daemon_lost"
    """a session ended, or the daemon was ended before the first one and is tried again; its experts
    are computed elsewhere until there is a new one"""
    DAEMON_REFUSED = "daemon_refused"
    """a daemon came back as what cannot be used, with other weights perhaps; said once, and tried
    again every 30 s at the most"""
    NOT_FINITE = "not_finite"
    """a reply was NaN or infinite though what was asked was not; it was computed elsewhere. Often:
    look at that daemon's memory and device"""
    NUMERIC_CLASS_DIFFERS = "numeric_class_differs"
    """a daemon computes with another backend, kernel or processor than the parent, or the fallback
    would: tokens may differ in the last bits"""
    REQUEST_FAILED = "request_failed"
    """one request failed and the session goes on"""
    WEIGHTS_UNCHECKED = "weights_unchecked"
    """a daemon speaks version 1 of the protocol: that it has our weights was not compared"""
    WRONG_REPLY = "wrong_reply"
    """a reply that was checked was wrong: it was not used, and the daemon is not used again before
    the parent is started anew"""
