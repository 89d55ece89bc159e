"""The compute thread: receive → check → compute → reply, one request at a time.

It owns the data socket and all use of the expert banks; `control` adds and drops links.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeAlias

import zmq

from dflash_protocol.errors import ModelFileError, ProtocolError
from dflash_protocol.ring.segment import Segment
from dflash_protocol.transports.shared_server import SharedServer
from dflash_protocol.transports.zmq_stream import StreamServer
from dflash_protocol.wire.transport import LinkLimits, ReceivedRequest, TransportCounters
from dflash_runtime.compute import ExpertBank
from dflash_runtime.compute.backend import sums_of

Banks: TypeAlias = Mapping[int, ExpertBank]
"""By layer id."""

_LOG = logging.getLogger(__name__)
_POLL_S = 0.25
_SOCKET_POLL_S = 0.002
"""Interval of polling the socket while rings are busy and the socket has been quiet."""
_SOCKET_ACTIVE_S = 0.1
"""For this long after a request through the socket, it is polled at every turn."""


class ComputeService:
    """Serves each link the experts of its placement, from `start` to `close`.

    `on_failure` is called from the compute thread if it fails. `check_file` is called before each
    reply; it raises ModelFileError if the model's file has changed. `secure` sets keys on the data
    socket. With `shares_memory`, links may also have a ring; after a request the thread spins on
    rings for `spin_s`, then calls `before_sleep` and sleeps.

    Owns: the compute thread and, through it, the data socket and the rings. Links are added and
    dropped by the control thread.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        data_address: str,
        *,
        max_frame_bytes: int,
        on_failure: Callable[[], object] = lambda: None,
        shares_memory: bool = False,
        spin_s: float = 0.0,
        before_sleep: Callable[[], object] = lambda: None,
        check_file: Callable[[], object] = lambda: None,
        secure: Callable[[zmq.Socket[bytes]], object] | None = None,
    ) -> None:
        self.failure: Exception | None = None
        """The exception that ended the compute thread, if it failed."""
        self._on_failure = on_failure
        self._secure = secure
        self._links: dict[str, LinkLimits] = {}
        self._banks_of: dict[str, Banks] = {}
        self.counters = TransportCounters()
        """Counters of the data socket and all rings."""
        self.num_late = 0
        """Requests dropped because their deadline had passed before they were started."""
        self._busy_since_s: float | None = None
        self._spin_s = spin_s
        self._before_sleep = before_sleep
        self._check_file = check_file
        self._socket_turn = _Turn()
        self._socket_polled_s = self._socket_served_s = 0.0
        self._rings = SharedServer(counters=self.counters) if shares_memory else None
        self._stop = threading.Event()
        self._port: Future[int] = Future()
        self._thread = threading.Thread(
            target=self._run,
            args=(context, data_address, max_frame_bytes),
            name="dflash-compute",
            daemon=True,
        )

    def start(self) -> int:
        """Bind the data socket and return its port, 0 for ipc.

        Raises: zmq.ZMQError if it cannot be bound.
        """
        self._thread.start()
        return self._port.result()

    def add_link(self, link_id: str, limits: LinkLimits, banks: Banks) -> None:
        """Serve a link with these banks, by layer; its local ids are the banks'."""
        self._banks_of[link_id] = banks
        self._links[link_id] = limits

    def attach(self, link_id: str, segment: Segment) -> None:
        """Serve a link through shared memory too; takes ownership of the segment.

        Raises: ProtocolError if there is no such link, or memory is not shared.
        """
        limits = self._links.get(link_id)
        if limits is None or self._rings is None:
            segment.close()
            raise ProtocolError("no memory is shared on this link", code="transport")
        self._rings.add_link(link_id, segment, limits)

    def drop_link(self, link_id: str) -> None:
        if self._links.pop(link_id, None) is not None and self._rings is not None:
            self._rings.drop_link(link_id)
        self._banks_of.pop(link_id, None)

    def limits_of(self, link_id: str) -> LinkLimits | None:
        """The negotiated limits of a link; None if there is no such link."""
        return self._links.get(link_id)

    @property
    def num_links(self) -> int:
        return len(self._links)

    @property
    def busy_s(self) -> float:
        """Time spent on the current request; 0 when idle."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def close(self) -> None:
        """Finish the current request and end the thread."""
        self._stop.set()
        self._thread.join()

    def _run(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        data_address: str,
        max_frame_bytes: int,
    ) -> None:
        try:
            server = StreamServer(
                context,
                data_address,
                max_frame_bytes=max_frame_bytes,
                limits_of=self._links.get,
                counters=self.counters,
                secure=self._secure,
            )
        except zmq.ZMQError as error:
            self._port.set_exception(error)
            return
        self._port.set_result(server.port)
        try:
            if self._rings is None:
                while not self._stop.is_set():
                    self._serve_next(server, _POLL_S)
            else:
                self._serve_both(server, self._rings)
        except Exception as error:
            # A daemon that answers heartbeats but no requests is worse than none: end it.
            # docs: a bug, with its traceback: report it. The daemon ends with
            # exit code 1
            _LOG.exception("the compute thread failed")
            self.failure = error
            self._on_failure()
        finally:
            server.close()
            if self._rings is not None:
                self._rings.close()

    def _serve_next(self, server: StreamServer, timeout_s: float) -> str | None:
        """Serve a request from the socket; returns its link, or None if there was none."""
        request = server.receive(timeout_s)
        if request is None:
            return None
        self._serve(server, request)
        return request.link_id

    def _serve_both(self, server: StreamServer, rings: SharedServer) -> None:
        """Alternate between rings and socket; a turn is one request of each link that has work.

        Within each, links alternate too: SharedServer is round-robin over rings, ZeroMQ over
        connections. So a link waits for at most a request or two of each other link.
        """
        others = (server.fd,)
        is_awaited = is_socket_empty = False
        ring_turn = _Turn()
        while not self._stop.is_set():
            request = rings.try_receive(spin_s=self._spin_s if is_awaited else 0.0)
            if request is not None:
                self._serve(rings, request)
                is_awaited = True
                if ring_turn.ends_with(request.link_id) and self._is_socket_due():
                    self._serve_socket(server)
                    is_socket_empty = server.was_empty
                continue
            is_awaited = False
            ring_turn.end()
            # Polling the socket takes as long as half a ring request. Its descriptor signals only
            # what arrived since the socket was found empty, but is free to wait for while asleep.
            if not is_socket_empty:
                self._serve_socket(server)
                is_socket_empty = server.was_empty
                continue
            self._before_sleep()
            request = rings.receive(_POLL_S, others=others)
            if request is not None:
                self._serve(rings, request)
                ring_turn.ends_with(request.link_id)
                is_awaited = True
            is_socket_empty = request is not None and not rings.are_others_ready

    def _is_socket_due(self) -> bool:
        """Whether to poll the socket now: it takes a third of a small request's time, so a quiet
        socket is polled only at intervals."""
        now_s = time.monotonic()
        pause_s = 0.0 if now_s - self._socket_served_s < _SOCKET_ACTIVE_S else _SOCKET_POLL_S
        return now_s - self._socket_polled_s >= pause_s

    def _serve_socket(self, server: StreamServer) -> bool:
        """Serve the socket for one turn. False if it had no request."""
        is_served = False
        while (link_id := self._serve_next(server, 0.0)) is not None:
            is_served = True
            if self._socket_turn.ends_with(link_id):
                break
        else:
            self._socket_turn.end()
        self._socket_polled_s = time.monotonic()
        if is_served:
            self._socket_served_s = self._socket_polled_s
        return is_served

    def _serve(self, server: StreamServer | SharedServer, request: ReceivedRequest) -> None:
        self._busy_since_s = started_s = time.monotonic()
        batch = request.batch
        try:
            if request.is_late:
                self.num_late += 1
                raise ProtocolError(
                    f"waited {request.waited_s * 1e3:.0f} ms, past its deadline of "
                    f"{request.header.deadline_ms:.0f} ms",
                    code="late",
                )
            # A link may be dropped between a request's arrival and its turn.
            banks = self._banks_of.get(request.link_id, {})
            bank = banks.get(request.header.layer_id)
            if bank is None:
                raise ProtocolError(
                    f"no experts of layer {request.header.layer_id} here", code="not_owned"
                )
            request.check(hidden_size=bank.layer.hidden_size, num_experts=bank.num_experts)
            sums = sums_of(bank, batch)
            self._check_file()
        except ProtocolError as error:
            server.fail(request.link_id, request.header.sequence, error)
        except ModelFileError as error:  # the main loop will see it too and end the daemon
            failure = ProtocolError(str(error), code="file")
            server.fail(request.link_id, request.header.sequence, failure)
        except Exception:
            # The parent can compute this batch elsewhere; keep serving other requests.
            # docs: a bug, with its traceback: report it. The parent computed that batch
            # elsewhere
            _LOG.exception("computing layer %d failed", request.header.layer_id)
            failure = ProtocolError("computing failed inside the daemon", code="internal")
            server.fail(request.link_id, request.header.sequence, failure)
        else:
            server.reply(request, sums, time.monotonic() - started_s)
        finally:
            self._busy_since_s = None


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
