"""The parent's data paths: which transports it tries with a daemon, and how each is opened.

All that the parent knows of single transports is here, and in `sharing` what belongs to shared
memory. `plan_paths` reads the settings, `agree` is part of the handshake, in the supervisor's loop,
and `open_data_path` is called by the data thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import zmq

from dflash_adapters.spec import ModelSpec
from dflash_protocol.device_payload import DeviceMover
from dflash_protocol.errors import (
    DaemonUnavailable,
    DeviceUnavailable,
    HandshakeRefused,
    ProtocolError,
)
from dflash_protocol.payloads import PayloadType
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring.segment import Segment
from dflash_protocol.settings import Settings
from dflash_protocol.transports.shared_client import SharedClient
from dflash_protocol.transports.zmq_stream import StreamClient
from dflash_protocol.wire.messages import Attached, Message, Refused, Welcome
from dflash_protocol.wire.requests import largest_frame_bytes
from dflash_protocol.wire.transport import ClientTransport, TransportCounters
from dflash_runtime.compute.backend import ComputeBackend
from dflash_runtime.experts.daemons.link import DaemonLink, Session, SharedMemory
from dflash_runtime.experts.daemons.sharing import (
    Offer,
    OfferFailed,
    SharingPlan,
    make_offer,
    why_not_shared,
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PathPlan:
    """Which data paths a parent tries, besides the socket that every daemon has."""

    sharing: SharingPlan | None = None
    """How to share memory with daemons of this machine; None: no sharing."""
    is_sharing_required: bool = False
    is_mail_required: bool = False
    """A daemon must have a mailbox, through which our device asks its."""


def plan_paths(spec: ModelSpec, settings: Settings, backend: ComputeBackend) -> PathPlan:
    """The plan of an engine; compiles what it needs before any daemon waits for it."""
    return PathPlan(
        _sharing_plan(spec, settings, backend),
        is_sharing_required=settings.ipc_transport in ("shared", "device"),
        is_mail_required=settings.ipc_transport == "device",
    )


def _sharing_plan(
    spec: ModelSpec, settings: Settings, backend: ComputeBackend
) -> SharingPlan | None:
    if settings.ipc_transport == "stream":
        return None
    if ring_native.is_available():
        ring_native.kernels(settings.cache_dir)
    plan = SharingPlan(
        hidden_size=spec.hidden_size,
        num_experts_used=max(layer.num_experts_used for layer in spec.moe.layers),
        max_bytes=settings.ipc_shared_bytes,
        moves=backend.mover is not None,
    )
    if settings.ipc_transport == "shared" or backend.mail is None:
        return plan
    return replace(
        plan,
        mail_bytes=backend.mail.num_bytes(spec.moe),
        begin_mail=partial(
            backend.mail.begin,
            limit_ms=settings.step_limit_ms,
            in_host=settings.mail_memory == "host",
        ),
    )


async def agree(
    plan: PathPlan,
    link: DaemonLink,
    welcome: Welcome,
    *,
    ask: Callable[[Message], Awaitable[Message]],
) -> SharedMemory | None:
    """Share memory with a daemon; None if payloads go through the socket. `ask` sends a message and
    returns the daemon's answer.

    Raises: HandshakeRefused if a path that is required is not possible; whatever `ask` raises.
    """
    if plan.sharing is None:
        return None
    folder = None if link.endpoint.path is None else link.endpoint.path.parent
    reason = why_not_shared(welcome, folder)
    is_surprise = False
    if folder is not None and not reason:
        try:
            offer = await _make_offer(folder, welcome, plan.sharing)
            memory = await _attach(link, offer, ask)
            if not plan.is_mail_required or memory.mails:
                return memory
            memory.segment.close()
            raise HandshakeRefused(
                f"daemon {link.name} cannot have a mailbox with us: each side needs a GPU "
                "that sees shared memory, and payloads in f32"
            )
        except OfferFailed as error:
            reason = str(error)
            is_surprise = True
    if plan.is_sharing_required:
        raise HandshakeRefused(f"daemon {link.name} cannot share memory: {reason}")
    level = logging.WARNING if is_surprise else logging.INFO
    # docs: payloads go through sockets, which is slower. A warning if it was expected to work:
    # look at the run directory's free space
    _LOG.log(level, "daemon %s: no shared memory: %s", link.name, reason)
    return None


async def _attach(
    link: DaemonLink, offer: Offer, ask: Callable[[Message], Awaitable[Message]]
) -> SharedMemory:
    """Have the daemon map an offered segment. Raises: OfferFailed if it refuses; as `ask`."""
    try:
        answer = await ask(offer.message)
        if isinstance(answer, Refused):
            raise OfferFailed(answer.reason)
        if not isinstance(answer, Attached):
            raise ProtocolError(f"daemon {link.name} answered attach with {answer.TYPE}")
        return offer.accepted(answer)
    except BaseException:
        offer.withdraw()
        raise


async def _make_offer(folder: Path, welcome: Welcome, plan: SharingPlan) -> Offer:
    """Make the offer in a thread, as reserving its pages takes a while. Raises: OfferFailed."""
    making = asyncio.ensure_future(asyncio.to_thread(make_offer, folder, welcome, plan))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        # The thread still makes it, and its names must be removed.
        with contextlib.suppress(OfferFailed):
            (await making).withdraw()
        raise


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
    *,
    context: zmq.Context[zmq.Socket[bytes]],
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
