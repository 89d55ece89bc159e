"""The stream transport: payload in ZeroMQ frames, over ipc:// or tcp://.

Parent: a DEALER whose routing id is the link id from the handshake. Daemon: one ROUTER for all
links, owned by the compute thread.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import zmq

from dflash_protocol.batch import RoutedBatch, Sums
from dflash_protocol.endpoint import is_ipv6
from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError
from dflash_protocol.ids import I32Array
from dflash_protocol.payloads import PayloadType
from dflash_protocol.wire import requests, version1
from dflash_protocol.wire.messages import Frames
from dflash_protocol.wire.transport import LinkLimits, ReceivedRequest, Reply, TransportCounters

_QUEUED_REQUESTS = 16
"""High-water mark of a link's requests at the daemon; further ones queue at the parent."""
_DRAIN_S = 1.0
"""How long past its deadline `wait` still reads messages that have arrived already."""
_RECV_S = 0.005
"""Timeout of one blocking read, after which a lost link is noticed. Blocking in recv saves a poll
before each one, which would be the largest cost of a decode step here."""


class _ParentCodec(Protocol):
    """Encodes requests and decodes replies, in one version of the protocol."""

    def encode(
        self, batch: RoutedBatch, *, sequence: int, layer_id: int, deadline_s: float
    ) -> Frames: ...

    def decode(
        self, frames: Sequence[bytes], num_tokens_of: Mapping[int, int]
    ) -> tuple[int, Reply | ProtocolError] | None: ...


class StreamClient:
    """The parent's end of a link over ZeroMQ. Implements ClientTransport; owned by one thread.

    `lost_fd` becomes readable when the supervisor finds the link lost, so that a wait for a dead
    daemon ends before its deadline; `lost_reason` then says why. `generation`, `payload` and
    `version` were negotiated; `global_ids`, by layer and local id, is for version 1 only.
    `counters` are incremented. `secure` sets keys on the socket. `before_sleep` is called before
    each blocking wait.
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
        generation: int = 0,
        payload: PayloadType = PayloadType.F32,
        version: int = 2,
        global_ids: Mapping[int, I32Array] | None = None,
        counters: TransportCounters | None = None,
        secure: Callable[[zmq.Socket[bytes]], object] | None = None,
        before_sleep: Callable[[], object] = lambda: None,
    ) -> None:
        self._before_sleep = before_sleep
        self._lost_reason = lost_reason
        self._sequence = 0
        self._num_tokens: dict[int, int] = {}
        self._arrived: dict[int, Reply | ProtocolError] = {}
        self.counters = TransportCounters() if counters is None else counters
        self._codec: _ParentCodec
        self._is_single: Callable[[bytes], bool] = requests.is_single
        if version == 1:
            self._is_single = lambda frame: False
            self._codec = version1.Version1ParentCodec(
                hidden_size=hidden_size, global_ids=global_ids or {}, counters=self.counters
            )
        else:
            self._codec = requests.ParentCodec(
                hidden_size=hidden_size,
                generation=generation,
                payload=payload,
                counters=self.counters,
            )
        self._socket = context.socket(zmq.DEALER)
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.ROUTING_ID, bytes.fromhex(link_id))
            self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
            self._socket.setsockopt(zmq.RCVTIMEO, int(_RECV_S * 1e3))
            self._socket.setsockopt(zmq.IPV6, is_ipv6(data_address))
            if secure is not None:
                secure(self._socket)
            self._socket.connect(data_address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise DaemonUnavailable(f"cannot reach {data_address}: {error.strerror}") from error
        self._poller = zmq.Poller()
        self._poller.register(lost_fd, zmq.POLLIN)

    def submit(self, layer_id: int, batch: RoutedBatch, *, deadline_s: float) -> int:
        self._sequence += 1
        bytes_before = self.counters.bytes_sent
        frames = self._codec.encode(
            batch, sequence=self._sequence, layer_id=layer_id, deadline_s=deadline_s
        )
        packed_s = time.perf_counter()
        try:
            if len(frames) == 1:
                self._socket.send(frames[0], zmq.NOBLOCK)
            else:
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            self.counters.bytes_sent = bytes_before  # the codec has counted what was not sent
            raise DaemonUnavailable("the daemon's queue is full") from None
        self.counters.send_s += time.perf_counter() - packed_s
        self._num_tokens[self._sequence] = batch.num_tokens
        return self._sequence

    def wait(self, sequence: int, *, deadline_s: float) -> Reply:
        end_s = time.monotonic() + deadline_s
        self._before_sleep()
        while sequence not in self._arrived:
            remaining_s = end_s - time.monotonic()
            if remaining_s > _RECV_S:
                frames = self._received(0)
            elif remaining_s > 0:
                self._socket.poll(math.ceil(remaining_s * 1e3))
                frames = self._received(zmq.NOBLOCK)
            else:
                frames = self._received(zmq.NOBLOCK) if remaining_s > -_DRAIN_S else None
            if frames is not None:
                self._take(frames)
            elif self._poller.poll(0):
                raise DaemonUnavailable(self._lost_reason())
            elif remaining_s <= 0:
                raise DeadlineExceeded(f"no reply within {deadline_s * 1e3:.0f} ms")
        outcome = self._arrived.pop(sequence)
        if isinstance(outcome, ProtocolError):
            raise outcome
        return outcome

    def forget(self, sequence: int) -> None:
        self._num_tokens.pop(sequence, None)
        self._arrived.pop(sequence, None)

    def push(self, sequence: int) -> None:
        """Nothing: `submit` has sent all of it."""

    def poll(self) -> None:
        """Nothing: no device copies to a socket."""

    def close(self) -> None:
        self._socket.close(linger=0)

    def _received(self, flags: int) -> list[bytes] | None:
        try:
            frame = self._socket.recv(flags)
        except zmq.Again:
            return None
        # Reading RCVMORE takes as long as recv, so it is read only if the header announces frames;
        # an unannounced frame is then taken for a message of its own, and found to be damaged.
        if self._is_single(frame):
            return [frame]
        frames = [frame]
        while self._socket.get(zmq.RCVMORE):
            frames.append(self._socket.recv(zmq.NOBLOCK))
        return frames

    def _take(self, message: list[bytes]) -> None:
        """Decode a message; one that answers no pending request is dropped."""
        started_s = time.perf_counter()
        answer = self._codec.decode(message, self._num_tokens)
        if answer is None:
            return
        sequence, outcome = answer
        del self._num_tokens[sequence]
        self._arrived[sequence] = outcome
        self.counters.receive_s += time.perf_counter() - started_s


class StreamServer:
    """The daemon's end of all links over ZeroMQ. Implements ServerTransport.

    Requests come in order of arrival. Owned by the compute thread. `limits_of` returns a link's
    limits by its id, None if there is no such link. `counters` are incremented. `secure`
    sets keys on the socket.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        max_frame_bytes: int,
        limits_of: Callable[[str], LinkLimits | None],
        counters: TransportCounters | None = None,
        secure: Callable[[zmq.Socket[bytes]], object] | None = None,
    ) -> None:
        self._limits_of = limits_of
        self._counters = TransportCounters() if counters is None else counters
        self._timeout_ms = -1
        self.was_empty = False
        """Whether the last `receive` found nothing."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED_REQUESTS)
        self._socket.setsockopt(zmq.IPV6, is_ipv6(address))
        # Let a parent that reconnects take over the routing id of its own dead socket.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if secure is not None:
            secure(self._socket)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise
        self.port = _bound_port(self._socket)
        self._fd = cast(int, self._socket.getsockopt(zmq.FD))

    @property
    def fd(self) -> int:
        """Becomes readable when a message may have arrived since `receive` found nothing."""
        return self._fd

    def receive(self, timeout_s: float) -> ReceivedRequest | None:
        """The next valid request. None after `timeout_s`, or if an invalid one was answered."""
        timeout_ms = math.ceil(timeout_s * 1e3)
        if timeout_ms != self._timeout_ms:
            self._socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
            self._timeout_ms = timeout_ms
        try:
            routing_id = self._socket.recv()
        except zmq.Again:
            self.was_empty = True
            return None
        self.was_empty = False
        frames = [self._socket.recv(zmq.NOBLOCK)]  # a ROUTER always prepends the routing id
        while self._socket.get(zmq.RCVMORE):
            frames.append(self._socket.recv(zmq.NOBLOCK))
        link_id = routing_id.hex()
        limits = self._limits_of(link_id)
        try:
            if not 1 <= len(frames) <= requests.MOST_FRAMES:
                raise ProtocolError(f"a request of {len(frames)} frames")
            if limits is None:
                raise ProtocolError("say hello on the control socket first", code="unknown_link")
            if limits.version == 1:
                header, batch = version1.decode_request(frames, limits)
                return ReceivedRequest(link_id, header, batch)
            header, batch = requests.decode_request(frames, limits)
        except ProtocolError as error:
            if error.code == "checksum":
                self._counters.checksum_failures += 1
            elif error.code == "stale":
                self._counters.stale += 1
            is_version1 = limits is not None and limits.version == 1
            sequence_of = version1.sequence_of if is_version1 else requests.sequence_of
            self.fail(link_id, sequence_of(frames), error)
            return None
        waited_s = limits.arrivals.waited_s(header.sent_s, time.monotonic())
        return ReceivedRequest(link_id, header, batch, waited_s)

    def reply(self, request: ReceivedRequest, sums: Sums, compute_s: float) -> None:
        """Send a request's sums. Shapes: sums [T, H] float64."""
        on_host = sums.to_host()
        limits = self._limits_of(request.link_id)
        if limits is None:
            return  # its parent has closed the link meanwhile
        if limits.version == 1:
            frames = version1.encode_reply(request.header, on_host)
        else:
            frames = requests.encode_reply(
                request.header,
                on_host,
                compute_s=compute_s,
                queue_s=request.waited_s,
                payload=limits.payload,
                counters=self._counters,
            )
        self._send(request.link_id, frames)

    def fail(self, link_id: str, sequence: int, error: ProtocolError) -> None:
        """Send the reason why a request was not computed."""
        limits = self._limits_of(link_id)
        if limits is not None and limits.version == 1:
            frames = version1.encode_failure(sequence, error)
        else:
            generation = 0 if limits is None else limits.generation
            frames = requests.encode_failure(sequence, error, generation=generation)
        self._send(link_id, frames)

    def close(self) -> None:
        self._socket.close(linger=0)

    def _send(self, link_id: str, frames: Frames) -> None:
        # Drop replies that a parent does not read, so that other parents need not wait.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([bytes.fromhex(link_id), *frames], flags=zmq.NOBLOCK)


def _bound_port(socket: zmq.Socket[bytes]) -> int:
    """Port of a bound tcp socket, 0 for ipc."""
    address = cast(bytes, socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
    return int(address.rpartition(":")[2]) if address.startswith("tcp://") else 0
