"""A listening socket with CURVE keys and a list of allowed clients, and real clients for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import zmq

from dflash_daemon.authentication import Authenticator
from dflash_protocol.transports.curve import (
    AuthorizedClients,
    ClientSecurity,
    CurveKeys,
    generate_keys,
    public_line,
    secure_server,
)

PATIENCE_MS = 20_000
"""More than any step takes on a slow machine; a passing test never waits this long."""
MAX_FRAME_BYTES = 5000

Socket = zmq.Socket[bytes]


@contextmanager
def ends_of(dealer: Socket) -> Iterator[Callable[[], None]]:
    """A function that waits until another connection of this socket has ended."""
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
    """A listening ROUTER with keys, its list of allowed clients, and a factory of clients."""

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

    def client(
        self,
        keys: CurveKeys | None,
        server_public_key: bytes | None = None,
        *,
        context: zmq.Context[Socket] | None = None,
    ) -> Socket:
        """A client that is not connected yet, in a context of its own by default."""
        if context is None:
            context = zmq.Context()
            self._undo.callback(context.destroy, linger=0)
        dealer = context.socket(zmq.DEALER)
        self._undo.callback(dealer.close, linger=0)
        dealer.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            ClientSecurity(keys, server_public_key or self.keys.public).apply(dealer)
        return dealer

    def assert_lets_in(self, dealer: Socket) -> None:
        """A message from the client arrives, and so does the answer."""
        dealer.connect(self.address)
        dealer.send(b"question")
        assert self.socket.poll(PATIENCE_MS)
        routing_id, question = self.socket.recv_multipart()
        assert question == b"question"
        self.socket.send_multipart([routing_id, b"answer"])
        assert dealer.poll(PATIENCE_MS)
        assert dealer.recv() == b"answer"

    def assert_refuses(self, dealer: Socket) -> None:
        """The connection is closed before a message arrives."""
        with ends_of(dealer) as wait_for_end:
            dealer.connect(self.address)
            dealer.send(b"question")
            wait_for_end()
            assert not self.socket.poll(0)
            assert not dealer.poll(0)
        dealer.close(linger=0)
