"""Experts in a daemon: requests over a link's transport, with deadlines from measured rates.

A batch goes as several requests, if it must or the execution mode says so; a few of them are in
flight at a time. Knows nothing of how the daemon is started or watched; that is the supervisor's
work.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq

from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError
from dflash_protocol.ids import F64Array, I32Array, Phase
from dflash_protocol.payloads import PayloadType
from dflash_protocol.routed_batch import RoutedBatch, compact_tokens, slice_tokens, tail_tokens
from dflash_protocol.transport import REQUEST_FAILURES, ClientTransport, TransportCounters
from dflash_protocol.transports.shared_memory import SharedClient
from dflash_protocol.transports.zmq_stream import StreamClient, largest_frame_bytes
from dflash_protocol.version1 import rectangles
from dflash_runtime.experts.compute import OwnerKind, OwnerStats, Ticket
from dflash_runtime.experts.link import DaemonLink, Session
from dflash_runtime.experts.modes import STREAM_TOKENS, ExecutionMode, ModeChooser
from dflash_runtime.experts.telemetry import PhaseStats

_DEADLINE_FACTOR = 4.0
_LONGEST_DEADLINE_S = 600.0
_RATE_WEIGHT = 0.2
_WINDOW = 16
"""Requests of one batch that are in flight at a time: as many as the daemon's end holds."""
_PROBE_WINDOW = 4
"""The same while streaming is only tried: what has been sent cannot be called back."""
_MOST_FAILURES = 3
"""So many requests that fail in a row, and the session is given up, to be had again later."""


@dataclass(slots=True)
class _Sent:
    """One request in flight, and the rows of the step that it answers."""

    sequence: int
    num_pairs: int
    rows: slice | I32Array
    sent_s: float
    deadline_s: float


@dataclass(slots=True, eq=False)
class _RemoteTicket(Ticket):
    generation: int
    rows: I32Array | None
    compacted: RoutedBatch
    pieces: Iterator[tuple[slice | I32Array, RoutedBatch]]
    """What is still to be sent."""
    window: int
    chooser: ModeChooser | None
    """To be told what this batch took; None if nobody needs to know."""
    mode: ExecutionMode
    started_s: float
    counted: PhaseStats
    in_flight: deque[_Sent] = field(default_factory=deque)
    num_rows_sent: int = 0
    """Rows of `compacted` that need not be sent any more, while these are sent in order."""


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
        mode: ExecutionMode = ExecutionMode.BATCHED,
        stream_tokens: int = STREAM_TOKENS,
        spin_s: float | None = None,
    ) -> None:
        self._link = link
        self._context = context
        self._hidden_size = hidden_size
        self._num_experts_used = num_experts_used
        self._min_deadline_s = min_deadline_s
        self._mode = mode
        self._stream_tokens = stream_tokens
        self._spin_s = spin_s
        self._choosers: dict[tuple[Phase, int], ModeChooser] = {}
        self._client: ClientTransport | None = None
        self._client_generation = 0
        self._version = 0
        self._max_tokens = 0
        self._warm_up_s_per_pair = 0.0
        self._measured_s_per_pair: dict[Phase, float] = {}
        self._pairs_in_flight = 0
        self._num_failures = 0
        self._counters = TransportCounters()
        self._stats = OwnerStats(OwnerKind.DAEMON, link.owned.num_experts)

    @property
    def stats(self) -> OwnerStats:
        stats, counters = self._stats, self._counters
        stats.restarts = self._link.restarts
        stats.stale = counters.stale
        stats.widened = counters.widened
        phases = stats.phases.values()
        stats.requests = sum(phase.requests for phase in phases)
        stats.tokens = sum(phase.tokens for phase in phases)
        stats.pairs = sum(phase.pairs for phase in phases)
        stats.bytes_sent = sum(phase.bytes_sent for phase in phases)
        stats.bytes_received = sum(phase.bytes_received for phase in phases)
        stats.wait_s = sum(phase.wait_s + phase.receive_s for phase in phases)
        return stats

    def submit(self, layer_id: int, batch: RoutedBatch) -> Ticket:
        session = self._link.session
        if session is None:
            raise DaemonUnavailable(self._link.lost_reason())
        started_s = time.perf_counter()
        compacted, rows = compact_tokens(batch)
        try:
            client = self._client_of(session)
            ticket = self._cut(layer_id, batch, compacted, rows, started_s)
            self._fill(client, ticket)
        except DaemonUnavailable as error:
            self._link.mark_lost(session.generation, str(error))
            raise
        ticket.counted.tokens += compacted.num_tokens
        ticket.counted.pairs += batch.num_pairs
        return ticket

    def collect(self, ticket: Ticket, out: F64Array) -> None:
        assert isinstance(ticket, _RemoteTicket)
        client, generation = self._client, ticket.generation
        if client is None or self._client_generation != generation:
            raise DaemonUnavailable(self._link.lost_reason())
        replies: list[tuple[_Sent, F64Array]] = []
        collecting_s = time.perf_counter()
        try:
            while ticket.in_flight:
                sent = ticket.in_flight[0]
                replies.append((sent, self._wait(client, sent, ticket.batch.phase, ticket.counted)))
                ticket.in_flight.popleft()
                if ticket.window == _PROBE_WINDOW and len(replies) >= _PROBE_WINDOW:
                    num_pairs = sum(answered.num_pairs for answered, _ in replies)
                    self._cut_short(ticket, time.perf_counter() - collecting_s, num_pairs)
                self._fill(client, ticket)
        except (DaemonUnavailable, ProtocolError) as error:
            self._failed(ticket, error)
            if isinstance(error, DaemonUnavailable):
                raise
            raise DaemonUnavailable(f"daemon {self._link.name}: {error}") from error
        self._num_failures = 0
        # Only now, with every piece at hand, so that a failure leaves `out` as it was.
        started_s = time.perf_counter()
        for sent, sums in replies:
            out[sent.rows] += sums
        ended_s = time.perf_counter()
        ticket.counted.combine_s += ended_s - started_s
        if ticket.chooser is not None and ticket.batch.num_pairs:
            ticket.chooser.note(
                ticket.mode,
                elapsed_s=ended_s - ticket.started_s,
                num_pairs=ticket.batch.num_pairs,
            )

    def abandon(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _RemoteTicket)
        if self._client is not None and self._client_generation == ticket.generation:
            for sent in ticket.in_flight:
                self._client.forget(sent.sequence)
                self._pairs_in_flight -= sent.num_pairs

    def close(self) -> None:
        self._drop_client()

    def _cut(
        self,
        layer_id: int,
        batch: RoutedBatch,
        compacted: RoutedBatch,
        rows: I32Array | None,
        started_s: float,
    ) -> _RemoteTicket:
        """A ticket of which nothing is sent yet."""
        mode, chooser = self._mode, None
        window = _WINDOW
        if mode is ExecutionMode.AUTO:
            mode = ExecutionMode.BATCHED
            if compacted.num_tokens > self._stream_tokens and self._version > 1:
                kind = (batch.phase, compacted.num_tokens.bit_length())
                chooser = self._choosers.setdefault(kind, ModeChooser())
                mode = chooser.next_mode()
                if mode is not chooser.favourite:
                    window = _PROBE_WINDOW
        is_cut = mode is ExecutionMode.STREAM
        most = min(self._stream_tokens, self._max_tokens) if is_cut else self._max_tokens
        return _RemoteTicket(
            layer_id=layer_id,
            batch=batch,
            generation=self._client_generation,
            rows=rows,
            compacted=compacted,
            pieces=self._pieces(compacted, rows, most),
            window=window,
            chooser=chooser,
            mode=mode,
            started_s=started_s,
            counted=self._stats.of_phase(batch.phase),
        )

    def _cut_short(self, ticket: _RemoteTicket, elapsed_s: float, num_pairs: int) -> None:
        """Send the rest of a batch at once if streaming it turns out to be much slower."""
        chooser = ticket.chooser
        if chooser is None or ticket.mode is not ExecutionMode.STREAM:
            return
        limit_s = chooser.stream_limit_s()
        if limit_s is None or elapsed_s <= limit_s * num_pairs:
            return
        chooser.note(ExecutionMode.STREAM, elapsed_s=elapsed_s, num_pairs=num_pairs)
        ticket.chooser = None
        ticket.window = _WINDOW
        first = ticket.num_rows_sent
        rest = tail_tokens(ticket.compacted, first)
        rows = None if ticket.rows is None else ticket.rows[first:]
        ticket.pieces = self._pieces(rest, rows, self._max_tokens, first_row=first)

    def _pieces(
        self,
        compacted: RoutedBatch,
        rows: I32Array | None,
        max_tokens: int,
        *,
        first_row: int = 0,
    ) -> Iterator[tuple[slice | I32Array, RoutedBatch]]:
        """Requests to be, with the rows of the step that each answers.

        These are `rows`, or if that is None, all from `first_row` on.
        """
        if self._version == 1:
            return (
                (piece_rows if rows is None else rows[piece_rows], piece)
                for piece_rows, piece in rectangles(compacted, max_tokens)
            )
        num_tokens = compacted.num_tokens
        if num_tokens <= max_tokens:
            span = slice(first_row, first_row + num_tokens)
            return iter(((span if rows is None else rows, compacted),))
        return (
            (
                slice(first_row + first, first_row + first + piece.num_tokens)
                if rows is None
                else rows[first : first + piece.num_tokens],
                piece,
            )
            for first, piece in slice_tokens(compacted, max_tokens)
        )

    def _fill(self, client: ClientTransport, ticket: _RemoteTicket) -> None:
        """Send until the window is full or nothing is left."""
        while len(ticket.in_flight) < ticket.window:
            following = next(ticket.pieces, None)
            if following is None:
                return
            ticket.in_flight.append(self._send(client, ticket, *following))
            ticket.num_rows_sent += following[1].num_tokens

    def _send(
        self,
        client: ClientTransport,
        ticket: _RemoteTicket,
        rows: slice | I32Array,
        piece: RoutedBatch,
    ) -> _Sent:
        self._pairs_in_flight += piece.num_pairs
        predicted_s = self._pairs_in_flight * self._s_per_pair(piece.phase)
        deadline_s = max(self._min_deadline_s, _DEADLINE_FACTOR * predicted_s)
        deadline_s = min(deadline_s, _LONGEST_DEADLINE_S)
        counters, counted = self._counters, ticket.counted
        bytes_before, pack_before_s, send_before_s = (
            client.bytes_sent,
            counters.pack_s,
            counters.send_s,
        )
        sent_s = time.monotonic()
        sequence = client.submit(ticket.layer_id, piece, deadline_s=deadline_s)
        counted.requests += 1
        counted.bytes_sent += client.bytes_sent - bytes_before
        counted.pack_s += counters.pack_s - pack_before_s
        counted.send_s += counters.send_s - send_before_s
        return _Sent(
            sequence=sequence,
            num_pairs=piece.num_pairs,
            rows=rows,
            sent_s=sent_s,
            deadline_s=deadline_s,
        )

    def _wait(
        self, client: ClientTransport, sent: _Sent, phase: Phase, counted: PhaseStats
    ) -> F64Array:
        bytes_before, receive_before_s = client.bytes_received, self._counters.receive_s
        started_s = time.monotonic()
        # The deadline runs from the sending: the daemon has been at work since then.
        remaining_s = sent.sent_s + sent.deadline_s - started_s
        try:
            reply = client.wait(sent.sequence, deadline_s=max(remaining_s, 0.0))
        except DeadlineExceeded:
            # Slower than was thought: the next session begins with twice the patience.
            self._measured_s_per_pair[phase] = 2.0 * self._s_per_pair(phase)
            raise DeadlineExceeded(f"no reply within {sent.deadline_s * 1e3:.0f} ms") from None
        finally:
            ended_s = time.monotonic()
            receive_s = self._counters.receive_s - receive_before_s
            counted.bytes_received += client.bytes_received - bytes_before
            counted.receive_s += receive_s
            counted.wait_s += max(0.0, ended_s - started_s - receive_s)
        self._pairs_in_flight -= sent.num_pairs
        counted.round_trips.add(ended_s - sent.sent_s)
        # What came in time was computed in time, whatever the daemon claims.
        compute_s = ended_s - sent.sent_s if math.isnan(reply.compute_s) else reply.compute_s
        compute_s = min(max(compute_s, 0.0), sent.deadline_s)
        counted.compute_s += compute_s
        counted.queue_s += min(max(reply.queue_s, 0.0), sent.deadline_s)
        if sent.num_pairs:
            known = self._s_per_pair(phase)
            measured = compute_s / sent.num_pairs
            self._measured_s_per_pair[phase] = known + _RATE_WEIGHT * (measured - known)
        return reply.sums

    def _failed(self, ticket: _RemoteTicket, error: DaemonUnavailable | ProtocolError) -> None:
        """Count a failure, and give the session up unless only this request is concerned."""
        code = error.code if isinstance(error, ProtocolError) else ""
        self._stats.checksum_failures += code == "checksum"
        self._stats.deadline_failures += code == "late" or isinstance(error, DeadlineExceeded)
        self._num_failures += 1
        if code in REQUEST_FAILURES and self._num_failures < _MOST_FAILURES:
            self.abandon(ticket)
            self._link.note("request_failed", str(error))
            return
        self._num_failures = 0
        self._link.mark_lost(ticket.generation, str(error))
        self._drop_client()

    def _client_of(self, session: Session) -> ClientTransport:
        """The data socket of the session; a new session gets a new one, made by this thread."""
        if self._client is None or self._client_generation != session.generation:
            self._drop_client()
            welcome = session.welcome
            self._max_tokens = welcome.max_tokens
            self._client = self._make_client(session)
            self._client_generation = session.generation
            self._version = welcome.version
            self._pairs_in_flight = 0
            self._warm_up_s_per_pair = 1.0 / welcome.pairs_per_second
        return self._client

    def _make_client(self, session: Session) -> ClientTransport:
        welcome = session.welcome
        segment = self._link.take_segment(session)
        self._stats.transport = "stream" if segment is None else "shared"
        if segment is not None:
            self._max_tokens = segment.shape.max_tokens
            return SharedClient(
                segment,
                lost_fd=self._link.lost_fd,
                lost_reason=self._link.lost_reason,
                payload=PayloadType(welcome.payload),
                spin_s=self._spin_s,
                counters=self._counters,
            )
        return StreamClient(
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
            generation=welcome.generation,
            payload=PayloadType(welcome.payload),
            version=welcome.version,
            global_ids=self._link.owned.by_layer,
            counters=self._counters,
            secure=self._link.secure,
        )

    def _s_per_pair(self, phase: Phase) -> float:
        """What was measured, in whichever session, is worth more than a daemon's warm-up."""
        return self._measured_s_per_pair.get(phase, self._warm_up_s_per_pair)

    def _drop_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
