"""Who gets into a daemon's sockets: real sockets on the loopback address, right and wrong keys."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from dflash_daemon.authentication import Authenticator, let_handshakes_yield
from dflash_protocol.curve import (
    AuthorizedClients,
    CurveKeys,
    generate_keys,
    public_line,
    secure_client,
    secure_server,
)

PATIENCE_MS = 20_000
"""Longer than anything takes on the slowest machine; never waited out by a test that passes."""
MAX_FRAME_BYTES = 5000

Socket = zmq.Socket[bytes]


@contextmanager
def ends_of(dealer: Socket) -> Iterator[Callable[[], None]]:
    """Gives a function that waits until a connection of this socket has ended once more."""
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def wait_for_end() -> None:
        assert monitor.poll(PATIENCE_MS), "the connection goes on"
        monitor.recv_multipart()

    try:
        yield wait_for_end
    finally:
        dealer.disable_monitor()
        monitor.close(linger=0)


class Door:
    """A listening ROUTER with keys, its list of clients, and clients to knock."""

    def __init__(self, undo: ExitStack, folder: Path) -> None:
        self._undo = undo
        self._folder = folder
        self.keys = self.new_keys()
        self.list_path = folder / "clients"
        self.list_path.touch(0o600)
        self.context: zmq.Context[Socket] = zmq.Context()
        undo.callback(self.context.destroy, linger=0)
        self.authenticator: Authenticator | None = Authenticator(
            self.context, AuthorizedClients(self.list_path)
        )
        undo.callback(self.close_authenticator)
        self.socket = self.context.socket(zmq.ROUTER)
        undo.callback(self.socket.close, linger=0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        secure_server(self.socket, self.keys)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{self.port}"

    def close_authenticator(self) -> None:
        if self.authenticator is not None:
            self.authenticator.close()
            self.authenticator = None

    def new_keys(self) -> CurveKeys:
        return generate_keys(self._folder / os.urandom(4).hex(), comment="")

    def allow(self, *clients: CurveKeys) -> None:
        self.list_path.write_text("".join(public_line(keys.public) + "\n" for keys in clients))

    def client(self, keys: CurveKeys | None, server_public_key: bytes | None = None) -> Socket:
        """A client that is not connected yet. Its own context has no part in what we test."""
        context: zmq.Context[Socket] = zmq.Context()
        self._undo.callback(context.destroy, linger=0)
        dealer = context.socket(zmq.DEALER)
        self._undo.callback(dealer.close, linger=0)
        dealer.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            secure_client(dealer, keys, server_public_key or self.keys.public)
        return dealer

    def assert_lets_in(self, dealer: Socket) -> None:
        """There and back."""
        dealer.connect(self.address)
        dealer.send(b"question")
        assert self.socket.poll(PATIENCE_MS)
        routing_id, question = self.socket.recv_multipart()
        assert question == b"question"
        self.socket.send_multipart([routing_id, b"answer"])
        assert dealer.poll(PATIENCE_MS)
        assert dealer.recv() == b"answer"

    def assert_refuses(self, dealer: Socket) -> None:
        """The connection is ended before anything comes through."""
        with ends_of(dealer) as wait_for_end:
            dealer.connect(self.address)
            dealer.send(b"question")
            wait_for_end()
            assert not self.socket.poll(0)
            assert not dealer.poll(0)
        dealer.close(linger=0)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    with ExitStack() as undo:
        yield Door(undo, tmp_path)


def test_a_client_on_the_list_is_let_in(door: Door) -> None:
    keys = door.new_keys()
    door.allow(door.new_keys(), keys)
    door.assert_lets_in(door.client(keys))
    assert door.authenticator is not None
    assert (door.authenticator.num_allowed, door.authenticator.num_refused) == (1, 0)


def test_a_client_with_another_key_is_refused(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    good, stranger = door.new_keys(), door.new_keys()
    door.allow(good)
    for _ in range(3):
        door.assert_refuses(door.client(stranger))
    assert door.authenticator is not None
    assert door.authenticator.num_allowed == 0
    assert door.authenticator.num_refused == 3
    # Said once, and so that the operator can let it in; not a thousand times a second.
    assert [stranger.public.hex() in record.getMessage() for record in caplog.records] == [True]
    assert "127.0.0.1" in caplog.text
    door.assert_lets_in(door.client(good))


def test_a_client_without_keys_is_refused(door: Door) -> None:
    good = door.new_keys()
    door.allow(good)
    door.assert_refuses(door.client(None))
    door.assert_lets_in(door.client(good))


def test_a_client_that_expects_another_daemon_is_refused(door: Door) -> None:
    """It cannot be fooled either: only the owner of the pinned key can answer it."""
    good = door.new_keys()
    door.allow(good)
    door.assert_refuses(door.client(good, door.new_keys().public))
    door.assert_lets_in(door.client(good))


def test_a_client_is_let_in_and_locked_out_while_the_daemon_runs(door: Door) -> None:
    good, late = door.new_keys(), door.new_keys()
    door.allow(good)
    door.assert_refuses(door.client(late))
    door.allow(good, late)
    door.assert_lets_in(door.client(late))
    door.allow(late)
    door.assert_refuses(door.client(good))
    door.assert_lets_in(door.client(late))


def test_without_a_handler_nobody_is_let_in(door: Door) -> None:
    good = door.new_keys()
    door.allow(good)
    door.close_authenticator()
    door.assert_refuses(door.client(good))


def test_a_handler_that_failed_lets_nobody_in(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = door.new_keys()
    door.allow(good)

    def fail(clients: AuthorizedClients, key: bytes) -> bool:
        raise MemoryError

    monkeypatch.setattr(AuthorizedClients, "allows", fail)
    door.assert_refuses(door.client(good))
    assert "nobody is let in any more" in caplog.text


def test_the_largest_frame_passes_and_a_larger_one_does_not(door: Door) -> None:
    good = door.new_keys()
    door.allow(good)
    dealer = door.client(good)
    door.assert_lets_in(dealer)
    dealer.send(bytes(MAX_FRAME_BYTES))
    assert door.socket.poll(PATIENCE_MS)
    assert len(door.socket.recv_multipart()[1]) == MAX_FRAME_BYTES
    with ends_of(dealer) as wait_for_end:
        dealer.send(bytes(MAX_FRAME_BYTES + 1))
        wait_for_end()
    assert not door.socket.poll(0)
    door.assert_lets_in(door.client(good))


def test_a_silent_connection_is_ended(door: Door) -> None:
    good = door.new_keys()
    door.allow(good)
    with socket.create_connection(("127.0.0.1", door.port), timeout=20) as silent:
        received = b""
        while data := silent.recv(4096):
            received += data
    assert len(received) <= 64  # its greeting, nothing else
    door.assert_lets_in(door.client(good))


def test_a_context_has_one_handler(door: Door) -> None:
    with pytest.raises(zmq.ZMQError):
        Authenticator(door.context, AuthorizedClients(door.list_path))
    good = door.new_keys()
    door.allow(good)
    door.assert_lets_in(door.client(good))


def test_handshakes_yield_to_everything_else(door: Door) -> None:
    ours = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    let_handshakes_yield(0)
    niceness = {
        path.name: os.getpriority(os.PRIO_PROCESS, int(path.name))
        for path in Path("/proc/self/task").iterdir()
        if (path / "comm").read_text().strip() == "ZMQbg/IO/0"
    }
    assert niceness
    assert set(niceness.values()) == {min(19, ours + 10)}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == ours
