"""Connections within bounds: their number, in all and of one address, and how long each may wait.

asyncio's own server accepts every connection, and logs a traceback when it has no descriptor left.
uvicorn bounds how long a connection may idle between requests, not how long the head of one takes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable, Collection
from contextlib import suppress

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_LOG = logging.getLogger(__name__)

HEAD_S = 10.0
"""For the head of a request, from its first byte or the connection's start."""
STALL_S = 60.0
"""For a client to read some of the answer."""
MOST_CONNECTIONS = 1024
_REPORT_EVERY_S = 60.0
_PAUSE_S = 1.0
"""Before accepting again, when no descriptor is left even for a connection to be closed."""
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class BoundedProtocol(H11Protocol):
    """One connection; used by the event loop."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _waits_since_s: float | None = None

    @property
    def silent_since_s(self) -> float | None:
        """Loop time since when the client owes the head of a request, or more of its body. None
        with a whole request, or while either side has unread data."""
        is_ours = self.flow.read_paused or self.transport.get_write_buffer_size()
        return None if is_ours or self.transport.is_closing() else self._waits_since_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits_since_s = self.loop.time()
        self._head_timer = self.loop.call_later(HEAD_S, self.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # `cycle` is the last request's until the head of the next is complete.
        if self._has_request():
            self._head_timer = _stopped(self._head_timer)
            is_whole = self.conn.their_state is not h11.SEND_BODY
            self._waits_since_s = None if is_whole else self.loop.time()
        elif self._head_timer is None and self.timeout_keep_alive_task is None:
            self._head_timer = self.loop.call_later(HEAD_S, self.abort)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which may begin the next request
        self._waits_since_s = None if self._has_request() else self.loop.time()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_S, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_timer = _stopped(self._stall_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = _stopped(self._head_timer)
        self._stall_timer = _stopped(self._stall_timer)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def timeout_keep_alive_handler(self) -> None:
        """Abort if the client has not read its answer by now."""
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            super().timeout_keep_alive_handler()

    def abort(self) -> None:
        """Close at once, dropping unsent data."""
        self.transport.abort()

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


class Acceptor:
    """Accepts connections from a listening socket, one per iteration of the event loop.

    Without room, the connection whose client has been silent longest is closed: of all, or of the
    address that has half of all. If each has a whole request, the new one is closed at once.
    `connections` is the live set, maintained by uvicorn.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], BoundedProtocol],
        connections: Collection[BoundedProtocol],
    ) -> None:
        self._listener = listener
        self._make = make
        self._connections = connections
        self._starting: dict[asyncio.Task[object], str] = {}
        self._loop = asyncio.get_running_loop()
        self._resuming: asyncio.TimerHandle | None = None
        self._num_closed = 0
        self._reported_s = float("-inf")

    def start(self) -> None:
        """Begin to accept."""
        self._resuming = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def stop(self) -> None:
        """Accept no more; open connections stay. May be called twice."""
        if self._resuming is not None:
            self._resuming.cancel()
        elif self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        has_room = self._has_room()
        # A closed connection's descriptor is free in the loop's next iteration.
        if not has_room and self._close_silent(self._connections, "there were too many"):
            return
        try:
            connection, (host, *_) = self._listener.accept()
        except OSError as error:
            if error.errno in _OUT_OF_FILES:
                self._report(error.strerror or str(error))
                self._loop.remove_reader(self._listener.fileno())
                self._resuming = self._loop.call_later(_PAUSE_S, self.start)
            return  # else the client disconnected before
        if not has_room or not self._has_room_for(host):
            connection.close()
            self._count("all had requests")
            return
        connection.setblocking(False)
        starting = self._loop.create_task(self._begin(connection))
        self._starting[starting] = host
        starting.add_done_callback(self._starting.pop)

    async def _begin(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, connection)
        except OSError as error:  # disconnected
            connection.close()
            _LOG.debug("a connection could not be begun: %s", error)

    def _has_room(self) -> bool:
        if len(self._connections) + len(self._starting) >= most_connections():
            return False
        try:
            lowest = os.dup(self._listener.fileno())
        except OSError:
            return False
        os.close(lowest)
        return lowest < first_reserved_file()

    def _has_room_for(self, host: str) -> bool:
        """Whether an address may have one more, after closing a silent one of its own if need be.
        Addresses are unlimited while all together have less than half."""
        most = most_connections() // 2
        if len(self._connections) + len(self._starting) < most:
            return True
        own = [each for each in self._connections if each.client and each.client[0] == host]
        num_starting = sum(each == host for each in self._starting.values())
        return len(own) + num_starting < most or self._close_silent(own, f"{host} had too many")

    def _close_silent(self, connections: Collection[BoundedProtocol], why: str) -> bool:
        """Close the connection silent longest; False if none is silent."""
        waiting = [each for each in connections if each.silent_since_s is not None]
        if not waiting:
            return False
        min(waiting, key=lambda each: each.silent_since_s or 0.0).abort()
        self._count(why)
        return True

    def _count(self, why: str) -> None:
        self._num_closed += 1
        self._report(f"closed {self._num_closed} since the start for lack of room: {why}")

    def _report(self, what: str) -> None:
        """Log, at most once a minute."""
        now_s = self._loop.time()
        if now_s - self._reported_s < _REPORT_EVERY_S:
            return
        self._reported_s = now_s
        # docs: there was no room for a connection: one whose client said nothing was closed for it,
        # or it was closed itself since all had requests; or the process had no files left (`ulimit
        # -n`). See *Bounds* in [serving.md](serving.md)
        _LOG.warning("connections: %s (logged at most once a minute)", what)


def most_connections() -> int:
    """Limit in all: half of the process's file limit; the model and daemons need the rest."""
    return min(MOST_CONNECTIONS, max(8, _most_files() // 2))


def first_reserved_file() -> int:
    """The last quarter of file descriptors is reserved for daemons: connections use none from this
    number on. The kernel always gives the lowest free number."""
    most = _most_files()
    return most - most // 4


def _most_files() -> int:
    with suppress(OSError):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            return soft
    return 1 << 16


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer, if there is one; returns None."""
    if timer is not None:
        timer.cancel()
    return None
