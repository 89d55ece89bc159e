"""Times requests to a daemon that is asked through a socket, before it has experts.

A daemon answers a request of a link that it does not know with a failure of code ``unknown_link``,
by the same socket and in the same thread as one that it computes: so it needs no handshake, and
nothing is computed. Rings are not timed: without experts they are not answered as with some.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from statistics import median

import numpy as np
import zmq

from dflash_protocol.batch import HostHidden, Pairs, RoutedBatch
from dflash_protocol.errors import DeadlineExceeded, DflashError, ProtocolError
from dflash_protocol.ids import Phase
from dflash_protocol.payloads import PayloadType
from dflash_protocol.transports.zmq_stream import StreamClient
from dflash_protocol.wire.messages import HEADER_LIMIT_BYTES
from dflash_runtime.experts.daemons.link import DaemonLink
from dflash_runtime.placement.box import Curve, LinkSpeed

_LOG = logging.getLogger(__name__)

LIMIT_S = 0.3
"""The longest that one daemon is timed; half of it is for single rows."""
MOST_ROWS = 64
_NUM_STEPS = 5
_NUM_CHUNKS = 3
BYTES_PER_S = 5e9
"""Payload through memory of this machine, where it was not measured; no socket is faster."""


def _row_bytes(payload: PayloadType, hidden_size: int) -> tuple[int, int]:
    """Bytes of a row on its way to a daemon, and of its sum on the way back."""
    back = PayloadType.F64 if payload is PayloadType.F32 else payload
    return payload.num_bytes * hidden_size, back.num_bytes * hidden_size


def timed_link(
    context: zmq.Context[zmq.Socket[bytes]],
    link: DaemonLink,
    *,
    hidden_size: int,
    payload: PayloadType,
    max_rows: int,
) -> LinkSpeed | None:
    """What asking a daemon costs that has made its offer, in at most LIMIT_S.

    The failures that come back are small: sums are taken to travel as fast as rows. Rows that do
    not come back in time take at least as long as they were waited for. None if the daemon has not
    answered, or an older one has not said where.
    """
    offer, num_rows = link.offer, min(MOST_ROWS, max_rows)
    if offer is None or (link.endpoint.path is None and not offer.data_port):
        return None
    steps, chunks = list[float](), list[float]()
    end_s = begun_s = time.monotonic() + LIMIT_S
    try:
        client = StreamClient(
            context,
            link.endpoint.data_address(offer.data_port),
            secrets.token_hex(8),
            hidden_size=hidden_size,
            max_frame_bytes=HEADER_LIMIT_BYTES,
            lost_fd=link.lost_fd,
            lost_reason=link.lost_reason,
            payload=payload,
            secure=link.secure,
        )
        with contextlib.closing(client):
            _ask(client, _rows(1, hidden_size), end_s)  # which connects
            while not steps or (len(steps) < _NUM_STEPS and time.monotonic() < end_s - LIMIT_S / 2):
                steps.append(_ask(client, _rows(1, hidden_size), end_s))
            rows = _rows(num_rows, hidden_size)
            while len(chunks) < _NUM_CHUNKS:
                begun_s = time.monotonic()
                chunks.append(_ask(client, rows, end_s))
    except DeadlineExceeded as error:
        if not steps:
            _note_untimed(link, error)
            return None
        chunks = chunks or [time.monotonic() - begun_s]
    except DflashError as error:
        _note_untimed(link, error)
        return None
    there, back = _row_bytes(payload, hidden_size)
    step_s = median(steps)
    seconds = (median(chunks) - step_s) * (there + back) / there
    chunk_s = step_s + max(seconds, num_rows * (there + back) / BYTES_PER_S)
    # docs: what a request to this daemon takes beyond computing, as the placement is planned with
    _LOG.info(
        "daemon %s: a request takes %.0f us, with %d rows %.0f us",
        *(link.name, step_s * 1e6, num_rows, chunk_s * 1e6),
    )
    chunk = Curve(((1.0, step_s), (float(max(2, num_rows)), chunk_s)))
    return LinkSpeed(link.name, Curve(((1.0, step_s),)), chunk)


def _note_untimed(link: DaemonLink, error: DflashError) -> None:
    # docs: it does not answer requests yet, or is far away: the placement is planned as if it were
    # on this machine
    _LOG.info("daemon %s: its link was not timed: %s", link.name, error)


def _rows(num_rows: int, hidden_size: int) -> RoutedBatch:
    """Rows without pairs."""
    pairs = Pairs(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))
    hidden = HostHidden(np.zeros((num_rows, hidden_size), np.float32))
    return RoutedBatch.group(Phase.DECODE, hidden, pairs)


def _ask(client: StreamClient, batch: RoutedBatch, end_s: float) -> float:
    """Seconds of a request. Raises: DaemonUnavailable; ProtocolError of another answer."""
    begun_s = time.monotonic()
    limit_s = max(0.0, end_s - begun_s)
    try:
        client.wait(client.submit(0, batch, deadline_s=limit_s), deadline_s=limit_s)
    except ProtocolError as error:
        if error.code != "unknown_link":
            raise
    return time.monotonic() - begun_s
