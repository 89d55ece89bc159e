"""A batch at a daemon: what of it was sent, and what is still to be."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from dflash_protocol.ids import I32Array
from dflash_protocol.routed_batch import RoutedBatch
from dflash_runtime.experts.compute import Ticket
from dflash_runtime.experts.modes import ExecutionMode, ModeChooser
from dflash_runtime.experts.pieces import Rows
from dflash_runtime.experts.telemetry import PhaseStats


@dataclass(slots=True)
class Sent:
    """One request in flight, and the rows of the step that it answers."""

    sequence: int
    num_pairs: int
    rows: Rows | None
    """None = all."""
    sent_s: float
    deadline_s: float


@dataclass(slots=True, eq=False)
class RemoteTicket(Ticket):
    """A batch on its way to a session's daemon, in one request or in pieces."""

    generation: int
    rows: I32Array | None
    compacted: RoutedBatch
    pieces: Iterator[tuple[Rows, RoutedBatch]]
    """What is still to be sent."""
    window: int
    chooser: ModeChooser | None
    """To be told what this batch took; None if nobody needs to know."""
    mode: ExecutionMode
    started_s: float
    counted: PhaseStats
    in_flight: deque[Sent] = field(default_factory=deque)
    num_rows_sent: int = 0
    """Rows of `compacted` that need not be sent any more, while these are sent in order."""
    is_whole: bool = False
    """It is one request, and there are no pieces."""
    is_checked: bool = False
    """What comes is compared with what is computed here."""
