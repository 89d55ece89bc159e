"""The daemon's data paths: what it offers parents, what it accepts, whose request is served next.

All that the daemon knows of single transports is here: `MemoryOffers` is for the control thread,
`DataServers` for the compute thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from dflash_daemon.host import ExpertHost
from dflash_protocol.device_payload import DeviceMover
from dflash_protocol.endpoint import Endpoint
from dflash_protocol.errors import DaemonUnavailable, DeviceUnavailable, ProtocolError
from dflash_protocol.payloads import PayloadType
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring.compiled_experts import CompiledExperts
from dflash_protocol.ring.layout import MOVED_FACTOR, RingShape
from dflash_protocol.ring.segment import Segment, open_segment, sweep_segments
from dflash_protocol.settings import Settings
from dflash_protocol.transports.shared_server import SharedServer
from dflash_protocol.transports.zmq_stream import StreamServer
from dflash_protocol.wire.messages import Attach, Attached, Welcome
from dflash_protocol.wire.transport import (
    LinkLimits,
    ReceivedRequest,
    ServerTransport,
    TransportCounters,
)
from dflash_runtime.compute.backend import MailAnswering, MailService
from dflash_runtime.experts.store import HeldPlacement

_LOG = logging.getLogger(__name__)

_POLL_S = 0.25
_SOCKET_POLL_S = 0.002
"""Interval of polling the socket while rings are busy and the socket has been quiet."""
_RETURN_S = 0.05
"""Longest time for which requests are answered without Python."""
_SOCKET_ACTIVE_S = 0.1
"""For this long after a request through the socket, it is polled at every turn."""

Turn: TypeAlias = tuple[ServerTransport, ReceivedRequest]
"""A request, and the transport that answers it."""


def prepare_shared_folder(endpoint: Endpoint, settings: Settings) -> Path | None:
    """The folder in which parents share memory, after removing what ended processes have left and
    compiling the ring's code; None if no memory is shared."""
    is_possible = settings.ipc_transport != "stream" and ring_native.is_available()
    if endpoint.path is None or not is_possible:
        return None
    ring_native.kernels(settings.cache_dir)  # before a parent waits for it
    with contextlib.suppress(DaemonUnavailable):  # sharing memory will report the error
        sweep_segments(endpoint.path.parent)
    return endpoint.path.parent


class MemoryOffers:
    """Offers parents to share memory, and maps what they attach.

    `folder` is where they make it; None: no memory is shared. `mails`: there may be mailboxes in
    it.
    """

    def __init__(self, host: ExpertHost, folder: Path | None, *, mails: bool) -> None:
        self._host = host
        self._folder = folder
        self._mails = mails

    @property
    def can_mail(self) -> bool:
        """Whether a device or processor here can answer parents through a mailbox."""
        return self._folder is not None and self._answering is not None

    @property
    def _answering(self) -> MailAnswering | None:
        backend = self._host.backend
        sees = backend.is_host or backend.mover is not None
        return backend.answering if self._mails and sees else None

    def offered(self, welcome: Welcome, limits: LinkLimits) -> Welcome:
        """The welcome with what is offered to such a link."""
        return replace(
            welcome,
            can_share=limits.version > 1 and self._folder is not None,
            can_move=self._mover_of(limits) is not None,
            mail_bytes=self._mail_bytes(limits),
        )

    async def accept(
        self,
        attach: Attach,
        limits: LinkLimits | None,
        held_now: Callable[[], HeldPlacement | None],
    ) -> tuple[Segment, Attached]:
        """Map memory that a parent has created for its link; the caller owns it. `held_now` returns
        the link's experts, None once it is dropped.

        Raises: ProtocolError if its sizes are not those negotiated, or it is not the same memory.
        """
        if limits is None or self._folder is None:
            raise ProtocolError("no memory is shared on this link", code="transport")
        mover = self._mover_of(limits) if attach.moves else None
        if attach.max_tokens > limits.max_tokens * (1 if mover is None else MOVED_FACTOR):
            raise ProtocolError("memory for more tokens than negotiated", code="transport")
        if attach.max_pairs > attach.max_tokens * limits.max_experts_used:
            raise ProtocolError("memory for more pairs than its tokens can have", code="transport")
        if attach.mail_bytes and attach.mail_bytes != self._mail_bytes(limits):
            raise ProtocolError("memory for a mailbox of another size", code="transport")
        try:
            shape = RingShape(
                attach.num_slots,
                attach.max_tokens,
                limits.hidden_size,
                attach.max_pairs,
                attach.mail_bytes,
            )
            segment = open_segment(self._folder, attach.name, shape, generation=limits.generation)
        except (ValueError, DaemonUnavailable) as error:
            raise ProtocolError(f"cannot share memory: {error}", code="transport") from error
        with contextlib.ExitStack() as undo:
            undo.callback(segment.close)
            expected = segment.read_nonce(is_client=True).hex().encode()
            if not hmac.compare_digest(expected, attach.nonce.encode()):
                raise ProtocolError("not the memory that the parent has mapped", code="transport")
            nonce = segment.write_nonce(is_client=False)
            moves = mover is not None and await _has_window(segment, mover)
            sees, held, service = moves or self._host.backend.is_host, held_now(), None
            if attach.mail_bytes and sees and held is not None:
                service = self._served(segment, held)
            if service is not None:
                segment.before_close = service.close
            undo.pop_all()
        return segment, Attached(attach.link_id, nonce.hex(), moves, service is not None)

    def _served(self, segment: Segment, held: HeldPlacement) -> MailService | None:
        """Raises: ProtocolError."""
        answering, host = self._answering, self._host
        if answering is None:
            return None
        try:
            return answering.serve(segment, host.spec.moe, held.banks, check=host.poll)
        except Exception as error:  # whatever a device's driver raises
            reason = f"cannot serve a mailbox: {error}"
            raise ProtocolError(reason, code="transport") from error

    def _mail_bytes(self, limits: LinkLimits) -> int:
        """Size of the mailbox of such a link; 0 if it has none."""
        answering = self._answering
        if answering is None or not self._is_exact(limits):
            return 0
        return answering.num_bytes(self._host.spec.moe)

    def _mover_of(self, limits: LinkLimits) -> DeviceMover | None:
        """The device that copies payload of such a link by DMA, if any."""
        return self._host.backend.mover if self._is_exact(limits) else None

    def _is_exact(self, limits: LinkLimits) -> bool:
        """Whether memory is shared on such a link, and nothing is rounded in it."""
        can_share = limits.version > 1 and self._folder is not None
        return can_share and limits.payload is PayloadType.F32


async def _has_window(segment: Segment, mover: DeviceMover) -> bool:
    """Map a segment to our device; False if that fails. Off the loop: pinning pages is slow."""
    try:
        await asyncio.to_thread(segment.open_window, mover)
    except DeviceUnavailable as error:
        # docs: its device cannot lock the shared memory; all else goes on, slower
        _LOG.warning("the CPU copies what a parent sends: %s", str(error))
        return False
    return True


class DataServers:
    """The server of each transport, and the requests of all links, one at a time.

    A turn is one request of each link that has work.

    Within each transport links alternate too: SharedServer is round-robin over rings, ZeroMQ over
    connections. So a link waits for at most a request or two of each other link. After a request
    through a ring this spins on rings for `spin_s`, then calls `before_sleep` and sleeps.

    Made, and told of links, by the control thread; all else is done by the compute thread.
    """

    _socket: StreamServer
    """From `open` on."""

    def __init__(
        self,
        open_socket: Callable[[], StreamServer],
        *,
        shares_memory: bool,
        counters: TransportCounters,
        spin_s: float,
        before_sleep: Callable[[], object],
    ) -> None:
        self._open_socket = open_socket
        self._rings = SharedServer(counters=counters) if shares_memory else None
        self._spin_s = spin_s
        self._before_sleep = before_sleep
        self._socket_turn = _Turn()
        self._socket_polled_s = self._socket_served_s = 0.0

    def open(self) -> int:
        """Bind the data socket and return its port, 0 for ipc. Raises: zmq.ZMQError."""
        self._socket = self._open_socket()
        return self._socket.port

    def attach(
        self,
        link_id: str,
        segment: Segment,
        limits: LinkLimits | None,
        *,
        experts: CompiledExperts | None,
    ) -> None:
        """Serve a link through shared memory too; takes ownership of the segment. Compiled code
        answers the requests for `experts`.

        Raises: ProtocolError if the link is gone, or memory is not shared.
        """
        if limits is None or self._rings is None:
            segment.close()
            raise ProtocolError("no memory is shared on this link", code="transport")
        self._rings.add_link(link_id, segment, limits, experts=experts)

    def set_experts(self, link_id: str, experts: CompiledExperts | None) -> None:
        """Replace the compiled experts of a link, if it shares memory."""
        if self._rings is not None:
            self._rings.set_experts(link_id, experts)

    def allow_replies(self, until_s: float) -> None:
        """Until when compiled code may send sums without the model's file being checked."""
        if self._rings is not None:
            self._rings.allow_replies(until_s)

    @property
    def busy_s(self) -> float:
        """How long compiled code has been computing a request; 0 if it is not."""
        return 0.0 if self._rings is None else self._rings.busy_s

    def drop_link(self, link_id: str) -> None:
        if self._rings is not None:
            self._rings.drop_link(link_id)

    def close(self) -> None:
        self._socket.close()
        if self._rings is not None:
            self._rings.close()

    def until(self, stop: threading.Event) -> Iterator[Turn]:
        """Requests until `stop` is set; each is answered before the next is asked for."""
        if self._rings is not None:
            yield from self._of_both(self._rings, stop)
            return
        while not stop.is_set():
            if (request := self._socket.receive(_POLL_S)) is not None:
                yield self._socket, request

    def _of_both(self, rings: SharedServer, stop: threading.Event) -> Iterator[Turn]:
        socket = self._socket
        others = (socket.fd,)
        is_socket_empty = False
        ring_turn = _Turn()
        while not stop.is_set():
            until_s = self._return_s(is_socket_empty)
            request = rings.receive(0.0, spin_s=self._spin_s, others=others, until_s=until_s)
            if request is not None:
                yield rings, request
            if rings.served:
                is_due = rings.are_others_ready or self._is_socket_due()
                if ring_turn.ends_with(rings.served) and is_due:
                    yield from self._of_socket()
                    is_socket_empty = socket.was_empty
                continue
            ring_turn.end()
            # Polling the socket takes as long as half a ring request. Its descriptor signals only
            # what arrived since the socket was found empty, but is free to wait for while asleep.
            if not is_socket_empty:
                yield from self._of_socket()
                is_socket_empty = socket.was_empty
                continue
            self._before_sleep()
            until_s = self._return_s(is_socket_empty)
            request = rings.receive(_POLL_S, spin_s=0.0, others=others, until_s=until_s)
            if request is not None:
                yield rings, request
            if rings.served:
                ring_turn.ends_with(rings.served)
            is_socket_empty = bool(rings.served) and not rings.are_others_ready

    def _return_s(self, is_socket_empty: bool) -> float:
        """When compiled code is to return between two requests: when the socket is due, which it
        finds out itself from the descriptor of one that is quiet and empty."""
        pause_s = self._socket_pause_s()
        if is_socket_empty and pause_s > 0.0:
            return time.monotonic() + _RETURN_S
        return self._socket_polled_s + pause_s

    def _of_socket(self) -> Iterator[Turn]:
        """The socket's requests of one turn."""
        is_served = False
        while (request := self._socket.receive(0.0)) is not None:
            yield self._socket, request
            is_served = True
            if self._socket_turn.ends_with(request.link_id):
                break
        else:
            self._socket_turn.end()
        self._socket_polled_s = time.monotonic()
        if is_served:
            self._socket_served_s = self._socket_polled_s

    def _is_socket_due(self) -> bool:
        """Whether to poll the socket now: it takes a third of a small request's time, so a quiet
        socket is polled only at intervals."""
        return time.monotonic() - self._socket_polled_s >= self._socket_pause_s()

    def _socket_pause_s(self) -> float:
        is_active = time.monotonic() - self._socket_served_s < _SOCKET_ACTIVE_S
        return 0.0 if is_active else _SOCKET_POLL_S


class _Turn:
    """The links served in the current turn, of rings or of the socket."""

    def __init__(self) -> None:
        self._served: set[str] = set()

    def ends_with(self, link_id: str) -> bool:
        """Record a request; whether it is its link's second, which ends the turn and starts the
        next one."""
        is_second = link_id in self._served
        if is_second:
            self._served.clear()
        self._served.add(link_id)
        return is_second

    def end(self) -> None:
        """End the turn: there is no more work."""
        self._served.clear()
