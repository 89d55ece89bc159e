"""The stream transport: payload in ZeroMQ frames, over ipc:// or tcp://.

Parent: a DEALER whose routing id is the link id that the handshake gave it. Daemon: one ROUTER for
all links, owned by the compute thread. Knows nothing of what is computed.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import zmq

from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError
from dflash_protocol.ids import F64Array
from dflash_protocol.messages import (
    HEADER_LIMIT_BYTES,
    ExpertReply,
    ExpertRequest,
    Frames,
    RequestFailed,
    decode_header,
    decode_reply,
    decode_request,
    encode_header,
    encode_request,
)
from dflash_protocol.routed_batch import RoutedBatch
from dflash_protocol.transport import ReceivedRequest, Reply

_MAX_FRAMES = 8
_QUEUED_REQUESTS = 16
"""Requests of one link that may wait; further ones stay with the parent."""
_DRAIN_MS = 1000.0
"""How long past its deadline a waiter still reads what has arrived already."""


def largest_frame_bytes(*, max_tokens: int, hidden_size: int, max_pairs: int) -> int:
    """No frame of a legal message is longer: hidden, sums, or the routing of `max_pairs` pairs."""
    return max(HEADER_LIMIT_BYTES, 8 * max_tokens * hidden_size, 4 * (3 * max_pairs + 1))


class StreamClient:
    """Implements transport.ClientTransport.

    `lost_fd` becomes readable when the supervisor finds out that the link is lost, so that nobody
    sits out a deadline for a daemon that is known to be dead; `lost_reason` then says why.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        data_address: str,
        link_id: str,
        *,
        hidden_size: int,
        max_frame_bytes: int,
        lost_fd: int,
        lost_reason: Callable[[], str],
    ) -> None:
        self.bytes_sent = 0
        self.bytes_received = 0
        self._hidden_size = hidden_size
        self._lost_fd = lost_fd
        self._lost_reason = lost_reason
        self._sequence = 0
        self._num_tokens: dict[int, int] = {}
        self._arrived: dict[int, Reply | ProtocolError] = {}
        self._socket = context.socket(zmq.DEALER)
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.ROUTING_ID, bytes.fromhex(link_id))
            self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
            self._socket.connect(data_address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise DaemonUnavailable(f"cannot reach {data_address}: {error.strerror}") from error
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(lost_fd, zmq.POLLIN)

    def submit(self, layer_id: int, batch: RoutedBatch, *, deadline_s: float) -> int:
        self._sequence += 1
        frames = encode_request(
            batch, sequence=self._sequence, layer_id=layer_id, deadline_s=deadline_s
        )
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=True)
        except zmq.Again:
            raise DaemonUnavailable("the daemon's queue is full") from None
        self._num_tokens[self._sequence] = batch.num_tokens
        self.bytes_sent += sum(memoryview(frame).nbytes for frame in frames[1:])
        return self._sequence

    def wait(self, sequence: int, *, deadline_s: float) -> Reply:
        end_s = time.monotonic() + deadline_s
        while sequence not in self._arrived:
            remaining_ms = (end_s - time.monotonic()) * 1e3
            ready = dict(self._poller.poll(max(0, math.ceil(remaining_ms))))
            if self._socket in ready and remaining_ms > -_DRAIN_MS:
                self._receive()
            elif self._lost_fd in ready:
                raise DaemonUnavailable(self._lost_reason())
            elif remaining_ms <= 0:
                raise DeadlineExceeded(f"no reply within {deadline_s * 1e3:.0f} ms")
        outcome = self._arrived.pop(sequence)
        if isinstance(outcome, ProtocolError):
            raise outcome
        return outcome

    def forget(self, sequence: int) -> None:
        self._num_tokens.pop(sequence, None)
        self._arrived.pop(sequence, None)

    def close(self) -> None:
        self._socket.close(linger=0)

    def _receive(self) -> None:
        """Take one message; what answers no request of ours is dropped."""
        frames = [memoryview(frame) for frame in self._socket.recv_multipart(zmq.NOBLOCK)]
        header = decode_header(frames[0])
        if not isinstance(header, ExpertReply | RequestFailed):
            raise ProtocolError(f"the daemon sent {header.TYPE} on the data socket")
        num_tokens = self._num_tokens.pop(header.sequence, None)
        if num_tokens is None:
            return
        if isinstance(header, RequestFailed):
            self._arrived[header.sequence] = ProtocolError(header.reason, code=header.code)
            return
        sums = decode_reply(
            header, frames[1:], num_tokens=num_tokens, hidden_size=self._hidden_size
        )
        self.bytes_received += sums.nbytes
        self._arrived[header.sequence] = Reply(sums, header.compute_s)


@dataclass(slots=True)
class LinkLimits:
    """What bounds a link's requests: width of a row, most tokens, most experts of a token."""

    hidden_size: int
    max_tokens: int
    max_experts_used: int


class StreamServer:
    """The daemon's end: all links' requests come in here, one at a time, in order of arrival.

    Owned by the compute thread.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        max_frame_bytes: int,
        limits_of: Callable[[str], LinkLimits | None],
    ) -> None:
        self._limits_of = limits_of
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED_REQUESTS)
        # A parent that reconnects quickly must not find its name taken by its own dead socket.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise
        self.port = _bound_port(self._socket)

    def receive(self, timeout_s: float) -> ReceivedRequest | None:
        """The next good request, or None after `timeout_s`; bad ones are answered here."""
        if not self._socket.poll(math.ceil(timeout_s * 1e3)):
            return None
        routing_id, *message = self._socket.recv_multipart()
        sequence = 0
        try:
            frames = [memoryview(frame) for frame in message]
            if not 1 <= len(frames) <= _MAX_FRAMES:
                raise ProtocolError(f"a request of {len(frames)} frames")
            header = decode_header(frames[0])
            if not isinstance(header, ExpertRequest):
                raise ProtocolError(f"{header.TYPE} does not belong on the data socket")
            sequence = header.sequence
            limits = self._limits_of(routing_id.hex())
            if limits is None:
                raise ProtocolError("say hello on the control socket first", code="unknown_link")
            batch = decode_request(
                header,
                frames[1:],
                hidden_size=limits.hidden_size,
                max_tokens=limits.max_tokens,
                max_experts_used=limits.max_experts_used,
            )
        except ProtocolError as error:
            self.fail(routing_id.hex(), sequence, error)
            return None
        return ReceivedRequest(routing_id.hex(), header, batch)

    def reply(self, request: ReceivedRequest, sums: F64Array, compute_s: float) -> None:
        """Answer a request. Shapes: sums [T, H] float64."""
        header = ExpertReply(request.header.sequence, int(sums.shape[0]), compute_s)
        self._send(request.link_id, [encode_header(header), sums.data])

    def fail(self, link_id: str, sequence: int, error: ProtocolError) -> None:
        """Answer a request that is not computed, with the reason."""
        failure = RequestFailed(sequence, error.code, str(error)[:1000])
        self._send(link_id, [encode_header(failure)])

    def close(self) -> None:
        self._socket.close(linger=0)

    def _send(self, link_id: str, frames: Frames) -> None:
        # A parent that does not read its replies loses them; others must not wait for it.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([bytes.fromhex(link_id), *frames], flags=zmq.NOBLOCK)


def _bound_port(socket: zmq.Socket[bytes]) -> int:
    """Port of a bound tcp socket, 0 for ipc."""
    address = cast(bytes, socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
    return int(address.rpartition(":")[2]) if address.startswith("tcp://") else 0
