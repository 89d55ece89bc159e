"""The compute thread: receive → check → compute → reply, one request at a time.

It owns the data socket and all use of the expert banks for life. Knows nothing of handshakes; it is
told which links exist.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import zmq

from dflash_protocol.errors import ProtocolError
from dflash_protocol.transport import ReceivedRequest
from dflash_protocol.transports.zmq_stream import LinkLimits, StreamServer
from dflash_runtime.compute import ExpertBank

_LOG = logging.getLogger(__name__)
_POLL_S = 0.25


class ComputeService:
    """Serves the experts of `banks`, which may be set once they are loaded.

    `on_failure` is called, from the compute thread, if that ends without being told to.

    Owns: the compute thread and, through it, the data socket.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        data_address: str,
        *,
        max_frame_bytes: int,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        self.failure: Exception | None = None
        """What ended the compute thread before it was told to end."""
        self._on_failure = on_failure
        self._links: dict[str, LinkLimits] = {}
        self._banks: dict[int, ExpertBank] = {}
        self._busy_since_s: float | None = None
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

    def drop_link(self, link_id: str) -> None:
        self._links.pop(link_id, None)

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
                context, data_address, max_frame_bytes=max_frame_bytes, limits_of=self._links.get
            )
        except zmq.ZMQError as error:
            self._port.set_exception(error)
            return
        self._port.set_result(server.port)
        try:
            while not self._stop.is_set():
                request = server.receive(_POLL_S)
                if request is not None:
                    self._serve(server, request)
        except Exception as error:
            # A daemon whose heart beats and whose hands do nothing is worse than none.
            _LOG.exception("the compute thread failed")
            self.failure = error
            self._on_failure()
        finally:
            server.close()

    def _serve(self, server: StreamServer, request: ReceivedRequest) -> None:
        self._busy_since_s = started_s = time.monotonic()
        batch = request.batch
        try:
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
