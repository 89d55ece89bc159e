"""Experts in a daemon: requests over a link's transport, with deadlines from measured rates.

Knows nothing of how the daemon is started or watched; that is the supervisor's work.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import zmq

from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError
from dflash_protocol.ids import F64Array, I32Array, Phase
from dflash_protocol.routed_batch import RoutedBatch, compact_tokens, slice_tokens
from dflash_protocol.transports.zmq_stream import StreamClient, largest_frame_bytes
from dflash_runtime.experts.compute import OwnerKind, OwnerStats, Ticket
from dflash_runtime.experts.link import DaemonLink, Session

_DEADLINE_FACTOR = 4.0
_LONGEST_DEADLINE_S = 600.0
_RATE_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class _Sent:
    """One request in flight: the step's rows it answers (None = all from `first_row` on)."""

    sequence: int
    phase: Phase
    num_pairs: int
    num_rows: int
    first_row: int
    sent_s: float
    deadline_s: float


@dataclass(slots=True, eq=False)
class _RemoteTicket(Ticket):
    generation: int
    rows: I32Array | None
    sent: list[_Sent]


class RemoteExpertCompute:
    """Implements compute.ExpertCompute over a DaemonLink. Used by one thread: the data thread."""

    def __init__(
        self,
        link: DaemonLink,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        hidden_size: int,
        num_experts_used: int,
        min_deadline_s: float,
    ) -> None:
        self._link = link
        self._context = context
        self._hidden_size = hidden_size
        self._num_experts_used = num_experts_used
        self._min_deadline_s = min_deadline_s
        self._client: StreamClient | None = None
        self._client_generation = 0
        self._warm_up_s_per_pair = 0.0
        self._measured_s_per_pair: dict[Phase, float] = {}
        self._pairs_in_flight = 0
        self._stats = OwnerStats(OwnerKind.DAEMON, link.owned.num_experts)

    @property
    def stats(self) -> OwnerStats:
        self._stats.restarts = self._link.restarts
        return self._stats

    def submit(self, layer_id: int, batch: RoutedBatch) -> Ticket:
        session = self._link.session
        if session is None:
            raise DaemonUnavailable(self._link.lost_reason())
        compacted, rows = compact_tokens(batch)
        sent: list[_Sent] = []
        try:
            client = self._client_of(session)
            for first_row, piece in slice_tokens(compacted, session.welcome.max_tokens):
                sent.append(self._send(client, layer_id, first_row, piece))
        except DaemonUnavailable as error:
            self._link.mark_lost(session.generation, str(error))
            raise
        self._stats.requests += len(sent)
        self._stats.tokens += compacted.num_tokens
        self._stats.pairs += batch.num_pairs
        return _RemoteTicket(layer_id, batch, session.generation, rows, sent)

    def collect(self, ticket: Ticket, out: F64Array) -> None:
        assert isinstance(ticket, _RemoteTicket)
        client, generation = self._client, ticket.generation
        if client is None or self._client_generation != generation:
            raise DaemonUnavailable(self._link.lost_reason())
        started_s = time.monotonic()
        try:
            replies = [(sent, self._wait(client, sent)) for sent in ticket.sent]
        except (DaemonUnavailable, ProtocolError) as error:
            self._link.mark_lost(generation, str(error))
            self._drop_client()
            if isinstance(error, DaemonUnavailable):
                raise
            raise DaemonUnavailable(f"daemon {self._link.name}: {error}") from error
        finally:
            self._stats.wait_s += time.monotonic() - started_s
        # Only now, with every piece at hand, so that a failure leaves `out` as it was.
        for sent, sums in replies:
            if ticket.rows is None:
                out[sent.first_row : sent.first_row + sent.num_rows] += sums
            else:
                out[ticket.rows[sent.first_row : sent.first_row + sent.num_rows]] += sums

    def abandon(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _RemoteTicket)
        if self._client is not None and self._client_generation == ticket.generation:
            for sent in ticket.sent:
                self._client.forget(sent.sequence)
                self._pairs_in_flight -= sent.num_pairs

    def close(self) -> None:
        self._drop_client()

    def _send(
        self, client: StreamClient, layer_id: int, first_row: int, piece: RoutedBatch
    ) -> _Sent:
        self._pairs_in_flight += piece.num_pairs
        predicted_s = self._pairs_in_flight * self._s_per_pair(piece.phase)
        deadline_s = max(self._min_deadline_s, _DEADLINE_FACTOR * predicted_s)
        deadline_s = min(deadline_s, _LONGEST_DEADLINE_S)
        before = client.bytes_sent
        sent_s = time.monotonic()
        sequence = client.submit(layer_id, piece, deadline_s=deadline_s)
        self._stats.bytes_sent += client.bytes_sent - before
        return _Sent(
            sequence=sequence,
            phase=piece.phase,
            num_pairs=piece.num_pairs,
            num_rows=piece.num_tokens,
            first_row=first_row,
            sent_s=sent_s,
            deadline_s=deadline_s,
        )

    def _wait(self, client: StreamClient, sent: _Sent) -> F64Array:
        before = client.bytes_received
        # The deadline runs from the sending: the daemon has been at work since then.
        remaining_s = sent.sent_s + sent.deadline_s - time.monotonic()
        try:
            reply = client.wait(sent.sequence, deadline_s=max(remaining_s, 0.0))
        except DeadlineExceeded:
            # Slower than was thought: the next session begins with twice the patience.
            self._measured_s_per_pair[sent.phase] = 2.0 * self._s_per_pair(sent.phase)
            raise DeadlineExceeded(f"no reply within {sent.deadline_s * 1e3:.0f} ms") from None
        self._pairs_in_flight -= sent.num_pairs
        self._stats.bytes_received += client.bytes_received - before
        # What came in time was computed in time, whatever the daemon claims.
        compute_s = min(max(reply.compute_s, 0.0), sent.deadline_s)
        if sent.num_pairs == 0:
            return reply.sums
        measured = compute_s / sent.num_pairs
        known = self._s_per_pair(sent.phase)
        self._measured_s_per_pair[sent.phase] = known + _RATE_WEIGHT * (measured - known)
        return reply.sums

    def _client_of(self, session: Session) -> StreamClient:
        """The data socket of the session; a new session gets a new one, made by this thread."""
        if self._client is None or self._client_generation != session.generation:
            self._drop_client()
            welcome = session.welcome
            self._client = StreamClient(
                self._context,
                session.data_address,
                welcome.link_id,
                hidden_size=self._hidden_size,
                max_frame_bytes=largest_frame_bytes(
                    max_tokens=welcome.max_tokens,
                    hidden_size=self._hidden_size,
                    max_pairs=welcome.max_tokens * self._num_experts_used,
                ),
                lost_fd=self._link.lost_fd,
                lost_reason=self._link.lost_reason,
            )
            self._client_generation = session.generation
            self._pairs_in_flight = 0
            self._warm_up_s_per_pair = 1.0 / welcome.pairs_per_second
        return self._client

    def _s_per_pair(self, phase: Phase) -> float:
        """What was measured, in whichever session, is worth more than a daemon's warm-up."""
        return self._measured_s_per_pair.get(phase, self._warm_up_s_per_pair)

    def _drop_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
