"""Who may open a tcp link: answers ZeroMQ, once a handshake, whether a client's key is allowed.

ZeroMQ checks that a client owns the key it shows, then asks the context's ZAP handler
(rfc.zeromq.org/spec/27), which is this, whether to let it in. Knows nothing of messages.
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
    """Answers for all sockets of one context. Made before they listen; nobody gets in without it.

    Owns: its thread, which owns the handler's socket and the list of clients for life.
    Raises: zmq.ZMQError if the context has a handler already.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: AuthorizedClients) -> None:
        self.num_allowed = 0
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
        """End the thread; from now on nobody gets in."""
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
            # Whoever waits for an answer is closed by the handshake's time limit.
            # docs: a bug, with its traceback: report it; start the daemon again
            _LOG.exception("nobody is let in any more")
        finally:
            self._socket.close()

    def _answer(self, request: list[bytes]) -> tuple[bytes, ...]:
        """Status, text, user and metadata for a request of libzmq's."""
        _, _, domain, address, _, mechanism, *credentials = request
        key = credentials[0] if len(credentials) == 1 else b""
        is_curve = mechanism == b"CURVE" and domain == ZAP_DOMAIN and len(key) == KEY_BYTES
        if is_curve and self._clients.allows(key):
            self.num_allowed += 1
            return _ALLOWED
        self.num_refused += 1
        self._report(key, address)
        return _REFUSED

    def _report(self, key: bytes, address: bytes) -> None:
        """Say who was refused, but not a thousand times a second."""
        now_s = time.monotonic()
        if now_s - self._reported_s < _REPORT_EVERY_S:
            return
        num_refused = self.num_refused - self._num_reported
        self._num_reported, self._reported_s = self.num_refused, now_s
        where = ascii(address.decode("ascii", "replace"))
        # docs: if it is a friend, add `dflash-public-key KEY` to `authorized_clients`
        _LOG.warning(
            "refused %d %s; the last from %s with key %s, which is not among the "
            "authorized clients",
            num_refused,
            noun(num_refused, "connection"),
            where,
            key.hex(),
        )


def let_handshakes_yield(io_thread: int) -> None:
    """Give the work of this process's I/O threads of that number a lower priority.

    Handshakes of strangers then take time that nobody else wants. ZeroMQ can only raise it. To be
    called when the context has a socket, for its threads are started with the first.
    """
    niceness = min(_NICEST, os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICER_BY)
    end_s = time.monotonic() + _NAMING_S
    is_found = False
    while not is_found and time.monotonic() < end_s:  # a thread gives itself its name
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it may have ended
                if (task / "comm").read_text().strip() == f"{_IO_THREAD}{io_thread}":
                    os.setpriority(os.PRIO_PROCESS, int(task.name), niceness)
                    is_found = True
        if not is_found:
            time.sleep(0.001)
    if not is_found:
        # docs: the system does not let a thread lower its priority; a flood of strangers may delay
        # requests
        _LOG.warning("handshakes of strangers have the same priority as all else")
