"""Circuit breaker: stops requests to a daemon that keeps failing.

::

             3 failures in a row, or 5 in 10 s
    closed ───────────────────────────────────► open ◄──────────────┐
       ▲                                          │ pause is over    │ the probe fails:
       │ the probe succeeds                       ▼                  │ twice the pause
       └───────────────────────────────────── half-open ─────────────┘

While it is open nothing is sent, so that a failing owner costs one deadline a pause instead of one
a step. When half-open it lets a single request through, the probe. A daemon's requests pass its
RequestGuard, which consults the breaker.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from functools import partial

from dflash_protocol.errors import DaemonUnavailable, DflashError
from dflash_runtime.experts.compute import Ticket
from dflash_runtime.experts.daemons.link import DaemonLink
from dflash_runtime.experts.events import EventKind
from dflash_runtime.experts.telemetry import OwnerStats

_LOG = logging.getLogger(__name__)

_MOST_IN_A_ROW = 3
_MOST_LATELY = 5
_LATELY_S = 10.0
"""Failures count for this long; after as long without any, pauses start short again."""
_PAUSE_FIRST_S = 0.5
_PAUSE_LAST_S = 30.0
_COST_FACTOR = 4.0
"""A pause is at least this many times what the failed request cost."""


class BreakerState(StrEnum):
    """As reported in statistics."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class CircuitBreaker:
    """One daemon's breaker. Times are passed in, as seconds of any monotonic clock.

    `on_transition` is called with every new state and its reason.
    """

    def __init__(self, on_transition: Callable[[BreakerState, str], None]) -> None:
        self.state = BreakerState.CLOSED
        self.reason = ""
        """Why it was opened last."""
        self.num_opened = 0
        self._on_transition = on_transition
        self._num_in_a_row = 0
        self._failures_s: deque[float] = deque(maxlen=_MOST_LATELY)
        self._last_trouble_s = -math.inf
        self._pause_s = 0.0
        self._open_until_s = 0.0

    def lets_through(self, now_s: float) -> bool:
        """Whether a request may be sent. If the state is half-open afterwards, that request is the
        probe, and its outcome must be reported."""
        if self.state is BreakerState.OPEN and now_s >= self._open_until_s:
            self._enter(BreakerState.HALF_OPEN, "one request is let through")
            return True
        return self.state is BreakerState.CLOSED

    def is_calm(self, now_s: float) -> bool:
        """Whether it is closed and no failure is recent enough to count."""
        is_closed = self.state is BreakerState.CLOSED
        return is_closed and now_s - self._last_trouble_s > _LATELY_S

    def note_success(self, now_s: float, *, is_probe: bool) -> None:
        """A request succeeded. One that was sent before the breaker opened does not count."""
        if self.state is BreakerState.CLOSED:
            self._num_in_a_row = 0
        elif is_probe:
            self._last_trouble_s = now_s
            self._enter(BreakerState.CLOSED, "the request that was let through succeeded")

    def note_failure(self, now_s: float, reason: str, *, cost_s: float, is_probe: bool) -> None:
        """A request failed after a wait of `cost_s`."""
        if self.state is not BreakerState.CLOSED:
            if is_probe:
                self._open(now_s, reason, cost_s)
            return
        if self.is_calm(now_s):
            self._pause_s, self._num_in_a_row = 0.0, 0
        self._last_trouble_s = now_s
        self._num_in_a_row += 1
        self._failures_s.append(now_s)
        if self._num_in_a_row >= _MOST_IN_A_ROW:
            self._open(now_s, f"{self._num_in_a_row} requests in a row failed: {reason}", cost_s)
        elif len(self._failures_s) == _MOST_LATELY and now_s - self._failures_s[0] <= _LATELY_S:
            reason = f"{_MOST_LATELY} requests failed within {_LATELY_S:.0f} s: {reason}"
            self._open(now_s, reason, cost_s)

    def note_probe_abandoned(self) -> None:
        """The probe's outcome will not be known: the next request is the probe."""
        if self.state is BreakerState.HALF_OPEN:
            self._enter(BreakerState.OPEN, "the request that was let through was given up")

    def _open(self, now_s: float, reason: str, cost_s: float) -> None:
        doubled_s = min(max(2.0 * self._pause_s, _PAUSE_FIRST_S), _PAUSE_LAST_S)
        self._pause_s = max(doubled_s, _COST_FACTOR * cost_s)
        self._open_until_s = now_s + self._pause_s
        self._num_in_a_row = 0
        self._failures_s.clear()
        self.reason = reason
        self.num_opened += 1
        self._enter(BreakerState.OPEN, f"{reason}; asked again in {self._pause_s:.1f} s")

    def _enter(self, state: BreakerState, reason: str) -> None:
        self.state = state
        self._on_transition(state, reason)


class RequestGuard:
    """Consults one daemon's breaker, but only after a recent failure: else that costs the test of
    one attribute. Adds to `stats`, those of the daemon."""

    def __init__(self, link: DaemonLink, stats: OwnerStats) -> None:
        self.breaker = CircuitBreaker(partial(_note_transition, link))
        self.is_troubled = False
        """Whether the breaker must be consulted: only after a request failed."""
        self._name = link.name
        self._stats = stats
        self.probe: Ticket | None = None
        """The breaker's probe, while it is in flight."""

    def admit(self) -> bool:
        """Whether the next request is the breaker's probe; call it while `is_troubled`.

        Raises: DaemonUnavailable if the breaker lets nothing through.
        """
        if not self.breaker.lets_through(time.monotonic()):
            self._stats.breaker_refused += 1
            raise DaemonUnavailable(
                # docs: with `--require-daemons`: the daemon answers its handshake and fails its
                # requests; the reason stands there, and in its own log
                f"daemon {self._name}: its circuit breaker is open: {self.breaker.reason}"
            )
        return self.breaker.state is BreakerState.HALF_OPEN

    def forget(self, ticket: Ticket) -> None:
        """The ticket's outcome will not be known."""
        if ticket is self.probe:
            self.probe = None
            self.breaker.note_probe_abandoned()

    def note_success(self, ticket: Ticket) -> None:
        now_s = time.monotonic()
        is_probe = ticket is self.probe
        if is_probe:
            self.probe = None
        self.breaker.note_success(now_s, is_probe=is_probe)
        self.is_troubled = not self.breaker.is_calm(now_s)

    def note_failure(self, error: DflashError, *, cost_s: float, is_probe: bool) -> None:
        self.is_troubled = True
        if is_probe:
            self.probe = None
        self.breaker.note_failure(time.monotonic(), str(error), cost_s=cost_s, is_probe=is_probe)


def _note_transition(link: DaemonLink, state: BreakerState, reason: str) -> None:
    """Report to the link. A function, since a breaker that referred to its compute would make a
    cycle."""
    level = logging.WARNING if state is BreakerState.OPEN else logging.INFO
    # docs: `open` is a warning: its requests keep failing, so that it is not asked for a while.
    # `half-open`, `closed`: one request is let through; it is used again
    _LOG.log(level, "daemon %s: circuit breaker is %s: %s", link.name, state, reason)
    link.note(EventKind[f"BREAKER_{state.name}"], reason)
