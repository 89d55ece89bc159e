"""Authorization of tcp clients: ZeroMQ's ZAP handler, which checks each client's public key.

ZeroMQ verifies that a client owns its key, then asks the context's ZAP handler
(rfc.zeromq.org/spec/27), once a handshake, whether the key is authorized.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from pathlib import Path

import zmq

from dflash_protocol.process.output import noun
from dflash_protocol.transports.curve import KEY_BYTES, ZAP_DOMAIN, AuthorizedClients

_LOG = logging.getLogger(__name__)

_ADDRESS = "inproc://zeromq.zap.01"
_ALLOWED = (b"200", b"OK", b"", b"")
_REFUSED = (b"400", b"this key is not allowed", b"", b"")
_REPORT_EVERY_S = 10.0
_IO_THREAD = "ZMQbg/IO/"
_NICER_BY = 10
_NICEST = 19
_NAMING_S = 1.0


class Authenticator:
    """The ZAP handler of one context, running from construction to `close`.

    Make it before sockets listen; without a handler no client is accepted.
    Owns: its thread, which owns the handler's socket and the list of clients.
    Raises: zmq.ZMQError if the context has a handler already.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: AuthorizedClients) -> None:
        self.num_refused = 0
        self._clients = clients
        self._num_reported = 0
        self._reported_s = -_REPORT_EVERY_S
        self._socket = context.socket(zmq.REP)
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(_ADDRESS)
            self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._run, name="dflash-keys", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; no client is accepted afterwards."""
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._stop_fd)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop_fd, zmq.POLLIN)
        try:
            while self._stop_fd not in dict(poller.poll()):
                request = self._socket.recv_multipart()
                self._socket.send_multipart([*request[:2], *self._answer(request)])
        except Exception:
            # Clients that wait for an answer run into the handshake's time limit.
            # docs: a bug, with its traceback: report it; start the daemon again
            _LOG.exception("no client can connect any more")
        finally:
            self._socket.close()

    def _answer(self, request: list[bytes]) -> tuple[bytes, ...]:
        """Status, text, user and metadata: the reply to a ZAP request."""
        _, _, domain, address, _, mechanism, *credentials = request
        key = credentials[0] if len(credentials) == 1 else b""
        is_curve = mechanism == b"CURVE" and domain == ZAP_DOMAIN and len(key) == KEY_BYTES
        if is_curve and self._clients.allows(key):
            return _ALLOWED
        self.num_refused += 1
        self._report(key, address)
        return _REFUSED

    def _report(self, key: bytes, address: bytes) -> None:
        """Log refused clients, at a limited rate."""
        now_s = time.monotonic()
        if now_s - self._reported_s < _REPORT_EVERY_S:
            return
        num_refused = self.num_refused - self._num_reported
        self._num_reported, self._reported_s = self.num_refused, now_s
        where = ascii(address.decode("ascii", "replace"))
        # docs: if it is one of yours, add `dflash-public-key KEY` to `authorized_clients`
        _LOG.warning(
            "refused %d %s; the last from %s with key %s, which is not among the "
            "authorized clients",
            num_refused,
            noun(num_refused, "connection"),
            where,
            key.hex(),
        )


def let_handshakes_yield(io_thread: int) -> None:
    """Lower the priority of this process's ZeroMQ I/O threads of that number.

    Handshakes of unauthorized clients then yield to other work. ZeroMQ itself can only raise the
    priority. Call it when the context has a socket, since the first one starts the threads.
    """
    niceness = min(_NICEST, os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICER_BY)
    end_s = time.monotonic() + _NAMING_S
    is_found = False
    while not is_found and time.monotonic() < end_s:  # a thread sets its name after it starts
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it may have ended
                if (task / "comm").read_text().strip() == f"{_IO_THREAD}{io_thread}":
                    os.setpriority(os.PRIO_PROCESS, int(task.name), niceness)
                    is_found = True
        if not is_found:
            time.sleep(0.001)
    if not is_found:
        # docs: the system does not let a thread lower its priority; a flood of connections may
        # delay requests
        _LOG.warning("handshakes have the same priority as all other work")
