"""Whose request is served next: rings and the socket alternate, and within each their links.

Used by the compute thread, between `service.ComputeService` and the transports.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from dflash_protocol.transports.shared_server import SharedServer
from dflash_protocol.transports.zmq_stream import StreamServer
from dflash_protocol.wire.transport import ReceivedRequest, ServerTransport

_POLL_S = 0.25
_SOCKET_POLL_S = 0.002
"""Interval of polling the socket while rings are busy and the socket has been quiet."""
_SOCKET_ACTIVE_S = 0.1
"""For this long after a request through the socket, it is polled at every turn."""

Turn: TypeAlias = tuple[ServerTransport, ReceivedRequest]
"""A request, and the transport that answers it."""


class Turns:
    """Requests of all links, one at a time; a turn is one request of each link that has work.

    Within each transport links alternate too: SharedServer is round-robin over rings, ZeroMQ over
    connections. So a link waits for at most a request or two of each other link. After a request
    through a ring this spins on rings for `spin_s`, then calls `before_sleep` and sleeps.
    """

    def __init__(
        self,
        socket: StreamServer,
        rings: SharedServer | None,
        *,
        spin_s: float,
        before_sleep: Callable[[], object],
    ) -> None:
        self._socket = socket
        self._rings = rings
        self._spin_s = spin_s
        self._before_sleep = before_sleep
        self._socket_turn = _Turn()
        self._socket_polled_s = self._socket_served_s = 0.0

    def until(self, stop: threading.Event) -> Iterator[Turn]:
        """Requests until `stop` is set; each is answered before the next is asked for."""
        if self._rings is not None:
            yield from self._of_both(self._rings, stop)
            return
        while not stop.is_set():
            if (request := self._socket.receive(_POLL_S)) is not None:
                yield self._socket, request

    def _of_both(self, rings: SharedServer, stop: threading.Event) -> Iterator[Turn]:
        socket = self._socket
        others = (socket.fd,)
        is_awaited = is_socket_empty = False
        ring_turn = _Turn()
        while not stop.is_set():
            request = rings.try_receive(spin_s=self._spin_s if is_awaited else 0.0)
            if request is not None:
                yield rings, request
                is_awaited = True
                if ring_turn.ends_with(request.link_id) and self._is_socket_due():
                    yield from self._of_socket()
                    is_socket_empty = socket.was_empty
                continue
            is_awaited = False
            ring_turn.end()
            # Polling the socket takes as long as half a ring request. Its descriptor signals only
            # what arrived since the socket was found empty, but is free to wait for while asleep.
            if not is_socket_empty:
                yield from self._of_socket()
                is_socket_empty = socket.was_empty
                continue
            self._before_sleep()
            request = rings.receive(_POLL_S, others=others)
            if request is not None:
                yield rings, request
                ring_turn.ends_with(request.link_id)
                is_awaited = True
            is_socket_empty = request is not None and not rings.are_others_ready

    def _of_socket(self) -> Iterator[Turn]:
        """The socket's requests of one turn."""
        is_served = False
        while (request := self._socket.receive(0.0)) is not None:
            yield self._socket, request
            is_served = True
            if self._socket_turn.ends_with(request.link_id):
                break
        else:
            self._socket_turn.end()
        self._socket_polled_s = time.monotonic()
        if is_served:
            self._socket_served_s = self._socket_polled_s

    def _is_socket_due(self) -> bool:
        """Whether to poll the socket now: it takes a third of a small request's time, so a quiet
        socket is polled only at intervals."""
        now_s = time.monotonic()
        pause_s = 0.0 if now_s - self._socket_served_s < _SOCKET_ACTIVE_S else _SOCKET_POLL_S
        return now_s - self._socket_polled_s >= pause_s


class _Turn:
    """The links served in the current turn, of rings or of the socket."""

    def __init__(self) -> None:
        self._served: set[str] = set()

    def ends_with(self, link_id: str) -> bool:
        """Record a request; whether it is its link's second, which ends the turn and starts the
        next one."""
        is_second = link_id in self._served
        if is_second:
            self._served.clear()
        self._served.add(link_id)
        return is_second

    def end(self) -> None:
        """End the turn: there is no more work."""
        self._served.clear()
