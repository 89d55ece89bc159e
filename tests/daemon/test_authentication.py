"""Who gets into a daemon's sockets: real sockets on the loopback address, right and wrong keys."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from dflash_daemon.authentication import Authenticator, let_handshakes_yield
from dflash_protocol.transports.curve import (
    AuthorizedClients,
)
from support.curve_door import MAX_FRAME_BYTES, PATIENCE_MS, Door, ends_of


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    with ExitStack() as undo:
        yield Door(undo, tmp_path)


def test_a_client_on_the_list_is_let_in(door: Door) -> None:
    keys = door.new_keys()
    door.allow(door.new_keys(), keys)
    door.assert_lets_in(door.client(keys))
    assert door.authenticator is not None
    assert door.authenticator.num_refused == 0


def test_a_client_with_another_key_is_refused(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    good, stranger = door.new_keys(), door.new_keys()
    door.allow(good)
    for _ in range(3):
        door.assert_refuses(door.client(stranger))
    assert door.authenticator is not None
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
    assert [record.exc_info is not None for record in caplog.records] == [True]


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
