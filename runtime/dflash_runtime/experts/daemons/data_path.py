"""The parent's data paths: which transports it tries with a daemon, and how each is opened.

All that the parent knows of single transports is here. `plan_paths` reads the settings; `agree` is
part of the handshake, in the supervisor's loop: to share memory the parent makes a segment, and the
daemon proves that it has mapped it. `open_data_path` is called by the data thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import zmq

from dflash_adapters.spec import ModelSpec
from dflash_protocol.device_payload import DeviceMover
from dflash_protocol.endpoint import Endpoint
from dflash_protocol.errors import (
    DaemonUnavailable,
    DeviceUnavailable,
    HandshakeRefused,
    ProtocolError,
)
from dflash_protocol.payloads import PayloadType
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring.layout import MAX_SLOTS, MOVED_FACTOR, RingShape
from dflash_protocol.ring.segment import MailTerms, Segment, create_segment
from dflash_protocol.settings import Settings
from dflash_protocol.transports.shared_client import SharedClient
from dflash_protocol.transports.zmq_stream import StreamClient
from dflash_protocol.wire.messages import Attach, Attached, Message, Refused, Welcome
from dflash_protocol.wire.requests import largest_frame_bytes
from dflash_protocol.wire.transport import ClientTransport, TransportCounters
from dflash_runtime.compute.backend import ComputeBackend, DeviceMail
from dflash_runtime.experts.daemons.link import DaemonLink, Session, SharedMemory

_LOG = logging.getLogger(__name__)

_DEFAULT_BYTES = 128 << 20
_PROCESSOR_STEPS = 10
"""Times the time limit of a step that a processor may take for one."""
_LONGEST_LIMIT_MS = 60_000
_FEWEST_SLOTS = 2
"""With fewer, a daemon would idle while its last reply is read."""


@dataclass(frozen=True, slots=True)
class SharingPlan:
    """How segments are made. One takes up to 128 MiB, or `max_bytes` if that is more. `moves`: our
    device copies payload by DMA; if the daemon's does too, the whole segment is page-locked."""

    hidden_size: int
    num_experts_used: int
    max_bytes: int
    moves: bool = False
    mail_bytes: int = 0
    """Size of a mailbox; 0 if our device cannot have one."""
    begin_mail: Callable[[Segment, bool], None] = lambda segment, by_processor: None
    """Called with a segment that has a mailbox, and whether a processor of the daemon answers."""

    def shape(self, max_tokens: int, mail_bytes: int = 0) -> RingShape | None:
        """The shape for requests of up to `max_tokens`, or fewer if they do not fit; None if not a
        single token fits.
        """
        while max_tokens >= 1:
            max_pairs = max_tokens * self.num_experts_used
            one = RingShape(1, max_tokens, self.hidden_size, max_pairs)
            slot_bytes = one.request_slot_bytes + one.reply_slot_bytes
            num_slots = min(MAX_SLOTS, max(self.max_bytes, _DEFAULT_BYTES) // slot_bytes)
            if num_slots >= _FEWEST_SLOTS:
                return RingShape(num_slots, max_tokens, self.hidden_size, max_pairs, mail_bytes)
            max_tokens //= 2
        return None


@dataclass(frozen=True, slots=True)
class PathPlan:
    """Which data paths a parent tries, besides the socket that every daemon has."""

    sharing: SharingPlan | None = None
    """How to share memory with daemons of this machine; None: no sharing."""
    is_sharing_required: bool = False
    is_mail_required: bool = False
    """A daemon must have a mailbox, through which our device asks its."""


def may_mail(settings: Settings) -> bool:
    """Whether daemons are asked through mailboxes, where both sides can."""
    return settings.ipc_transport not in ("stream", "shared")


def plan_paths(spec: ModelSpec, settings: Settings, backend: ComputeBackend) -> PathPlan:
    """The plan of an engine; compiles what it needs before any daemon waits for it."""
    if settings.ipc_transport == "stream":
        return PathPlan()
    if ring_native.is_available():
        ring_native.kernels(settings.cache_dir)
        if backend.is_host:
            ring_native.client_functions(settings.cache_dir)
    sharing = SharingPlan(
        hidden_size=spec.hidden_size,
        num_experts_used=max(layer.num_experts_used for layer in spec.moe.layers),
        max_bytes=settings.ipc_shared_bytes,
        moves=backend.mover is not None,
    )
    if may_mail(settings) and backend.mail is not None:
        mail_bytes = backend.mail.num_bytes(spec.moe)
        begin_mail = partial(_begin_mail, backend.mail, settings)
        sharing = replace(sharing, mail_bytes=mail_bytes, begin_mail=begin_mail)
    return PathPlan(
        sharing,
        is_sharing_required=settings.ipc_transport in ("shared", "device"),
        is_mail_required=settings.ipc_transport == "device",
    )


def _begin_mail(mail: DeviceMail, settings: Settings, segment: Segment, by_processor: bool) -> None:
    limit_ms, in_host = settings.step_limit_ms, settings.mail_memory == "host"
    if by_processor:
        limit_ms = min(_PROCESSOR_STEPS * limit_ms, _LONGEST_LIMIT_MS)
    mail.begin(segment, MailTerms(limit_ms, in_host, by_processor))


def is_through_socket(endpoint: Endpoint, settings: Settings) -> bool:
    """Whether payloads to a daemon there go through a socket, as no memory can be shared."""
    is_asked = settings.ipc_transport == "stream"
    return is_asked or endpoint.path is None or not ring_native.is_available()


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
                f"daemon {link.name} cannot have a mailbox with us: we need a GPU that sees "
                "shared memory, it one too or the backend cpu, and payloads in f32"
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
    link: DaemonLink, offer: SegmentOffer, ask: Callable[[Message], Awaitable[Message]]
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


async def _make_offer(folder: Path, welcome: Welcome, plan: SharingPlan) -> SegmentOffer:
    """Make the offer in a thread, as reserving its pages takes a while. Raises: OfferFailed."""
    making = asyncio.ensure_future(asyncio.to_thread(make_offer, folder, welcome, plan))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        # The thread still makes it, and its names must be removed.
        with contextlib.suppress(OfferFailed):
            (await making).withdraw()
        raise


class OfferFailed(Exception):
    """Memory cannot be shared with a daemon; the message says why. The session goes on without."""


class SegmentOffer:
    """A segment that is made for one daemon and not confirmed yet.

    Owns: the segment, until `accepted` returns it or `withdraw` closes it.
    """

    def __init__(self, segment: Segment, link_id: str, *, moves: bool = False) -> None:
        self._segment = segment
        self._link_id = link_id
        self._moves = moves
        self._nonce = segment.write_nonce(is_client=True)

    @property
    def message(self) -> Attach:
        """The message to the daemon."""
        shape = self._segment.shape
        return Attach(
            link_id=self._link_id,
            name=self._segment.name,
            num_slots=shape.num_slots,
            max_tokens=shape.max_tokens,
            max_pairs=shape.max_pairs,
            nonce=self._nonce.hex(),
            moves=self._moves,
            mail_bytes=shape.mail_bytes,
        )

    def accepted(self, answer: Attached) -> SharedMemory:
        """The memory, if the nonce that the daemon says it wrote can be read here.

        Raises: OfferFailed if not.
        """
        written = self._segment.read_nonce(is_client=False).hex().encode()
        is_same = hmac.compare_digest(answer.nonce.encode(), written)
        if answer.link_id != self._link_id or not is_same:
            raise OfferFailed("the daemon mapped other memory than ours")
        self._segment.unlink()
        moves = self._moves and answer.moves
        mails = self._segment.mail_terms is not None and answer.mails
        return SharedMemory(self._segment, moves=moves, mails=mails)

    def withdraw(self) -> None:
        """Close the segment."""
        self._segment.close()


def make_offer(folder: Path, welcome: Welcome, plan: SharingPlan) -> SegmentOffer:
    """Make a segment for a daemon. Raises: OfferFailed if that fails."""
    moves = plan.moves and welcome.can_move
    by_processor = not welcome.can_move
    mails = (moves or by_processor) and welcome.mail_bytes == plan.mail_bytes
    mail_bytes = plan.mail_bytes if mails else 0
    shape = plan.shape(welcome.max_tokens * (MOVED_FACTOR if moves else 1), mail_bytes)
    if shape is None:
        raise OfferFailed(f"{plan.max_bytes} bytes do not hold a single token")
    try:
        segment = create_segment(folder, shape, generation=welcome.generation)
    except DaemonUnavailable as error:
        raise OfferFailed(str(error)) from error
    if mail_bytes:
        try:
            plan.begin_mail(segment, by_processor)
        except BaseException:
            segment.close()
            raise
    return SegmentOffer(segment, welcome.link_id, moves=moves)


def why_not_shared(welcome: Welcome, folder: Path | None) -> str:
    """Why memory cannot be shared; empty if it can be tried."""
    if folder is None:
        return "its endpoint is not a path on this machine"
    if not ring_native.is_available():
        return "numba is missing here"
    return "" if welcome.can_share else "the daemon does not offer it"


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
    counters: TransportCounters,
    *,
    context: zmq.Context[zmq.Socket[bytes]],
    hidden_size: int,
    num_experts_used: int,
    spin_s: float | None = None,
    before_sleep: Callable[[], object] = lambda: None,
    mover: DeviceMover | None = None,
) -> DataPath:
    """Open the data path. Called, like all of the client, on the data thread.

    `before_sleep` is called before this thread sleeps for a daemon's answer; `mover` copies rows
    from the device that they are on, if that device can.
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
                mails = is_wide and memory.mails
                if mails:
                    mails = moves if memory.moves else _has_mail_window(link, segment, mover)
                mail = segment if mails else None
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


def _has_mail_window(link: DaemonLink, segment: Segment, mover: DeviceMover | None) -> bool:
    """Map only the mailbox, in which a processor of the daemon answers; whether that worked."""
    if mover is None:
        return False
    try:
        segment.open_mail_window(mover)
    except DeviceUnavailable as error:
        # docs: the parent's device cannot lock the mailbox's memory (see `doctor`; `ulimit -l`);
        # the host asks the daemon, which is slower
        _LOG.warning("daemon %s: no mailbox: %s", link.name, str(error))
        return False
    return True
