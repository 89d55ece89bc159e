"""Every transport passes the same checks; the shared one also with its server in a real process."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from dflash_protocol.batch import HostSums, Sums
from dflash_protocol.endpoint import IpcClaim, parse_endpoint
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import create_segment, open_segment
from dflash_protocol.transports.shared_client import SharedClient
from dflash_protocol.transports.shared_server import SharedServer
from dflash_protocol.transports.zmq_stream import StreamClient, StreamServer
from dflash_protocol.wire.requests import largest_frame_bytes
from dflash_protocol.wire.transport import (
    ClientTransport,
    LinkLimits,
    ReceivedRequest,
    ServerTransport,
)
from support.descriptors import no_descriptor_leak
from support.processes import environment
from support.transport_checks import (
    CHECKS,
    HIDDEN_SIZE,
    LOST_REASON,
    MAX_EXPERTS_USED,
    MAX_TOKENS,
    NUM_IN_FLIGHT,
    TransportPair,
    assert_serves,
    example_batch,
    sums_of,
)


def limits() -> LinkLimits:
    """Of a link of its own."""
    return LinkLimits(HIDDEN_SIZE, MAX_TOKENS, MAX_EXPERTS_USED, generation=3)


SHAPE = RingShape(NUM_IN_FLIGHT, MAX_TOKENS, HIDDEN_SIZE, MAX_TOKENS * MAX_EXPERTS_USED)
FRAME_BYTES = largest_frame_bytes(
    max_tokens=2 * MAX_TOKENS, hidden_size=HIDDEN_SIZE, max_pairs=2 * MAX_TOKENS * MAX_EXPERTS_USED
)


class Pair(ABC):
    """Implements transport_checks.TransportPair."""

    server: ServerTransport

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._num_links = 0
        self.lost_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._undo.callback(os.close, self.lost_fd)

    def connect(self) -> ClientTransport:
        self._num_links += 1
        client = self.linked(link_id(self._num_links))
        self._undo.callback(client.close)
        return client

    @abstractmethod
    def linked(self, link_id: str) -> ClientTransport: ...

    @abstractmethod
    def drop(self) -> None: ...

    def lose(self) -> None:
        os.eventfd_write(self.lost_fd, 1)

    def close(self) -> None:
        self._undo.close()


def link_id(number: int) -> str:
    return f"{number:02x}" * 8


class StreamPair(Pair):
    def __init__(self, address: str) -> None:
        super().__init__()
        if address.startswith("ipc:"):
            self._undo.callback(IpcClaim(parse_endpoint(address)).close)
        self._context = self._undo.enter_context(zmq.Context())
        self._links: dict[str, LinkLimits] = {}
        server = StreamServer(
            self._context, address, max_frame_bytes=FRAME_BYTES, limits_of=self._links.get
        )
        self._undo.callback(server.close)
        self._address = address.replace("*", str(server.port))
        self.server = server
        self.client = self.connect()

    def linked(self, link_id: str) -> StreamClient:
        self._links[link_id] = limits()
        return StreamClient(
            self._context,
            self._address,
            link_id,
            hidden_size=HIDDEN_SIZE,
            max_frame_bytes=FRAME_BYTES,
            lost_fd=self.lost_fd,
            lost_reason=lambda: LOST_REASON,
            generation=3,
        )

    def drop(self) -> None:
        del self._links[link_id(1)]


class SpinningServer(SharedServer):
    """A server that spins before it sleeps."""

    spin_s = 0.0

    def receive(
        self,
        timeout_s: float,
        *,
        spin_s: float = 0.0,
        others: tuple[int, ...] = (),
        until_s: float = 0.0,
    ) -> ReceivedRequest | None:
        return super().receive(timeout_s, spin_s=self.spin_s, others=others, until_s=until_s)


class SharedPair(Pair):
    make_server = SpinningServer

    def __init__(self, folder: Path, spin_s: float) -> None:
        super().__init__()
        self._folder, self._spin_s = folder, spin_s
        self.server = self._rings = self.make_server()
        self._rings.spin_s = spin_s
        self._undo.callback(self._rings.close)
        self.client = self.connect()

    def linked(self, link_id: str) -> SharedClient:
        segment = create_segment(self._folder, SHAPE, generation=3)
        opened = open_segment(self._folder, segment.name, SHAPE, generation=3)
        segment.unlink()
        self._rings.add_link(link_id, opened, limits())
        return SharedClient(
            segment,
            lost_fd=self.lost_fd,
            lost_reason=lambda: LOST_REASON,
            spin_s=self._spin_s,
        )

    def drop(self) -> None:
        self._rings.drop_link(link_id(1))


MAKERS: dict[str, Callable[[Path], TransportPair]] = {
    "stream, ipc": lambda folder: StreamPair(f"ipc://{folder}/{secrets.token_hex(4)}"),
    "stream, tcp": lambda folder: StreamPair("tcp://127.0.0.1:*"),
    "shared, spinning": lambda folder: SharedPair(folder, 200e-6),
    "shared, blocking": lambda folder: SharedPair(folder, 0.0),
}


@pytest.fixture
def pair(maker: str, run_dir: Path) -> Iterator[TransportPair]:
    made = MAKERS[maker](run_dir)
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_transport_keeps_what_all_of_them_promise(check: str, pair: TransportPair) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("maker", MAKERS)
def test_closing_releases_all_descriptors(maker: str, run_dir: Path) -> None:
    """Also with requests in flight."""
    with no_descriptor_leak():
        pair = MAKERS[maker](run_dir)
        assert_serves(pair)
        for _ in range(2):
            pair.client.submit(0, example_batch(1), deadline_s=9.0)
        pair.close()


def test_a_check_notices_wrong_sums(run_dir: Path) -> None:
    class Liar(SpinningServer):
        def reply(self, request: ReceivedRequest, sums: Sums, compute_s: float) -> None:
            super().reply(request, HostSums(sums.to_host() + 1.0), compute_s)

    class LyingPair(SharedPair):
        make_server = Liar

    pair = LyingPair(run_dir, 0.0)
    with pytest.raises(AssertionError, match="other bits"):
        CHECKS["echo"](pair)
    pair.close()


SERVER = """
import sys
from pathlib import Path
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import open_segment
from support.transport_checks import *
from dflash_protocol.wire.transport import LinkLimits
from dflash_protocol.transports.shared_server import SharedServer
limits = LinkLimits(HIDDEN_SIZE, MAX_TOKENS, MAX_EXPERTS_USED, generation=3)
shape = RingShape(NUM_IN_FLIGHT, MAX_TOKENS, HIDDEN_SIZE, MAX_TOKENS * MAX_EXPERTS_USED)
segment = open_segment(Path(sys.argv[1]), sys.argv[2], shape, generation=3)
nonces = segment.read_nonce(is_client=True), segment.write_nonce(is_client=False)
print(*(nonce.hex() for nonce in nonces), flush=True)
server = SharedServer()
server.add_link("ab" * 8, segment, limits)
while True:
    request = server.receive(60.0, spin_s=float(sys.argv[3]), others=(0,))
    if request is not None:
        server.reply(request, HostSums(sums_of(request.batch)), 0.5)
    elif server.are_others_ready:
        break
server.close()
"""


@pytest.mark.parametrize("spin_s", [0.0, 100e-6])
def test_a_server_in_another_process_has_the_same_memory(run_dir: Path, spin_s: float) -> None:
    lost_fd = os.eventfd(0, os.EFD_CLOEXEC)
    segment = create_segment(run_dir, SHAPE, generation=3)
    nonce = segment.write_nonce(is_client=True)
    client = SharedClient(segment, lost_fd=lost_fd, lost_reason=lambda: "lost", spin_s=spin_s)
    command = [sys.executable, "-c", SERVER, str(run_dir), segment.name, str(spin_s)]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        read, written = child.stdout.readline().split()
        segment.unlink()
        assert bytes.fromhex(read) == nonce
        assert segment.read_nonce(is_client=False).hex() == written
        for number in range(200):
            batches = [example_batch(n, seed=number) for n in (1, MAX_TOKENS, 0)]
            sequences = [client.submit(7, batch, deadline_s=20.0) for batch in batches]
            for sequence, batch in zip(sequences, batches, strict=True):
                reply = client.wait(sequence, deadline_s=20.0)
                assert reply.sums.tobytes() == sums_of(batch).tobytes()
        child.stdin.close()
        assert child.wait(20) == 0
    client.close()
    os.close(lost_fd)
