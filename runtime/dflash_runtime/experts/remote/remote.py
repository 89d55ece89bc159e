"""Experts in a daemon: requests over a link's transport, with deadlines from measured rates.

A batch is sent as several requests if its size or the execution mode requires; a few of them are in
flight at a time. The supervisor starts and watches daemons.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import zmq

from dflash_protocol.batch import (
    DeviceBatch,
    RoutedBatch,
    Sums,
    add_sums,
    compact_tokens,
    tail_tokens,
)
from dflash_protocol.device_payload import DeviceMover
from dflash_protocol.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    ProtocolError,
    one_line,
)
from dflash_protocol.ids import I32Array, Phase
from dflash_protocol.payloads import PayloadType
from dflash_protocol.ring.segment import Segment
from dflash_protocol.transports.shared_client import SharedClient
from dflash_protocol.wire.transport import (
    REQUEST_FAILURES,
    ClientTransport,
    Reply,
    TransportCounters,
)
from dflash_runtime.compute.backend import MailRoute
from dflash_runtime.experts.compute import OwnerKind, OwnerStats, Ticket
from dflash_runtime.experts.daemons.link import DaemonLink, Session
from dflash_runtime.experts.event_kinds import EventKind
from dflash_runtime.experts.remote.clients import open_data_path
from dflash_runtime.experts.remote.guard import RequestGuard
from dflash_runtime.experts.remote.modes import STREAM_TOKENS, ExecutionMode, ModeChooser
from dflash_runtime.experts.remote.pieces import Rows, pieces
from dflash_runtime.experts.remote.reply_checks import ReplyChecker
from dflash_runtime.experts.remote.ticket import (
    RemoteTicket,
    Sent,
    require_finite,
    what_is_wrong,
)
from dflash_runtime.experts.telemetry import PhaseStats

_DEADLINE_FACTOR = 4.0
_LONGEST_DEADLINE_S = 600.0
_MOST_DOUBLINGS = 4
"""Limit on how often the expected time of a request is doubled while none is answered."""
_RATE_WEIGHT = 0.2
_WINDOW = 16
"""Requests of one batch in flight at a time: as many as the daemon's end holds."""
_NO_PIECES: Iterator[tuple[Rows, RoutedBatch]] = iter(())
_PROBE_WINDOW = 4
"""The window while streaming is probed: requests that were sent cannot be recalled."""


class RemoteExpertCompute:
    """Implements compute.ExpertCompute over a DaemonLink. Used by the data thread, or by several
    threads in turn."""

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
        before_sleep: Callable[[], object] = lambda: None,
        mover: DeviceMover | None = None,
        checker: ReplyChecker | None = None,
    ) -> None:
        """`before_sleep` is called before this thread sleeps for a daemon's answer; `mover` copies
        rows from the device they are on, if it can; `checker` computes what some replies are
        compared with."""
        self._link = link
        self._mover = mover
        self._checker = checker
        self._moved_window = 0
        self._mail: Segment | None = None
        self._route: MailRoute | None = None
        self._context = context
        self._hidden_size = hidden_size
        self._num_experts_used = num_experts_used
        self._min_deadline_s = min_deadline_s
        self._mode = mode
        self._stream_tokens = stream_tokens
        self._spin_s = spin_s
        self._before_sleep = before_sleep
        self._choosers: dict[tuple[Phase, int], ModeChooser] = {}
        self._client: ClientTransport | None = None
        self._client_generation = 0
        self._version = 0
        self._max_tokens = 0
        self._warm_up_s_per_pair = 0.0
        self._measured_s_per_pair: dict[Phase, float] = {}
        self._pairs_in_flight = 0
        self._num_doublings = 0
        self._num_bytes_counted = 0
        """Of those that the client has sent."""
        self._counters = TransportCounters()
        self._stats = OwnerStats(OwnerKind.DAEMON, link.owned.num_experts)
        self._guard = RequestGuard(link, self._stats)

    @property
    def stats(self) -> OwnerStats:
        stats, counters = self._stats, self._counters
        session = self._link.session
        stats.is_lost = session is None
        if session is not None:
            stats.device = one_line(session.welcome.device)
        stats.restarts = self._link.restarts
        breaker = self._guard.breaker
        stats.breaker, stats.breaker_opened = breaker.state.value, breaker.num_opened
        said = self._link.daemon_counters
        stats.daemon_late, stats.daemon_stale = said.late, said.stale
        stats.daemon_checksum_failures = said.checksum_failures
        stats.stale = counters.stale
        stats.widened = counters.widened
        stats.add_up_phases()
        return stats

    @property
    def pairs_per_s(self) -> float:
        session = self._link.session
        return 0.0 if session is None else session.welcome.pairs_per_second

    def submit(self, layer_id: int, batch: RoutedBatch) -> Ticket:
        session = self._link.session
        if session is None:
            self._drop_client()  # no daemon shares its memory any more
            raise DaemonUnavailable(self._link.lost_reason())
        is_probe = self._guard.is_troubled and self._guard.admit()
        started_s = time.perf_counter()
        try:
            client = self._client_of(session)
            compacted, rows = compact_tokens(batch, by_device=self._moved_window > 0)
            ticket = self._cut(layer_id, batch, compacted, rows, started_s)
            if ticket.is_whole:
                ticket.in_flight.append(self._send(client, ticket, rows, compacted))
            else:
                self._fill(client, ticket)
        except DaemonUnavailable as error:
            self._link.mark_lost(session.generation, str(error))
            self._guard.note_failure(error, cost_s=0.0, is_probe=is_probe)
            raise
        except BaseException:
            if is_probe:
                self._guard.breaker.note_probe_abandoned()
            raise
        if is_probe:
            self._guard.begin_probe(ticket)
        if self._checker is not None:
            ticket.is_checked = self._checker.schedule.takes_reply()
        ticket.counted.tokens += compacted.num_tokens
        ticket.counted.pairs += batch.num_pairs
        return ticket

    def collect(self, ticket: Ticket, out: Sums) -> None:
        assert isinstance(ticket, RemoteTicket)
        client, generation = self._client, ticket.generation
        if client is None or self._client_generation != generation:
            reason = self._link.lost_reason()
            if self._guard.is_probe(ticket):
                self._guard.note_failure(DaemonUnavailable(reason), cost_s=0.0, is_probe=True)
            raise DaemonUnavailable(reason)
        replies: list[tuple[Sent, Reply]] = []
        collecting_s = time.perf_counter()
        try:
            while ticket.in_flight:
                sent = ticket.in_flight[0]
                replies.append((sent, self._wait(client, sent, ticket.batch.phase, ticket.counted)))
                ticket.in_flight.popleft()
                if not replies[-1][1].is_finite:
                    require_finite(ticket, *replies[-1])
                if ticket.is_whole:
                    break
                if ticket.window == _PROBE_WINDOW and len(replies) >= _PROBE_WINDOW:
                    num_pairs = sum(answered.num_pairs for answered, _ in replies)
                    self._cut_short(ticket, time.perf_counter() - collecting_s, num_pairs)
                self._fill(client, ticket)
        except (DaemonUnavailable, ProtocolError) as error:
            self._failed(ticket, error, time.perf_counter() - collecting_s)
            if isinstance(error, DaemonUnavailable):
                raise
            raise DaemonUnavailable(f"daemon {self._link.name}: {error}") from error
        if ticket.is_checked and ticket.batch.num_pairs:
            self._check(ticket, replies)
        if self._guard.is_troubled:
            self._num_doublings = 0
            self._guard.note_success(ticket)
        # Only when every piece has arrived, so that a failure leaves `out` unchanged.
        started_s = time.perf_counter()
        for sent, reply in replies:
            add_sums(out, reply.placed, sent.rows)
        ended_s = time.perf_counter()
        ticket.counted.combine_s += ended_s - started_s
        if ticket.chooser is not None and ticket.batch.num_pairs:
            ticket.chooser.note(
                ticket.mode,
                elapsed_s=ended_s - ticket.started_s,
                num_pairs=ticket.batch.num_pairs,
            )

    def push(self, ticket: Ticket) -> None:
        assert isinstance(ticket, RemoteTicket)
        client = self._client
        if isinstance(client, SharedClient) and self._client_generation == ticket.generation:
            for sent in ticket.in_flight:
                client.push(sent.sequence)

    def poll(self) -> None:
        if isinstance(self._client, SharedClient):
            self._client.poll()

    def abandon(self, ticket: Ticket) -> None:
        assert isinstance(ticket, RemoteTicket)
        self._guard.forget(ticket)
        self._forget(ticket)

    def mail_route(self, local_ids: Mapping[int, I32Array]) -> MailRoute | None:
        session = self._link.session
        if session is None or self._guard.is_troubled:
            return None
        try:
            self._client_of(session)
        except DaemonUnavailable:
            return None
        if self._route is None and self._mail is not None:
            generation = session.generation
            self._route = MailRoute(
                self._link.name,
                self._mail,
                local_ids,
                is_live=lambda: self._link.session is session and self._mail is not None,
                fail=partial(self._link.mark_lost, generation),
            )
        return self._route

    def close(self) -> None:
        self._drop_client()
        self._mover = None  # holds device memory
        self._checker = None  # holds the file

    def _forget(self, ticket: RemoteTicket) -> None:
        """Stop waiting for a ticket's requests in flight."""
        if self._client is not None and self._client_generation == ticket.generation:
            for sent in ticket.in_flight:
                self._client.forget(sent.sequence)
                self._pairs_in_flight -= sent.num_pairs

    def _cut(
        self,
        layer_id: int,
        batch: RoutedBatch,
        compacted: RoutedBatch,
        rows: I32Array | None,
        started_s: float,
    ) -> RemoteTicket:
        """A ticket of which nothing has been sent."""
        mode, chooser = self._mode, None
        if batch.phase is Phase.VERIFY:  # few tokens, for which the parent waits layer by layer
            mode = ExecutionMode.BATCHED
        is_moved = self._moved_window > 0 and isinstance(compacted, DeviceBatch)
        # Pieces without a slot are sent while waiting for replies.
        window = self._moved_window if is_moved else _WINDOW
        if mode is ExecutionMode.AUTO:
            mode = ExecutionMode.BATCHED
            is_small = compacted.num_tokens <= self._stream_tokens
            # Devices copy and compute large requests at a higher rate.
            if not is_moved and not is_small and self._version > 1:
                kind = (batch.phase, compacted.num_tokens.bit_length())
                chooser = self._choosers.setdefault(kind, ModeChooser())
                mode = chooser.next_mode()
                if mode is not chooser.favourite:
                    window = _PROBE_WINDOW
        is_cut = mode is ExecutionMode.STREAM
        most = min(self._stream_tokens, self._max_tokens) if is_cut else self._max_tokens
        is_whole = compacted.num_tokens <= most and self._version > 1
        return RemoteTicket(
            layer_id=layer_id,
            batch=batch,
            generation=self._client_generation,
            rows=rows,
            compacted=compacted,
            pieces=_NO_PIECES
            if is_whole
            else pieces(compacted, rows, max_tokens=most, version=self._version),
            window=window,
            chooser=chooser,
            mode=mode,
            started_s=started_s,
            counted=self._stats.of_phase(batch.phase),
            is_whole=is_whole,
        )

    def _cut_short(self, ticket: RemoteTicket, elapsed_s: float, num_pairs: int) -> None:
        """Send the rest of a batch at once if streaming it turns out much slower."""
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
        ticket.pieces = pieces(
            rest, rows, max_tokens=self._max_tokens, version=self._version, first_row=first
        )

    def _fill(self, client: ClientTransport, ticket: RemoteTicket) -> None:
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
        ticket: RemoteTicket,
        rows: Rows | None,
        piece: RoutedBatch,
    ) -> Sent:
        num_pairs = piece.num_pairs
        self._pairs_in_flight += num_pairs
        predicted_s = self._pairs_in_flight * self._s_per_pair(piece.phase)
        deadline_s = max(self._min_deadline_s, _DEADLINE_FACTOR * predicted_s)
        deadline_s = min(deadline_s, _LONGEST_DEADLINE_S)
        counters, counted = self._counters, ticket.counted
        # Sending may have to receive replies first, to free slots.
        received_before = client.bytes_received
        send_before_s, receive_before_s = counters.send_s, counters.receive_s
        sent_s = time.monotonic()
        sequence = client.submit(ticket.layer_id, piece, deadline_s=deadline_s)
        send_s = counters.send_s - send_before_s
        receive_s = counters.receive_s - receive_before_s
        counted.requests += 1
        self._count_sent(client, counted)
        counted.bytes_received += client.bytes_received - received_before
        counted.pack_s += time.monotonic() - sent_s - send_s - receive_s
        counted.send_s += send_s
        counted.receive_s += receive_s
        return Sent(sequence, num_pairs, rows, sent_s, deadline_s)

    def _wait(
        self, client: ClientTransport, sent: Sent, phase: Phase, counted: PhaseStats
    ) -> Reply:
        bytes_before, receive_before_s = client.bytes_received, self._counters.receive_s
        started_s = time.monotonic()
        # The deadline runs from the sending: the daemon has been at work since then.
        remaining_s = sent.sent_s + sent.deadline_s - started_s
        try:
            reply = client.wait(sent.sequence, deadline_s=max(remaining_s, 0.0))
        except DeadlineExceeded:
            # Slower than expected: the next session starts with doubled timeouts, up to a limit for
            # a daemon that never answers.
            if self._num_doublings < _MOST_DOUBLINGS:
                self._num_doublings += 1
                self._measured_s_per_pair[phase] = 2.0 * self._s_per_pair(phase)
            # docs: the daemon was late: overloaded or stopped; see `IPC_DEADLINE_MS`
            raise DeadlineExceeded(f"no reply within {sent.deadline_s * 1e3:.0f} ms") from None
        finally:
            ended_s = time.monotonic()
            receive_s = self._counters.receive_s - receive_before_s
            self._count_sent(client, counted)  # requests that were sent once their rows were ready
            counted.bytes_received += client.bytes_received - bytes_before
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
            known = self._s_per_pair(phase)
            measured = compute_s / sent.num_pairs
            self._measured_s_per_pair[phase] = known + _RATE_WEIGHT * (measured - known)
        return reply

    def _check(self, ticket: RemoteTicket, replies: list[tuple[Sent, Reply]]) -> None:
        """Compare replies with the parent's own results before they are used.

        Raises: DaemonUnavailable if they are wrong; the daemon is then dropped.
        """
        checker, session, link = self._checker, self._link.session, self._link
        if checker is None or session is None or session.generation != ticket.generation:
            return
        self._stats.checked += 1
        reason = what_is_wrong(
            ticket,
            replies,
            checker,
            global_ids=link.owned.by_layer[ticket.layer_id],
            payload=PayloadType(session.welcome.payload),
            # Sums of version 1 were rounded.
            is_same_class=session.welcome.numeric_class == checker.numeric_class
            and self._version > 1,
        )
        if reason:
            self._stats.wrong_replies += 1
            link.give_up(reason)
            self._drop_client()
            self._guard.forget(ticket)
            raise DaemonUnavailable(link.lost_reason())

    def _count_sent(self, client: ClientTransport, counted: PhaseStats) -> None:
        counted.bytes_sent += client.bytes_sent - self._num_bytes_counted
        self._num_bytes_counted = client.bytes_sent

    def _failed(
        self, ticket: RemoteTicket, error: DaemonUnavailable | ProtocolError, cost_s: float
    ) -> None:
        """Count a failure, and end the session unless only this request is affected."""
        code = error.code if isinstance(error, ProtocolError) else ""
        self._stats.checksum_failures += code == "checksum"
        self._stats.not_finite += code == "not_finite"
        self._stats.deadline_failures += code == "late" or isinstance(error, DeadlineExceeded)
        is_probe = self._guard.is_probe(ticket)
        if code in REQUEST_FAILURES and not is_probe:
            self._forget(ticket)
            if code == "not_finite":
                self._mail = self._route = None  # devices must stop asking each other
                self._link.note(EventKind.NOT_FINITE, str(error))
            else:
                self._link.note(EventKind.REQUEST_FAILED, str(error))
        else:
            # If requests keep failing, new memory and a new generation may help.
            self._link.mark_lost(ticket.generation, str(error))
            self._drop_client()
        self._guard.note_failure(error, cost_s=cost_s, is_probe=is_probe)

    def _client_of(self, session: Session) -> ClientTransport:
        """The client of the session's data path; a new session gets a new one, made on this thread.

        Raises: DaemonUnavailable if none can be made.
        """
        if self._client is None or self._client_generation != session.generation:
            self._drop_client()
            path = open_data_path(
                self._link,
                session,
                self._context,
                hidden_size=self._hidden_size,
                num_experts_used=self._num_experts_used,
                spin_s=self._spin_s,
                before_sleep=self._before_sleep,
                counters=self._counters,
                mover=self._mover,
            )
            self._client, self._max_tokens = path.client, path.max_tokens
            self._moved_window = path.moved_window
            self._mail, self._route = path.mail, None
            self._stats.transport = path.transport
            self._client_generation = session.generation
            self._version = session.welcome.version
            self._pairs_in_flight = self._num_bytes_counted = 0
            self._warm_up_s_per_pair = 1.0 / session.welcome.pairs_per_second
        return self._client

    def _s_per_pair(self, phase: Phase) -> float:
        """The measured rate, of any session, rather than the one from a daemon's warm-up."""
        return self._measured_s_per_pair.get(phase, self._warm_up_s_per_pair)

    def _drop_client(self) -> None:
        self._mail = self._route = None
        if self._client is not None:
            self._client.close()
            self._client = None
