"""A batch at a daemon: what was sent, what is still to be sent, and checks of its replies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_protocol.batch import RoutedBatch, add_sums
from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import I32Array
from dflash_protocol.payloads import PayloadType
from dflash_protocol.wire.transport import Reply
from dflash_runtime.experts.compute import Ticket
from dflash_runtime.experts.remote.modes import ExecutionMode, ModeChooser
from dflash_runtime.experts.remote.pieces import Rows
from dflash_runtime.experts.remote.reply_checks import ReplyChecker
from dflash_runtime.experts.telemetry import PhaseStats


@dataclass(slots=True)
class Sent:
    """One request in flight, and the rows of the step that it answers."""

    sequence: int
    num_pairs: int
    rows: Rows | None
    """None: all."""
    sent_s: float
    deadline_s: float


@dataclass(slots=True, eq=False)
class RemoteTicket(Ticket):
    """A batch on its way to a session's daemon, in one request or in pieces."""

    generation: int
    rows: I32Array | None
    compacted: RoutedBatch
    pieces: Iterator[tuple[Rows, RoutedBatch]]
    """Requests still to be sent."""
    window: int
    chooser: ModeChooser | None
    """Told how long this batch took; None if the mode is fixed."""
    mode: ExecutionMode
    started_s: float
    counted: PhaseStats
    in_flight: deque[Sent] = field(default_factory=deque)
    num_rows_sent: int = 0
    """Rows of `compacted` already sent, while they are sent in order."""
    is_whole: bool = False
    """Whether the batch is one request, without pieces."""
    is_checked: bool = False
    """Whether replies are compared with the parent's own results."""


def require_finite(ticket: RemoteTicket, sent: Sent, reply: Reply) -> None:
    """Check that a reply is finite wherever its input rows are; NaN in the rows is the model's
    fault.

    Raises: ProtocolError if other rows are NaN or infinite.
    """
    hidden = ticket.batch.hidden if sent.rows is None else ticket.batch.hidden[sent.rows]
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
    started_s, batch = time.perf_counter(), ticket.batch
    sums = np.zeros(batch.hidden_shape)
    for sent, reply in replies:
        add_sums(sums, reply.sums, sent.rows)
    reason = checker.difference(
        ticket.layer_id,
        batch,
        sums,
        global_ids=global_ids,
        payload=payload,
        is_same_class=is_same_class,
    )
    checker.schedule.note_reply(time.perf_counter() - started_s)
    return f"layer {ticket.layer_id}: {reason}" if reason else ""
