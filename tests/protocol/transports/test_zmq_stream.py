"""The stream transport over real ipc and tcp sockets: what `test_transports` does not test of all.

One thread plays both ends: ZeroMQ carries the messages in threads of its own, so a submitted
request waits for `receive` as long as it must.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import zmq

from dflash_protocol.batch import HostSums, RoutedBatch
from dflash_protocol.endpoint import IpcClaim, parse_endpoint
from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError
from dflash_protocol.payloads import PayloadType
from dflash_protocol.transports.zmq_stream import StreamClient, StreamServer
from dflash_protocol.wire.messages import ExpertRequest, Ping, encode_header
from dflash_protocol.wire.requests import ParentCodec, encode_reply, encode_request, seal
from dflash_protocol.wire.transport import LinkLimits, ReceivedRequest, Reply, TransportCounters
from support.routed_batches import HIDDEN_SIZE, assert_same_batch, batch_of

TIMEOUT_S = 20.0
"""Longer than any good message takes on the slowest machine; never waited out."""
PATIENCE_MS = 20_000
CAPACITY = 6
MAX_FRAME_BYTES = 20_000
PAIRS = {(0, 1): 0.5, (1, 1): 0.25, (1, 4): -0.5}

Socket = zmq.Socket[bytes]


def nobody(link_id: str) -> LinkLimits | None:
    """No link is known."""
    return None


class Wire:
    """A server, and clients of links that it knows."""

    def __init__(self, undo: ExitStack, address: str) -> None:
        self._undo = undo
        if address.startswith(
            "ipc:"
        ):  # ZeroMQ leaves its socket files behind; a claim removes them
            undo.callback(IpcClaim(parse_endpoint(address)).close)
        self.context = undo.enter_context(zmq.Context())
        self.links: dict[str, LinkLimits] = {}
        self.counters = TransportCounters()
        self.server = StreamServer(
            self.context,
            address,
            max_frame_bytes=MAX_FRAME_BYTES,
            limits_of=self.links.get,
            counters=self.counters,
        )
        undo.callback(self.server.close)
        self.address = address.replace("*", str(self.server.port))
        self.lost_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        undo.callback(os.close, self.lost_fd)

    def client(
        self,
        *,
        link_id: str | None = None,
        is_known: bool = True,
        payload: PayloadType = PayloadType.F32,
    ) -> StreamClient:
        link_id = link_id or secrets.token_hex(8)
        if is_known:
            self.links[link_id] = LinkLimits(HIDDEN_SIZE, CAPACITY, 8, payload=payload)
        return client_of(
            self._undo, self.context, self.address, self.lost_fd, link_id, payload=payload
        )

    def stranger(self) -> Socket:
        """A socket that may say what no client of ours would."""
        link_id = secrets.token_bytes(8)
        self.links[link_id.hex()] = LinkLimits(HIDDEN_SIZE, CAPACITY, 8)
        socket = self.context.socket(zmq.DEALER)
        self._undo.callback(socket.close, linger=0)
        socket.setsockopt(zmq.ROUTING_ID, link_id)
        socket.connect(self.address)
        return socket

    def receive(self) -> ReceivedRequest:
        """The next good request; bad ones are answered on the way."""
        end_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end_s:
            if (request := self.server.receive(0.05)) is not None:
                return request
        raise AssertionError("no request came")

    def assert_serves_in_turn(self, client: StreamClient) -> None:
        """One good request among those of others, which are dropped."""
        sequence = client.submit(3, batch_of(2, PAIRS), deadline_s=TIMEOUT_S)
        while (request := self.receive()).header.layer_id != 3:
            pass
        self.server.reply(request, HostSums(np.zeros((2, HIDDEN_SIZE))), 0.0)
        client.wait(sequence, deadline_s=TIMEOUT_S)

    def assert_serves(self, client: StreamClient, *, first: int = 1) -> None:
        """One good request, there and back."""
        batch = batch_of(2, PAIRS)
        sequence = client.submit(3, batch, deadline_s=TIMEOUT_S)
        request = self.receive()
        assert_same_batch(request.batch, batch)
        sums = np.full((2, HIDDEN_SIZE), float(first))
        self.server.reply(request, HostSums(sums), 0.5)
        reply = client.wait(sequence, deadline_s=TIMEOUT_S)
        np.testing.assert_array_equal(reply.sums, sums, strict=True)


def client_of(
    undo: ExitStack,
    context: zmq.Context[Socket],
    address: str,
    lost_fd: int,
    link_id: str,
    *,
    payload: PayloadType = PayloadType.F32,
) -> StreamClient:
    client = StreamClient(
        context,
        address,
        link_id,
        hidden_size=HIDDEN_SIZE,
        max_frame_bytes=MAX_FRAME_BYTES,
        lost_fd=lost_fd,
        lost_reason=lambda: "daemon cpu0: it was ended",
        payload=payload,
    )
    undo.callback(client.close)
    return client


@pytest.fixture(params=["ipc", "tcp"])
def wire(request: pytest.FixtureRequest, run_dir: Path) -> Iterator[Wire]:
    address = f"ipc://{run_dir}/data" if request.param == "ipc" else "tcp://127.0.0.1:*"
    with ExitStack() as undo:
        yield Wire(undo, address)


def test_bytes_are_counted_without_headers(wire: Wire) -> None:
    client = wire.client()
    wire.assert_serves(client)
    hidden, routing, weights = 2 * HIDDEN_SIZE * 4, (2 + 3 + 3) * 4, 3 * 4
    assert client.counters.bytes_sent == hidden + routing + weights
    assert client.counters.bytes_received == 2 * HIDDEN_SIZE * 8


def test_a_link_without_a_handshake_is_told_to_say_hello(wire: Wire) -> None:
    client = wire.client(link_id="ab" * 8, is_known=False)
    sequence = client.submit(0, batch_of(2, PAIRS), deadline_s=TIMEOUT_S)
    assert wire.server.receive(TIMEOUT_S) is None
    with pytest.raises(ProtocolError, match="hello") as caught:
        client.wait(sequence, deadline_s=TIMEOUT_S)
    assert caught.value.code == "unknown_link"
    wire.links["ab" * 8] = LinkLimits(HIDDEN_SIZE, CAPACITY, 8)
    wire.assert_serves(client)


def request_of(sequence: int, batch: RoutedBatch) -> list[bytes]:
    frames = encode_request(batch, sequence=sequence, layer_id=0, deadline_s=1.0)
    return [bytes(frame) for frame in frames]


def reply_to(sequence: int, num_tokens: int) -> list[bytes]:
    request = ExpertRequest(sequence, 0, num_tokens, "f32", 1.0)
    sums = np.ones((num_tokens, HIDDEN_SIZE))
    return [bytes(frame) for frame in encode_reply(request, sums, compute_s=0.0)]


def answer_in(frames: list[bytes]) -> tuple[int, Reply | ProtocolError]:
    """What a parent reads in an answer to any of the first hundred requests."""
    codec = ParentCodec(
        hidden_size=HIDDEN_SIZE,
        generation=0,
        payload=PayloadType.F32,
        counters=TransportCounters(),
    )
    answer = codec.decode(frames, dict.fromkeys(range(100), 2))
    assert answer is not None
    return answer


[GOOD] = request_of(7, batch_of(2, PAIRS))
DAMAGED = GOOD[:-1] + bytes([GOOD[-1] ^ 1])


@pytest.mark.parametrize(
    ("frames", "sequence", "code"),
    [
        ([b""], 0, "malformed"),
        ([b"garbage"], 0, "malformed"),
        ([encode_header(Ping(1, "00"))], 0, "malformed"),
        (reply_to(1, 0), 1, "unknown_type"),
        ([DAMAGED], 7, "checksum"),
        ([GOOD[:-1]], 7, "checksum"),
        ([GOOD + b"\0"], 7, "checksum"),
        ([GOOD, b""], 7, "malformed"),
        ([GOOD, GOOD], 7, "checksum"),
        ([GOOD] + [b""] * 8, 7, "malformed"),
        ([b"", GOOD], 0, "malformed"),
        ([b"x"] * 500, 0, "malformed"),
        ([bytes(frame) for frame in seal(1, 7, 1, arrays=(), num_bytes=0)], 7, "stale"),
        ([bytes(frame) for frame in seal(1, 0, 0, arrays=(), num_bytes=0)], 0, "stale"),
    ],
)
def test_a_malformed_request_gets_a_typed_error_and_the_next_good_one_is_served(
    wire: Wire, frames: list[bytes], sequence: int, code: str
) -> None:
    stranger = wire.stranger()
    stranger.send_multipart(frames)
    assert wire.server.receive(TIMEOUT_S) is None
    assert stranger.poll(PATIENCE_MS)
    answered, error = answer_in(stranger.recv_multipart())
    assert isinstance(error, ProtocolError)
    assert (answered, error.code) == (sequence, code)
    assert wire.counters.checksum_failures == (code == "checksum")
    assert wire.counters.stale == (code == "stale")
    wire.assert_serves(wire.client())


def test_a_replayed_request_is_not_served_again(wire: Wire) -> None:
    stranger = wire.stranger()
    for frames in (request_of(7, batch_of(2, PAIRS)), request_of(8, batch_of(2, PAIRS))):
        stranger.send_multipart(frames)
        assert wire.receive().batch.num_pairs == 3
    for replayed in (8, 7, 3):
        stranger.send_multipart(request_of(replayed, batch_of(2, PAIRS)))
        assert wire.server.receive(TIMEOUT_S) is None
        assert stranger.poll(PATIENCE_MS)
        answered, error = answer_in(stranger.recv_multipart())
        assert isinstance(error, ProtocolError)
        assert (answered, error.code) == (replayed, "stale")
    assert wire.counters.stale == 3
    wire.assert_serves(wire.client())


def test_a_request_that_waited_unread_for_longer_than_its_deadline_is_late(wire: Wire) -> None:
    client = wire.client()
    wire.assert_serves(client)  # so that the server knows how their clocks differ
    client.submit(0, batch_of(2, PAIRS), deadline_s=0.05)
    client.submit(0, batch_of(2, PAIRS), deadline_s=TIMEOUT_S)
    time.sleep(0.1)
    late, patient = wire.receive(), wire.receive()
    assert late.is_late
    assert late.waited_s > 0.05
    assert not patient.is_late
    wire.assert_serves(client)


@pytest.mark.parametrize("payload", [PayloadType.F16, PayloadType.BF16])
def test_a_link_may_use_a_narrow_type_in_both_directions(wire: Wire, payload: PayloadType) -> None:
    client = wire.client(payload=payload)
    wire.assert_serves(client)
    assert client.counters.bytes_sent == 2 * HIDDEN_SIZE * 2 + (2 + 3 + 3 + 3) * 4
    assert client.counters.bytes_received == 2 * HIDDEN_SIZE * 2


def test_a_frame_larger_than_any_legal_one_costs_its_sender_the_connection_only(wire: Wire) -> None:
    good = wire.client()
    wire.assert_serves(good)
    stranger = wire.stranger()
    stranger.send_multipart([GOOD, bytes(MAX_FRAME_BYTES + 1)])
    for number in range(3):
        wire.assert_serves(good, first=number)
    assert wire.server.receive(0) is None


def test_a_peer_that_gives_no_name_is_an_unknown_link(wire: Wire) -> None:
    nameless = wire.context.socket(zmq.DEALER)
    try:
        nameless.connect(wire.address)
        nameless.send_multipart(request_of(3, batch_of(2, PAIRS)))
        assert wire.server.receive(TIMEOUT_S) is None
        assert nameless.poll(PATIENCE_MS)
        answered, error = answer_in(nameless.recv_multipart())
    finally:
        nameless.close(linger=0)
    assert isinstance(error, ProtocolError)
    assert (answered, error.code) == (3, "unknown_link")
    wire.assert_serves(wire.client())


def test_a_deadline_holds_although_other_messages_keep_coming(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that nobody asked for, read a second apiece, must not keep a waiter for minutes."""
    client = wire.client()
    sequence = client.submit(0, batch_of(0, {}), deadline_s=TIMEOUT_S)
    request = wire.receive()
    for _ in range(200):
        wire.server.fail(request.link_id, 1_000_000, ProtocolError("?"))
    wire.server.reply(request, HostSums(np.zeros((0, HIDDEN_SIZE))), 0.0)
    seconds = itertools.count()
    with monkeypatch.context() as slow:
        slow.setattr(time, "monotonic", lambda: float(next(seconds)))
        with pytest.raises(DeadlineExceeded):
            client.wait(sequence, deadline_s=10.0)
    assert next(seconds) < 20
    wire.assert_serves(client)


def test_an_address_that_cannot_be_tried_is_unavailable_and_leaks_no_socket() -> None:
    with ExitStack() as undo:
        context = undo.enter_context(zmq.Context())
        with pytest.raises(DaemonUnavailable, match="tcp://no host:1: "):
            client_of(undo, context, "tcp://no host:1", 0, "ab" * 8)


def test_a_parent_cannot_fill_the_servers_memory_with_requests(wire: Wire) -> None:
    """What the server does not take stays with the parent, until its own queue is full too."""
    greedy, modest = wire.client(), wire.client()
    batch = batch_of(CAPACITY, {})

    def submit_many() -> None:
        for _ in range(50_000):
            greedy.submit(0, batch, deadline_s=TIMEOUT_S)

    with pytest.raises(DaemonUnavailable, match="queue"):
        submit_many()
    wire.assert_serves_in_turn(modest)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda n: [b"garbage"], "header"),
        (lambda n: request_of(n, batch_of(2, PAIRS)), r"kind 1\b"),
        (lambda n: reply_to(n, 0), "shape"),
        (lambda n: reply_to(n, 1), "shape"),
        (lambda n: reply_to(n, 3), "shape"),
        (lambda n: [frame[:-8] for frame in reply_to(n, 2)], "damaged"),
    ],
)
def test_a_malformed_answer_is_a_protocol_error(
    run_dir: Path, answer: Callable[[int], list[bytes]], reason: str
) -> None:
    with ExitStack() as undo:
        undo.callback(IpcClaim(parse_endpoint(f"ipc://{run_dir}/data")).close)
        context = undo.enter_context(zmq.Context())
        daemon = context.socket(zmq.ROUTER)
        undo.callback(daemon.close, linger=0)
        daemon.bind(f"ipc://{run_dir}/data")
        lost_fd = os.eventfd(0, os.EFD_CLOEXEC)
        undo.callback(os.close, lost_fd)
        client = client_of(undo, context, f"ipc://{run_dir}/data", lost_fd, "ab" * 8)
        sequence = client.submit(0, batch_of(2, PAIRS), deadline_s=TIMEOUT_S)
        parent, *_ = daemon.recv_multipart()
        daemon.send_multipart([parent, *answer(sequence)])
        with pytest.raises(ProtocolError, match=reason):
            client.wait(sequence, deadline_s=TIMEOUT_S)
        again = client.submit(0, batch_of(2, PAIRS), deadline_s=TIMEOUT_S)
        daemon.send_multipart([parent, *reply_to(again, 2)])
        assert client.wait(again, deadline_s=TIMEOUT_S).sums.sum() == 6.0


def test_a_parent_whose_daemon_takes_nothing_is_told_so(run_dir: Path) -> None:
    with ExitStack() as undo:
        context = undo.enter_context(zmq.Context())
        lost_fd = os.eventfd(0, os.EFD_CLOEXEC)
        undo.callback(os.close, lost_fd)
        client = client_of(undo, context, f"ipc://{run_dir}/nobody", lost_fd, "ab" * 8)
        batch = batch_of(1, {})
        client.submit(0, batch, deadline_s=1.0)
        num_bytes, num_sent = client.counters.bytes_sent, 1

        def submit_many() -> None:
            nonlocal num_sent
            for _ in range(10_000):
                client.submit(0, batch, deadline_s=1.0)
                num_sent += 1

        for _ in range(2):
            with pytest.raises(DaemonUnavailable, match="queue"):
                submit_many()
        assert client.counters.bytes_sent == num_sent * num_bytes


def test_a_parent_that_reads_no_replies_does_not_stop_the_server(wire: Wire) -> None:
    wire.client(link_id="ab" * 8)
    deaf = wire.client(link_id="cd" * 8)
    deaf.submit(0, batch_of(CAPACITY, {}), deadline_s=1.0)
    request = wire.receive()
    sums = np.zeros((CAPACITY, HIDDEN_SIZE))
    for _ in range(5_000):
        wire.server.reply(request, HostSums(sums), 0.0)
    wire.assert_serves(wire.client())


def test_a_parent_that_comes_back_under_its_name_is_served(wire: Wire) -> None:
    """Its old connection may not have been noticed as dead yet."""
    first = wire.client(link_id="ab" * 8)
    wire.assert_serves(first)
    second = wire.client(link_id="ab" * 8)
    wire.assert_serves(second)


def test_closing_does_not_wait_for_what_was_not_delivered(run_dir: Path) -> None:
    address = f"ipc://{run_dir}/data"
    with ExitStack() as undo:
        undo.callback(IpcClaim(parse_endpoint(address)).close)
        context = undo.enter_context(zmq.Context())
        lost_fd = os.eventfd(0, os.EFD_CLOEXEC)
        undo.callback(os.close, lost_fd)
        client = client_of(undo, context, address, lost_fd, "ab" * 8)
        client.submit(0, batch_of(2, PAIRS), deadline_s=1.0)
        client.close()
        server = StreamServer(context, address, max_frame_bytes=MAX_FRAME_BYTES, limits_of=nobody)
        server.fail("cd" * 8, 1, ProtocolError("nobody of that name"))
        assert server.port == 0
        server.close()


def test_only_one_server_can_have_a_tcp_port() -> None:
    with ExitStack() as undo:
        wire = Wire(undo, "tcp://127.0.0.1:*")
        with pytest.raises(zmq.ZMQError, match="in use"):
            StreamServer(wire.context, wire.address, max_frame_bytes=1, limits_of=nobody)
        wire.assert_serves(wire.client())
