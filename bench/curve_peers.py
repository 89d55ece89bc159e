"""The two ends of a daemon's sockets with keys, with trivial work: a server that answers every
request alike, and a client that asks repeatedly."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from dflash_daemon.authentication import Authenticator, let_handshakes_yield
from dflash_protocol.transports.curve import (
    AUTHORIZED_FILE,
    AuthorizedClients,
    ClientSecurity,
    CurveKeys,
    load_keys,
    secure_server,
)

_HIDDEN_SIZE = 2048
_REQUEST = [bytes(300 + 4 * _HIDDEN_SIZE)]
"""One frame, like small messages: header, routing of one token, its hidden row in f32."""
_REPLY = [bytes(100 + 8 * _HIDDEN_SIZE)]
_PATIENCE_MS = 20_000


def serve(ports: Connection, folder: Path | None) -> None:
    """Both sockets of a daemon, with keys if a key folder is given; the data socket answers."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(3)
    keys = None
    if folder is not None:
        keys = load_keys(folder)
        Authenticator(context, AuthorizedClients(folder / AUTHORIZED_FILE))
    bound = []
    for io_threads in ((0,), (1, 2)):
        router = context.socket(zmq.ROUTER)
        if keys is not None:
            secure_server(router, keys, io_threads=io_threads)
        bound.append((router, router.bind_to_random_port("tcp://127.0.0.1")))
    if keys is not None:
        let_handshakes_yield(0)
    ports.send([port for _, port in bound])
    data = bound[1][0]
    while True:
        routing_id, *_ = data.recv_multipart()
        data.send_multipart([routing_id, *_REPLY])


class Client:
    """Sends a request, waits for the reply, repeats. Owns its ZeroMQ context."""

    def __init__(self, port: int, keys: CurveKeys | None, server_public_key: bytes) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
        if keys is not None:
            ClientSecurity(keys, server_public_key).apply(self._socket)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)

    def measure(self, *, seconds: float) -> list[float]:
        """Times of consecutive round trips, in microseconds, for `seconds`."""
        times_us = []
        started_s = now_s = time.perf_counter()
        while now_s < started_s + seconds:
            self._socket.send_multipart(_REQUEST)
            self._socket.recv_multipart()
            previous_s, now_s = now_s, time.perf_counter()
            times_us.append((now_s - previous_s) * 1e6)
        return times_us
