"""Experts in a daemon: requests over a session's data path, with deadlines from measured rates.

A batch is sent as several requests if its size or the execution mode requires; a few of them are in
flight at a time. The supervisor starts and watches daemons.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dflash_protocol.batch import Hidden, HostSums, Pairs, RoutedBatch, Sums
from dflash_protocol.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    ProtocolError,
    one_line,
)
from dflash_protocol.ids import Phase
from dflash_protocol.numeric_class import is_same_class
from dflash_protocol.payloads import PayloadType
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.transports.lent_slot import LentSlot
from dflash_protocol.wire.transport import REQUEST_FAILURES, Reply, TransportCounters
from dflash_runtime.compute.asking import AskRoute, OwnerTotals
from dflash_runtime.compute.backend import MailRoute
from dflash_runtime.compute.mailbox_layout import is_preparing
from dflash_runtime.experts.compute import LocalIds, Ticket
from dflash_runtime.experts.daemons.data_path import DataPath
from dflash_runtime.experts.daemons.link import DaemonLink, Handover, Session
from dflash_runtime.experts.events import EventKind
from dflash_runtime.experts.remote.breaker import RequestGuard
from dflash_runtime.experts.remote.pieces import STREAM_TOKENS, Cutter, ExecutionMode
from dflash_runtime.experts.remote.reply_checks import ReplyChecker, require_finite
from dflash_runtime.experts.remote.session import (
    RateEstimate,
    RemoteSession,
    RemoteTicket,
    Sent,
    late,
)
from dflash_runtime.experts.telemetry import OwnerKind, OwnerStats


class RemoteExpertCompute:
    """Implements compute.ExpertCompute over a DaemonLink.

    It has a RemoteSession from the first request of a link's session until that is lost. Used by
    the data thread, or by several threads in turn.
    """

    def __init__(
        self,
        link: DaemonLink,
        open_path: Callable[[Session, TransportCounters], DataPath],
        *,
        min_deadline_s: float,
        mode: ExecutionMode = ExecutionMode.BATCHED,
        stream_tokens: int = STREAM_TOKENS,
        checker: ReplyChecker | None = None,
    ) -> None:
        """`open_path` opens a session's data path; `checker` computes what some replies are
        compared with."""
        self._link = link
        self._checker = checker
        self._cutter = Cutter(mode, stream_tokens)
        self._rates = RateEstimate(min_deadline_s)
        self._counters = TransportCounters()
        self._stats = OwnerStats(OwnerKind.DAEMON, link.owned.num_experts)
        self._guard = RequestGuard(link, self._stats)
        self._session: RemoteSession | None = None
        self._open_path: Callable[[Session, TransportCounters], DataPath] | None = open_path

    @property
    def stats(self) -> OwnerStats:
        stats, counters = self._stats, self._counters
        opened = self._link.session
        stats.is_lost = opened is None
        if opened is not None:
            stats.device = one_line(opened.welcome.device)
            stats.numeric_class = one_line(opened.welcome.numeric_class)
        stats.offer = self._link.offer
        stats.restarts = self._link.restarts
        breaker = self._guard.breaker
        stats.breaker, stats.breaker_opened = breaker.state.value, breaker.num_opened
        said = self._link.daemon_counters
        stats.daemon_late, stats.daemon_stale = said.late, said.stale
        stats.daemon_checksum_failures = said.checksum_failures
        is_current = opened is not None and opened.generation == said.generation
        stats.give_back_bytes = said.give_back_bytes if is_current else 0
        stats.spare_bytes = said.spare_bytes if is_current else 0
        stats.stale = counters.stale
        stats.widened = counters.widened
        stats.add_up_phases()
        return stats

    def begin(self, layer_id: int, rows: Hidden, pairs: Pairs, *, phase: Phase) -> Ticket:
        opened = self._link.session
        if opened is None:
            self._drop_session()  # no daemon shares its memory any more
            raise DaemonUnavailable(self._link.lost_reason())
        is_probe = self._guard.is_troubled and self._guard.admit()
        started_s = time.perf_counter()
        try:
            session = self._session_of(opened)
            cut = self._cutter.cut(session.limits, rows, pairs, phase=phase)
            counted = self._stats.of_phase(phase)
            ticket = RemoteTicket(layer_id, phase, rows, pairs, session, cut, counted, started_s)
            if cut.pieces is None:
                batch, used = RoutedBatch.group_used(phase, rows, pairs, whole_from=cut.whole_from)
                ticket.in_flight.append(session.send(layer_id, batch, used, counted=counted))
            else:
                _fill(ticket)
        except DaemonUnavailable as error:
            self._link.mark_lost(opened.generation, str(error))
            self._guard.note_failure(error, cost_s=0.0, is_probe=is_probe)
            raise
        except BaseException:
            if is_probe:
                self._guard.breaker.note_probe_abandoned()
            raise
        if is_probe:
            self._guard.probe = ticket
        if self._checker is not None:
            ticket.is_checked = self._checker.schedule.takes_reply()
        return ticket

    def poll(self, *, until_sent: bool = False) -> None:
        if self._session is not None:
            self._session.poll(until_sent=until_sent)

    def finish(self, ticket: Ticket, out: Sums) -> None:
        assert isinstance(ticket, RemoteTicket)
        session, cut, counted = ticket.session, ticket.cut, ticket.counted
        if session is not self._session:
            reason = self._link.lost_reason()
            if ticket is self._guard.probe:
                self._guard.note_failure(DaemonUnavailable(reason), cost_s=0.0, is_probe=True)
            raise DaemonUnavailable(reason)
        replies: list[tuple[Sent, Reply]] = []
        waiting_s = time.perf_counter()
        try:
            while ticket.in_flight:
                sent = ticket.in_flight[0]
                reply = session.wait(sent, ticket.phase, counted)
                replies.append((sent, reply))
                ticket.in_flight.popleft()
                if not reply.is_finite:
                    require_finite(ticket, sent, reply)
                if cut.pieces is None:
                    break
                if cut.has_enough(len(replies)):
                    cut.end_if_slow(
                        time.perf_counter() - waiting_s,
                        num_pairs=sum(answered.num_pairs for answered, _ in replies),
                        max_tokens=session.limits.max_tokens,
                    )
                _fill(ticket)
        except (DaemonUnavailable, ProtocolError) as error:
            self._failed(session, error, time.perf_counter() - waiting_s, ticket)
            if isinstance(error, DaemonUnavailable):
                raise
            raise DaemonUnavailable(f"daemon {self._link.name}: {error}") from error
        if ticket.is_checked and ticket.pairs.num_pairs:
            self._check(ticket, replies)
        if self._guard.is_troubled:
            self._rates.forgive()
            self._guard.note_success(ticket)
        # Only when every piece has arrived, so that a failure leaves `out` unchanged.
        started_s = time.perf_counter()
        for sent, reply in replies:
            out.add(reply.placed, sent.rows)
        ended_s = time.perf_counter()
        counted.combine_s += ended_s - started_s
        if cut.chooser is not None:
            cut.note(ended_s - ticket.started_s, ticket.pairs.num_pairs)

    def abandon(self, ticket: Ticket) -> None:
        assert isinstance(ticket, RemoteTicket)
        self._guard.forget(ticket)
        self._forget(ticket)

    def mail_route(self, owner_index: int, local_ids: LocalIds) -> MailRoute | None:
        session = self._sound_session()
        return None if session is None else session.mail_route(self._link, owner_index, local_ids)

    def ask_route(self, owner_index: int) -> AskRoute | None:
        session = self._sound_session()
        return None if session is None else session.ask_route(owner_index, self._asked_in_vain)

    def _sound_session(self) -> RemoteSession | None:
        """The session for requests that others make; None if there is none without trouble."""
        opened = self._link.session
        if opened is None or self._guard.is_troubled:
            return None
        try:
            return self._session_of(opened)
        except DaemonUnavailable:
            return None

    def count_asked(self, asked: OwnerTotals, phase: Phase = Phase.DECODE) -> None:
        counted = self._stats.of_phase(phase)
        counted.requests += asked.num_requests
        counted.tokens += asked.num_requests
        counted.pairs += asked.num_pairs
        if not asked.trip_s:
            return  # a device has asked, through the mailbox
        counted.bytes_sent += asked.bytes_sent
        counted.bytes_received += asked.bytes_received
        counted.wait_s += asked.wait_s
        # A reply that arrived in time was computed in time, whatever the daemon reports.
        compute_s = min(max(asked.compute_s, 0.0), asked.trip_s)
        counted.compute_s += compute_s
        counted.queue_s += min(max(asked.queue_s, 0.0), asked.trip_s)
        counted.round_trips.add_mean(asked.trip_s / asked.num_requests, asked.num_requests)
        if asked.num_pairs:
            self._rates.note(Phase.DECODE, compute_s / asked.num_pairs)

    def prepare(self, owned: OwnedExperts) -> PreparedHandover:
        return PreparedHandover(self._link, self._link.prepare(owned), self._take_over)

    def _take_over(self, handover: Handover) -> None:
        self._link.take_over(handover)
        self._drop_session()
        self._stats.num_experts = handover.owned.num_experts

    def close(self) -> None:
        self._drop_session()
        self._open_path = None  # holds device memory
        self._checker = None  # holds the file

    def _forget(self, ticket: RemoteTicket) -> None:
        """Stop waiting for a ticket's requests in flight."""
        if ticket.session is self._session:
            ticket.session.forget(ticket.in_flight)

    def _check(self, ticket: RemoteTicket, replies: list[tuple[Sent, Reply]]) -> None:
        """Compare replies with the parent's own results before they are used.

        Raises: DaemonUnavailable if they are wrong; the daemon is then dropped.
        """
        checker, link, opened = self._checker, self._link, ticket.session.opened
        if checker is None or link.session is not opened:
            return
        welcome, layer_id = opened.welcome, ticket.layer_id
        self._stats.checked += 1
        started_s = time.perf_counter()
        sums = HostSums(np.zeros(ticket.rows.shape))
        for sent, reply in replies:
            sums.add(reply.placed, sent.rows)
        reason = checker.difference(
            layer_id,
            RoutedBatch.group(ticket.phase, ticket.rows, ticket.pairs),
            sums.to_host(),
            global_ids=link.owned.by_layer[layer_id],
            payload=PayloadType(welcome.payload),
            # Sums of version 1 were rounded.
            is_same_class=welcome.version > 1
            and is_same_class(welcome.numeric_class, checker.numeric_class, ticket.phase),
        )
        checker.schedule.note_reply(time.perf_counter() - started_s)
        if reason:
            self._stats.wrong_replies += 1
            link.give_up(f"layer {layer_id}: {reason}")
            self._drop_session()
            self._guard.forget(ticket)
            raise DaemonUnavailable(link.lost_reason())

    def _asked_in_vain(self, slot: LentSlot, status: int, cost_s: float) -> None:
        """A request of compiled code has failed."""
        session, error = self._session, slot.error(status)
        if session is None:
            return
        if isinstance(error, DeadlineExceeded):
            error = late(cost_s)
            self._rates.note_late(Phase.DECODE)
        self._failed(session, error, cost_s)

    def _failed(
        self,
        session: RemoteSession,
        error: DaemonUnavailable | ProtocolError,
        cost_s: float,
        ticket: RemoteTicket | None = None,
    ) -> None:
        """Count a failure, and end the session unless only this request is affected."""
        code = error.code if isinstance(error, ProtocolError) else ""
        self._stats.checksum_failures += code == "checksum"
        self._stats.not_finite += code == "not_finite"
        self._stats.deadline_failures += code == "late" or isinstance(error, DeadlineExceeded)
        is_probe = ticket is not None and ticket is self._guard.probe
        if code in REQUEST_FAILURES and not is_probe:
            if ticket is not None:
                self._forget(ticket)
            if code == "not_finite":
                session.end_mail()
                self._link.note(EventKind.NOT_FINITE, str(error))
            else:
                self._link.note(EventKind.REQUEST_FAILED, str(error))
        else:
            # If requests keep failing, new memory and a new generation may help.
            self._link.mark_lost(session.opened.generation, str(error))
            self._drop_session()
        self._guard.note_failure(error, cost_s=cost_s, is_probe=is_probe)

    def _session_of(self, opened: Session) -> RemoteSession:
        """The present session; a new one gets a new data path, made on this thread.

        Raises: DaemonUnavailable if none can be made.
        """
        session = self._session
        if session is None or session.opened is not opened:
            self._drop_session()
            assert self._open_path is not None  # until it is closed
            path = self._open_path(opened, self._counters)
            self._rates.begin_session(opened.welcome.pairs_per_second)
            self._stats.transport = path.transport
            session = self._session = RemoteSession(
                opened, path, rates=self._rates, counters=self._counters
            )
        return session

    def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


@dataclass(frozen=True, slots=True, eq=False)
class PreparedHandover:
    """Implements compute.PreparedExperts. `take_it`: what the daemon's owner does."""

    link: DaemonLink
    handover: Handover
    take_it: Callable[[Handover], None]

    @property
    def is_ready(self) -> bool:
        handover = self.handover
        if handover.error is not None:
            raise handover.error
        session = handover.session
        if session is None:
            return False
        memory = session.memory  # until its mailbox is ready the host would have to ask
        return memory is None or not memory.mails or not is_preparing(memory.segment)

    def wait(self) -> None:
        self.handover.ready.result()

    def take_over(self) -> None:
        self.take_it(self.handover)

    def withdraw(self) -> None:
        reason = f"daemon {self.link.name}: its other experts are not wanted"
        self.link.end_handover(self.handover, DaemonUnavailable(reason))


def _fill(ticket: RemoteTicket) -> None:
    """Send pieces until the window is full or nothing is left.

    Raises: DaemonUnavailable.
    """
    cut, session = ticket.cut, ticket.session
    while cut.pieces is not None and len(ticket.in_flight) < cut.window:
        piece = next(cut.pieces, None)
        if piece is None:
            return
        rows, batch = piece
        sent = session.send(ticket.layer_id, batch, rows, counted=ticket.counted)
        ticket.in_flight.append(sent)
