"""The compute thread: receive → check → compute → reply, one request at a time.

For small requests that come over rings, compiled code does the same without Python, as long as
nothing is wrong with them (`ring.server_kernels`). The thread owns the
data socket, the rings and all use of the expert banks; `control` adds and drops links, `data_paths`
has the transports and chooses the next request.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import zmq

from dflash_daemon.data_paths import DataServers
from dflash_protocol.batch import Sums
from dflash_protocol.errors import ModelFileError, ProtocolError
from dflash_protocol.ring.compiled_experts import CompiledExperts
from dflash_protocol.ring.segment import Segment
from dflash_protocol.transports.zmq_stream import StreamServer
from dflash_protocol.wire.transport import (
    LinkLimits,
    ReceivedRequest,
    ServerTransport,
    TransportCounters,
)
from dflash_runtime.compute import ExpertBank
from dflash_runtime.compute.backend import sums_of

Banks: TypeAlias = Mapping[int, ExpertBank]
"""By layer id."""


class CompileBanks(Protocol):
    """`ComputeBackend.compile_banks`."""

    def __call__(
        self, banks: Banks, *, max_tokens: int, max_experts_used: int
    ) -> CompiledExperts | None: ...


def compile_none(banks: Banks, *, max_tokens: int, max_experts_used: int) -> None:
    """The CompileBanks of a backend without compiled code."""


_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _ServedLink:
    """What a link negotiated, and the experts it asks for."""

    limits: LinkLimits
    banks: Banks


class ComputeService:
    """Serves each link the experts of its placement, from `start` to `close`.

    `on_failure` is called from the compute thread if it fails. `check_file` raises ModelFileError
    if the model's file has changed, and returns until when, by the monotonic clock, replies may be
    sent without another call. `secure` sets keys on the data
    socket. With `shares_memory`, links may also have a ring; after a request the thread spins on
    rings for `spin_s`, then calls `before_sleep` and sleeps; what `compile_banks` returns answers
    requests of rings without Python.

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
        check_file: Callable[[], float] = lambda: math.inf,
        compile_banks: CompileBanks = compile_none,
        secure: Callable[[zmq.Socket[bytes]], object] | None = None,
    ) -> None:
        self.failure: Exception | None = None
        """The exception that ended the compute thread, if it failed."""
        self.counters = TransportCounters()
        """Counters of the data socket and all rings."""
        self.num_late = 0
        """Requests dropped because their deadline had passed before they were started."""
        self._links: dict[str, _ServedLink] = {}
        self._busy_since_s: float | None = None
        self._on_failure = on_failure
        self._check_file = check_file
        self._compile_banks = compile_banks
        self._stop = threading.Event()
        self._port: Future[int] = Future()
        open_socket = partial(
            StreamServer,
            context,
            data_address,
            max_frame_bytes=max_frame_bytes,
            limits_of=self.limits_of,
            counters=self.counters,
            secure=secure,
        )
        self._servers = DataServers(
            open_socket,
            shares_memory=shares_memory,
            counters=self.counters,
            spin_s=spin_s,
            before_sleep=before_sleep,
        )
        self._thread = threading.Thread(target=self._run, name="dflash-compute", daemon=True)

    def start(self) -> int:
        """Bind the data socket and return its port, 0 for ipc.

        Raises: zmq.ZMQError if it cannot be bound.
        """
        self._thread.start()
        return self._port.result()

    def add_link(self, link_id: str, limits: LinkLimits, banks: Banks) -> None:
        """Serve a link with these banks, by layer; its local ids are the banks'."""
        is_known = link_id in self._links
        self._links[link_id] = _ServedLink(limits, banks)
        if is_known:
            self._servers.set_experts(link_id, self._compiled(self._links[link_id]))

    def attach(self, link_id: str, segment: Segment) -> None:
        """Serve a link through shared memory too; takes ownership of the segment.

        Raises: ProtocolError if there is no such link, or memory is not shared.
        """
        link = self._links.get(link_id)
        if link is None:
            self._servers.attach(link_id, segment, None, experts=None)
        else:
            self._servers.attach(link_id, segment, link.limits, experts=self._compiled(link))

    def drop_link(self, link_id: str) -> None:
        if self._links.pop(link_id, None) is not None:
            self._servers.drop_link(link_id)

    def limits_of(self, link_id: str) -> LinkLimits | None:
        """The negotiated limits of a link; None if there is no such link."""
        link = self._links.get(link_id)
        return None if link is None else link.limits

    @property
    def num_links(self) -> int:
        return len(self._links)

    @property
    def busy_s(self) -> float:
        """Time spent on the current request; 0 when idle."""
        since_s = self._busy_since_s
        return self._servers.busy_s if since_s is None else time.monotonic() - since_s

    def close(self) -> None:
        """Finish the current request and end the thread."""
        self._stop.set()
        self._thread.join()

    def _compiled(self, link: _ServedLink) -> CompiledExperts | None:
        limits = link.limits
        return self._compile_banks(
            link.banks, max_tokens=limits.max_tokens, max_experts_used=limits.max_experts_used
        )

    def _run(self) -> None:
        try:
            port = self._servers.open()
        except zmq.ZMQError as error:
            self._port.set_exception(error)
            return
        self._port.set_result(port)
        try:
            for server, request in self._servers.until(self._stop):
                self._serve(server, request)
        except Exception as error:
            # A daemon that answers heartbeats but no requests is worse than none: end it.
            # docs: a bug, with its traceback: report it. The daemon ends with
            # exit code 1
            _LOG.exception("the compute thread failed")
            self.failure = error
            self._on_failure()
        finally:
            self._servers.close()

    def _serve(self, server: ServerTransport, request: ReceivedRequest) -> None:
        self._busy_since_s = started_s = time.monotonic()
        try:
            if request.computed is None:
                sums = self._computed(request)
            else:
                sums, started_s = request.computed, request.started_s
            self._servers.allow_replies(self._check_file())
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

    def _computed(self, request: ReceivedRequest) -> Sums:
        """Raises: ProtocolError if the request cannot be computed here, or not in time."""
        if request.is_late:
            self.num_late += 1
            raise ProtocolError(
                f"waited {request.waited_s * 1e3:.0f} ms, past its deadline of "
                f"{request.header.deadline_ms:.0f} ms",
                code="late",
            )
        # A link may be dropped between a request's arrival and its turn.
        link = self._links.get(request.link_id)
        bank = None if link is None else link.banks.get(request.header.layer_id)
        if bank is None:
            raise ProtocolError(
                f"no experts of layer {request.header.layer_id} here", code="not_owned"
            )
        request.check(hidden_size=bank.layer.hidden_size, num_experts=bank.num_experts)
        return sums_of(bank, request.batch)
