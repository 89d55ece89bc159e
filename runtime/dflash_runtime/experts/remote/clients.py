"""The parent's end of a session's data path: shared memory if there is some, else a socket."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from dflash_protocol.device_payload import DeviceMover
from dflash_protocol.errors import DaemonUnavailable, DeviceUnavailable
from dflash_protocol.payloads import PayloadType
from dflash_protocol.ring.segment import Segment
from dflash_protocol.transports.shared_client import SharedClient
from dflash_protocol.transports.zmq_stream import StreamClient, largest_frame_bytes
from dflash_protocol.wire.transport import ClientTransport, TransportCounters
from dflash_runtime.experts.daemons.link import DaemonLink, Session

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DataPath:
    """The holder owns `client`. `transport` is ``shared`` or ``stream``; `max_tokens` is the limit
    of a request. At most `moved_window` requests that devices copy should be in flight; 0 if the
    CPU copies."""

    client: ClientTransport
    transport: str
    max_tokens: int
    moved_window: int = 0
    mail: Segment | None = None
    """The shared memory, owned by `client`, if it has a mailbox."""


def open_data_path(
    link: DaemonLink,
    session: Session,
    context: zmq.Context[zmq.Socket[bytes]],
    *,
    hidden_size: int,
    num_experts_used: int,
    spin_s: float | None,
    before_sleep: Callable[[], object],
    counters: TransportCounters,
    mover: DeviceMover | None = None,
) -> DataPath:
    """Open the data path. Called, like all of the client, on the data thread.

    `mover` copies rows from the device that they are on, if that device can.
    Raises: DaemonUnavailable if the session is over, or no path can be opened, for example for lack
    of descriptors.
    """
    welcome = session.welcome
    payload = PayloadType(welcome.payload)
    with contextlib.ExitStack() as undo:
        segment, memory = link.take_segment(session), session.memory
        if segment is not None:
            undo.callback(segment.close)
        try:
            if segment is not None and memory is not None:
                is_wide = payload is PayloadType.F32
                moves = is_wide and memory.moves and _has_window(link, segment, mover)
                shared = SharedClient(
                    segment,
                    lost_fd=link.lost_fd,
                    lost_reason=link.lost_reason,
                    payload=payload,
                    spin_s=spin_s,
                    counters=counters,
                    before_sleep=before_sleep,
                )
                undo.pop_all()
                max_tokens = segment.shape.max_tokens
                if not memory.moves:
                    max_tokens = min(max_tokens, welcome.max_tokens)
                window = segment.shape.num_slots if moves else 0
                mail = segment if moves and memory.mails else None
                return DataPath(shared, "shared", max_tokens, window, mail)
            stream = StreamClient(
                context,
                session.data_address,
                welcome.link_id,
                hidden_size=hidden_size,
                max_frame_bytes=largest_frame_bytes(
                    max_tokens=welcome.max_tokens,
                    hidden_size=hidden_size,
                    max_pairs=welcome.max_tokens * num_experts_used,
                ),
                lost_fd=link.lost_fd,
                lost_reason=link.lost_reason,
                generation=welcome.generation,
                payload=payload,
                version=welcome.version,
                global_ids=link.owned.by_layer,
                counters=counters,
                secure=link.secure,
                before_sleep=before_sleep,
            )
            return DataPath(stream, "stream", welcome.max_tokens)
        except (OSError, zmq.ZMQError) as error:
            raise DaemonUnavailable(
                f"daemon {link.name}: no way to send requests: {error.strerror}"
            ) from error


def _has_window(link: DaemonLink, segment: Segment, mover: DeviceMover | None) -> bool:
    """Map the memory, which the other side's device sees, for ours; whether that worked."""
    if mover is None:
        return False
    try:
        segment.open_window(mover)
    except DeviceUnavailable as error:
        # docs: its device cannot lock the shared memory (the run directory is on a disk, see
        # `doctor`; `ulimit -l`; the driver's own limits); all else goes on, slower
        _LOG.warning("daemon %s: the CPU copies what is sent: %s", link.name, str(error))
        return False
    return True
