"""A daemon's requests and its circuit breaker, which is consulted only after a recent failure:
otherwise the cost is a test of one attribute."""

from __future__ import annotations

import logging
import time
from functools import partial

from dflash_protocol.errors import DaemonUnavailable, DflashError
from dflash_runtime.experts.compute import OwnerStats, Ticket
from dflash_runtime.experts.daemons.link import DaemonLink
from dflash_runtime.experts.event_kinds import EventKind
from dflash_runtime.experts.remote.breaker import BreakerState, CircuitBreaker

_LOG = logging.getLogger(__name__)


class RequestGuard:
    """The guard of one daemon. Adds to `stats`, those of its owner."""

    def __init__(self, link: DaemonLink, stats: OwnerStats) -> None:
        self.breaker = CircuitBreaker(partial(_note_transition, link))
        self.is_troubled = False
        """Whether the breaker must be consulted: only after a request failed."""
        self._name = link.name
        self._stats = stats
        self._probe: Ticket | None = None

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

    def begin_probe(self, ticket: Ticket) -> None:
        """Mark a ticket as the probe."""
        self._probe = ticket

    def is_probe(self, ticket: Ticket) -> bool:
        return ticket is self._probe

    def forget(self, ticket: Ticket) -> None:
        """The ticket's outcome will not be known."""
        if ticket is self._probe:
            self._probe = None
            self.breaker.note_probe_abandoned()

    def note_success(self, ticket: Ticket) -> None:
        now_s = time.monotonic()
        is_probe = ticket is self._probe
        if is_probe:
            self._probe = None
        self.breaker.note_success(now_s, is_probe=is_probe)
        self.is_troubled = not self.breaker.is_calm(now_s)

    def note_failure(self, error: DflashError, *, cost_s: float, is_probe: bool) -> None:
        self.is_troubled = True
        if is_probe:
            self._probe = None
        self.breaker.note_failure(time.monotonic(), str(error), cost_s=cost_s, is_probe=is_probe)


def _note_transition(link: DaemonLink, state: BreakerState, reason: str) -> None:
    """Report to the link. A function, since a breaker that referred to its compute would make a
    cycle."""
    level = logging.WARNING if state is BreakerState.OPEN else logging.INFO
    # docs: `open` is a warning: its requests keep failing, so that it is not asked for a while.
    # `half-open`, `closed`: one request is let through; it is used again
    _LOG.log(level, "daemon %s: circuit breaker is %s: %s", link.name, state, reason)
    link.note(EventKind[f"BREAKER_{state.name}"], reason)
