"""The compute thread: receive → check → compute → reply, one request at a time.

It owns the data socket and all use of the expert banks for life. Knows nothing of handshakes; it is
told which links exist.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import zmq

from dflash_protocol.errors import ProtocolError
from dflash_protocol.ring_segment import Segment
from dflash_protocol.transport import LinkLimits, ReceivedRequest, TransportCounters
from dflash_protocol.transports.shared_server import SharedServer
from dflash_protocol.transports.zmq_stream import StreamServer
from dflash_runtime.compute import ExpertBank

_LOG = logging.getLogger(__name__)
_POLL_S = 0.25
_SOCKET_TURN_S = 0.002
"""While rings are busy, the socket is looked at so often."""


class ComputeService:
    """Serves the experts of `banks`, which may be set once they are loaded.

    `on_failure` is called, from the compute thread, if that ends without being told to.

    `secure` puts keys on the data socket. With `shares_memory`, links may also have a ring; rings
    are looked at for `spin_s` after a request before the thread sleeps.

    Owns: the compute thread and, through it, the data socket and the rings.
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
        secure: Callable[[zmq.Socket[bytes]], object] | None = None,
    ) -> None:
        self.failure: Exception | None = None
        """What ended the compute thread before it was told to end."""
        self._on_failure = on_failure
        self._secure = secure
        self._links: dict[str, LinkLimits] = {}
        self._banks: dict[int, ExpertBank] = {}
        self.counters = TransportCounters()
        """Of the data socket."""
        self.num_late = 0
        """Requests that were dropped because their deadline had passed before they were begun."""
        self._busy_since_s: float | None = None
        self._spin_s = spin_s
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

    def set_banks(self, banks: dict[int, ExpertBank]) -> None:
        """From now on these experts are served."""
        self._banks = banks

    def add_link(self, link_id: str, limits: LinkLimits) -> None:
        self._links[link_id] = limits

    def attach(self, link_id: str, segment: Segment) -> None:
        """Have a link's requests come through shared memory too, which is ours from now on.

        Raises: ProtocolError if there is no such link, or no such thing here.
        """
        limits = self._links.get(link_id)
        if limits is None or self._rings is None:
            segment.close()
            raise ProtocolError("no memory is shared on this link", code="transport")
        self._rings.add_link(link_id, segment, limits)

    def drop_link(self, link_id: str) -> None:
        if self._links.pop(link_id, None) is not None and self._rings is not None:
            self._rings.drop_link(link_id)

    def limits_of(self, link_id: str) -> LinkLimits | None:
        """What was agreed on with that link, if there is one."""
        return self._links.get(link_id)

    def knows_link(self, link_id: str) -> bool:
        return link_id in self._links

    @property
    def num_links(self) -> int:
        return len(self._links)

    @property
    def busy_s(self) -> float:
        """How long the present request has been computing; 0 when idle."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def close(self) -> None:
        """Finish the present request and end the thread."""
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
            # A daemon whose heart beats and whose hands do nothing is worse than none.
            _LOG.exception("the compute thread failed")
            self.failure = error
            self._on_failure()
        finally:
            server.close()
            if self._rings is not None:
                self._rings.close()

    def _serve_next(self, server: StreamServer, timeout_s: float) -> bool:
        request = server.receive(timeout_s)
        if request is not None:
            self._serve(server, request)
        return request is not None

    def _serve_both(self, server: StreamServer, rings: SharedServer) -> None:
        """Rings and the socket in turn, so that neither waits for the end of the other's work."""
        poller = zmq.Poller()
        registered: tuple[int, ...] = ()
        poller.register(server.socket, zmq.POLLIN)
        is_awaited = False
        socket_looked_at_s = 0.0
        while not self._stop.is_set():
            request = rings.try_receive(spin_s=self._spin_s if is_awaited else 0.0)
            if request is not None:
                self._serve(rings, request)
                is_awaited = True
                now_s = time.monotonic()
                if now_s - socket_looked_at_s > _SOCKET_TURN_S:
                    socket_looked_at_s = now_s
                    self._serve_next(server, 0.0)
                continue
            is_awaited = False
            if self._serve_next(server, 0.0) or not rings.prepare_to_sleep():
                continue
            if rings.wake_fds != registered:
                for fd in registered:
                    poller.unregister(fd)
                registered = rings.wake_fds
                for fd in registered:
                    poller.register(fd, zmq.POLLIN)
            poller.poll(math.ceil(_POLL_S * 1e3))
            rings.awake()

    def _serve(self, server: StreamServer | SharedServer, request: ReceivedRequest) -> None:
        self._busy_since_s = started_s = time.monotonic()
        batch = request.batch
        try:
            if request.is_late:
                self.num_late += 1
                raise ProtocolError(
                    f"begun {request.waited_s * 1e3:.0f} ms after it came, which is past its "
                    f"deadline of {request.header.deadline_ms:.0f} ms",
                    code="late",
                )
            bank = self._banks.get(request.header.layer_id)
            if bank is None:
                raise ProtocolError(
                    f"no experts of layer {request.header.layer_id} here", code="not_owned"
                )
            batch.check(hidden_size=bank.layer.hidden_size, num_experts=bank.num_experts)
            sums = np.zeros(batch.hidden.shape, dtype=np.float64)
            bank.accumulate(batch, sums)
        except ProtocolError as error:
            server.fail(request.link_id, request.header.sequence, error)
        except Exception:
            # Whatever it is, the parent can compute this elsewhere and others can be served.
            _LOG.exception("computing layer %d failed", request.header.layer_id)
            failure = ProtocolError("computing failed inside the daemon", code="internal")
            server.fail(request.link_id, request.header.sequence, failure)
        else:
            server.reply(request, sums, time.monotonic() - started_s)
        finally:
            self._busy_since_s = None
