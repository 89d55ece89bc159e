"""A batch at a daemon: its requests in flight, what is still to be sent, and checks of replies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_protocol.batch import HostSums, RoutedBatch
from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import I32Array
from dflash_protocol.payloads import PayloadType
from dflash_protocol.wire.transport import Reply
from dflash_runtime.experts.compute import Ticket
from dflash_runtime.experts.remote.pieces import Cut
from dflash_runtime.experts.remote.reply_checks import ReplyChecker
from dflash_runtime.experts.remote.session import RemoteSession, Sent
from dflash_runtime.experts.telemetry import PhaseStats


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


def require_finite(ticket: RemoteTicket, sent: Sent, reply: Reply) -> None:
    """Check that a reply is finite wherever its input rows are; NaN in the rows is the model's
    fault.

    Raises: ProtocolError if other rows are NaN or infinite.
    """
    hidden = ticket.rows.to_host()
    if sent.rows is not None:
        hidden = hidden[sent.rows]
    is_good = np.isfinite(hidden).all(axis=1)
    num_wrong = np.count_nonzero(is_good & ~np.isfinite(reply.sums).all(axis=1))
    if num_wrong:
        reason = f"layer {ticket.layer_id}: {num_wrong} rows of a reply are NaN or infinite"
        raise ProtocolError(reason, code="not_finite")


def what_is_wrong(
    ticket: RemoteTicket,
    replies: Sequence[tuple[Sent, Reply]],
    checker: ReplyChecker,
    *,
    global_ids: I32Array,
    payload: PayloadType,
    is_same_class: bool,
) -> str:
    """What is wrong with a batch's replies, compared with the parent's own results; empty if
    nothing is. Shapes: global_ids [E], of the daemon's experts in this layer."""
    started_s = time.perf_counter()
    sums = HostSums(np.zeros(ticket.rows.shape))
    for sent, reply in replies:
        sums.add(reply.placed, sent.rows)
    reason = checker.difference(
        ticket.layer_id,
        RoutedBatch.group(ticket.phase, ticket.rows, ticket.pairs),
        sums.to_host(),
        global_ids=global_ids,
        payload=payload,
        is_same_class=is_same_class,
    )
    checker.schedule.note_reply(time.perf_counter() - started_s)
    return f"layer {ticket.layer_id}: {reason}" if reason else ""
