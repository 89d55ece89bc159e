"""The parent's end of a session: its data path, the requests in flight on it, and their deadlines,
which follow from how long the daemon takes for a pair."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from dflash_protocol.batch import RoutedBatch, SomeRows
from dflash_protocol.errors import DeadlineExceeded
from dflash_protocol.ids import I32Array, Phase
from dflash_protocol.transports.lent_slot import LentSlot
from dflash_protocol.transports.shared_client import SharedClient
from dflash_protocol.wire.transport import Reply, TransportCounters
from dflash_runtime.compute.asking import AskRoute
from dflash_runtime.compute.backend import MailRoute
from dflash_runtime.experts.compute import LocalIds, Ticket
from dflash_runtime.experts.daemons.data_path import DataPath
from dflash_runtime.experts.daemons.link import DaemonLink, Session
from dflash_runtime.experts.remote.pieces import Cut, Limits
from dflash_runtime.experts.telemetry import PhaseStats

_DEADLINE_FACTOR = 4.0
_LONGEST_DEADLINE_S = 600.0
_MOST_DOUBLINGS = 4
"""Limit on how often the expected time of a request is doubled while none is answered."""
_RATE_WEIGHT = 0.2


class RateEstimate:
    """Seconds a pair of one daemon by phase: a running mean over all its sessions, and before a
    phase's first reply the rate that the daemon reported. Used by the data thread."""

    def __init__(self, min_deadline_s: float) -> None:
        self._min_deadline_s = min_deadline_s
        self._reported_s = 0.0
        self._measured_s: dict[Phase, float] = {}
        self._num_doublings = 0

    def begin_session(self, pairs_per_s: float) -> None:
        """The daemon of a new session has measured this rate itself."""
        self._reported_s = 1.0 / pairs_per_s

    def deadline_s(self, phase: Phase, num_pairs: int) -> float:
        """The deadline of a request after which this many pairs are in flight."""
        predicted_s = num_pairs * self._measured_s.get(phase, self._reported_s)
        return min(max(self._min_deadline_s, _DEADLINE_FACTOR * predicted_s), _LONGEST_DEADLINE_S)

    def note(self, phase: Phase, s_per_pair: float) -> None:
        """A request has been answered."""
        known = self._measured_s.get(phase, self._reported_s)
        self._measured_s[phase] = known + _RATE_WEIGHT * (s_per_pair - known)

    def note_late(self, phase: Phase) -> None:
        """A request was not answered in time: the next ones get twice as long, up to a limit for a
        daemon that never answers."""
        if self._num_doublings < _MOST_DOUBLINGS:
            self._num_doublings += 1
            self._measured_s[phase] = 2.0 * self._measured_s.get(phase, self._reported_s)

    def forgive(self) -> None:
        """A batch has been answered after trouble: doubling may begin again."""
        self._num_doublings = 0


class Sent(NamedTuple):
    """One request in flight, and the rows of the step that it answers."""

    sequence: int
    num_pairs: int
    rows: SomeRows | None
    """None: all."""
    sent_s: float
    deadline_s: float


class RemoteSession:
    """A session's data path from its first request until it is lost or replaced.

    `opened` is what the handshake agreed on. Used by the data thread. Owns the client.
    """

    def __init__(
        self,
        opened: Session,
        path: DataPath,
        *,
        rates: RateEstimate,
        counters: TransportCounters,
    ) -> None:
        self.opened = opened
        self.limits = Limits(path.max_tokens, opened.welcome.version, path.moved_window)
        self._client = path.client
        self._mail = path.mail
        self._route: MailRoute | None = None
        self._ask_route: AskRoute | None = None
        self._rates = rates
        self._counters = counters
        self._pairs_in_flight = 0
        self._last_sequence = 0
        self._num_bytes_counted = counters.bytes_sent

    def send(
        self, layer_id: int, batch: RoutedBatch, rows: SomeRows | None, *, counted: PhaseStats
    ) -> Sent:
        """Send a request that answers `rows` of the step.

        Raises: DaemonUnavailable.
        """
        client, counters, num_pairs = self._client, self._counters, batch.num_pairs
        self._pairs_in_flight += num_pairs
        deadline_s = self._rates.deadline_s(batch.phase, self._pairs_in_flight)
        # Sending may have to receive replies first, to free slots.
        received_before = counters.bytes_received
        send_before_s, receive_before_s = counters.send_s, counters.receive_s
        sent_s = time.monotonic()
        sequence = self._last_sequence = client.submit(layer_id, batch, deadline_s=deadline_s)
        send_s = counters.send_s - send_before_s
        receive_s = counters.receive_s - receive_before_s
        counted.requests += 1
        counted.tokens += batch.num_tokens
        counted.pairs += num_pairs
        self._count_sent(counted)
        counted.bytes_received += counters.bytes_received - received_before
        counted.pack_s += time.monotonic() - sent_s - send_s - receive_s
        counted.send_s += send_s
        counted.receive_s += receive_s
        return Sent(sequence, num_pairs, rows, sent_s, deadline_s)

    def poll(self, *, until_sent: bool) -> None:
        """Advance copies of devices: see ExpertCompute.poll."""
        if until_sent:
            self._client.push(self._last_sequence)
        else:
            self._client.poll()

    def wait(self, sent: Sent, phase: Phase, counted: PhaseStats) -> Reply:
        """Wait for the reply to a request.

        Raises: DeadlineExceeded; DaemonUnavailable; ProtocolError: see ClientTransport.wait.
        """
        counters = self._counters
        bytes_before, receive_before_s = counters.bytes_received, counters.receive_s
        started_s = time.monotonic()
        # The deadline runs from the sending: the daemon has been at work since then.
        remaining_s = sent.sent_s + sent.deadline_s - started_s
        try:
            reply = self._client.wait(sent.sequence, deadline_s=max(remaining_s, 0.0))
        except DeadlineExceeded:
            self._rates.note_late(phase)
            raise late(sent.deadline_s) from None
        finally:
            ended_s = time.monotonic()
            receive_s = counters.receive_s - receive_before_s
            self._count_sent(counted)  # requests that were sent once their rows were ready
            counted.bytes_received += counters.bytes_received - bytes_before
            counted.receive_s += receive_s
            counted.wait_s += max(0.0, ended_s - started_s - receive_s)
        self._pairs_in_flight -= sent.num_pairs
        counted.round_trips.add(ended_s - sent.sent_s)
        # A reply that arrived in time was computed in time, whatever the daemon reports.
        compute_s = ended_s - sent.sent_s if math.isnan(reply.compute_s) else reply.compute_s
        compute_s = min(max(compute_s, 0.0), sent.deadline_s)
        counted.compute_s += compute_s
        counted.queue_s += min(max(reply.queue_s, 0.0), sent.deadline_s)
        if sent.num_pairs:
            self._rates.note(phase, compute_s / sent.num_pairs)
        return reply

    def forget(self, in_flight: Iterable[Sent]) -> None:
        """Stop waiting for requests."""
        for sent in in_flight:
            self._client.forget(sent.sequence)
            self._pairs_in_flight -= sent.num_pairs

    def mail_route(
        self, link: DaemonLink, owner_index: int, local_ids: LocalIds
    ) -> MailRoute | None:
        """See ExpertCompute.mail_route."""
        tables = local_ids()
        if self._route is not None and not _are_equal(self._route.local_ids, tables):
            self._route = None  # it answers for other experts now
        if self._route is None and self._mail is not None:
            route = MailRoute(
                link.name,
                owner_index,
                self._mail,
                tables,
                is_live=lambda: link.session is self.opened and self._route is route,
                fail=partial(link.mark_lost, self.opened.generation),
            )
            self._route = route
        return self._route

    def ask_route(
        self, owner_index: int, fail: Callable[[LentSlot, int, float], None]
    ) -> AskRoute | None:
        """See ExpertCompute.ask_route; None if this path is not the ring."""
        if self._ask_route is None and isinstance(self._client, SharedClient):
            self._ask_route = AskRoute(owner_index, self._client.lend, self._rates.deadline_s, fail)
        return self._ask_route

    def end_mail(self) -> None:
        """Devices must not ask each other any more."""
        self._mail = self._route = None

    def close(self) -> None:
        """Close the data path. Idempotent."""
        self.end_mail()
        self._client.close()

    def _count_sent(self, counted: PhaseStats) -> None:
        counted.bytes_sent += self._counters.bytes_sent - self._num_bytes_counted
        self._num_bytes_counted = self._counters.bytes_sent


def late(deadline_s: float) -> DeadlineExceeded:
    """The error of a request that was not answered within its deadline."""
    # docs: the daemon was late: overloaded or stopped; see `IPC_DEADLINE_MS`
    return DeadlineExceeded(f"no reply within {deadline_s * 1e3:.0f} ms")


@dataclass(slots=True, eq=False)
class RemoteTicket(Ticket):
    """A batch on its way to a session's daemon, in one request or in pieces."""

    session: RemoteSession
    cut: Cut
    counted: PhaseStats
    started_s: float
    in_flight: deque[Sent] = field(default_factory=deque)
    is_checked: bool = False
    """Whether replies are compared with the parent's own results."""


def _are_equal(one: Mapping[int, I32Array], other: Mapping[int, I32Array]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(ids, other[layer_id]) for layer_id, ids in one.items()
    )
