"""The transport interface, both ends: what carries requests and replies between parent and daemon.

`tests/support/transport_checks.py` checks that an implementation keeps what is promised here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dflash_protocol.batch import RoutedBatch, Sums
from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import F64Array, I32Array
from dflash_protocol.payloads import PayloadType
from dflash_protocol.wire.messages import ExpertRequest

_WINDOW_S = 10.0


@dataclass(slots=True, eq=False)
class Reply:
    """The result of a request, with the daemon's compute and queue times."""

    placed: Sums
    """The sums, on a device if the request's rows were. Shapes: [T, H]."""
    compute_s: float
    """NaN if the daemon does not report it."""
    queue_s: float = 0.0
    """The daemon's estimate of how long the request waited there."""
    is_finite: bool = True
    """Whether no sum is NaN or infinite."""

    @property
    def sums(self) -> F64Array:
        """The sums on the host; those of a device are copied at each call. Shapes: [T, H]."""
        return self.placed.to_host()


@dataclass(slots=True)
class TransportCounters:
    """Counters of one end of a link's data path. Times cover only the work of this end."""

    checksum_failures: int = 0
    """Messages with a wrong checksum."""
    stale: int = 0
    """Messages of another link, out of order, repeated, or for a request that was forgotten."""
    widened: int = 0
    """Messages sent in a wider type because the negotiated one would have overflowed."""
    bytes_sent: int = 0
    bytes_received: int = 0
    """Bytes count arrays, not headers."""
    send_s: float = 0.0
    receive_s: float = 0.0


class ClientTransport(Protocol):
    """The parent's end of a link's data path. Owned by one thread for life."""

    @property
    def counters(self) -> TransportCounters:
        """This end's counters; those that it was made with, if any."""

    def submit(self, layer_id: int, batch: RoutedBatch, *, deadline_s: float) -> int:
        """Send a request; returns its sequence number, for `wait` and `forget`.

        Raises: DaemonUnavailable if nothing can be sent now.
        """

    def wait(self, sequence: int, *, deadline_s: float) -> Reply:
        """The reply to a submitted request; replies to other requests are kept until their wait.

        Raises: DeadlineExceeded; DaemonUnavailable if the link is lost meanwhile; ProtocolError if
        the daemon refused the request or its reply has the wrong shape. Its code is one of
        REQUEST_FAILURES if only this request failed.
        """

    def forget(self, sequence: int) -> None:
        """Abandon a request: its reply is dropped, whether it has arrived or not."""

    def push(self, sequence: int) -> None:
        """Send whatever of a submitted request is not sent yet, waiting for a device's copy of its
        rows; nothing if all of it is. Raises: DeviceUnavailable."""

    def poll(self) -> None:
        """Advance copies between a device and the transport, without waiting for any.

        Raises: DeviceUnavailable.
        """

    def close(self) -> None:
        """Release everything, requests in flight included. Idempotent."""


class ServerTransport(Protocol):
    """The daemon's end of the data paths of all links over one transport.

    How a link gets here, and leaves, is the transport's own matter. Owned by one thread for life.
    """

    def receive(self, timeout_s: float) -> ReceivedRequest | None:
        """The next valid request of any link, in each link's order of sending. None after
        `timeout_s`, or earlier if an invalid request was answered with its error.

        The request and its arrays are valid until it is answered.
        """

    def reply(self, request: ReceivedRequest, sums: Sums, compute_s: float) -> None:
        """Answer a request with its sums, computed in `compute_s`. Does nothing if its link has
        gone, and never waits for the parent. Shapes: sums [T, H] float64."""

    def fail(self, link_id: str, sequence: int, error: ProtocolError) -> None:
        """Answer a request with the reason why it was not computed. Otherwise as `reply`."""

    def close(self) -> None:
        """Release everything, requests that were not answered included."""


REQUEST_FAILURES = frozenset({"checksum", "internal", "late", "not_finite", "stale"})
"""Error codes of failures of one request that leave the link usable."""


@dataclass(slots=True)
class ArrivalClock:
    """Estimates how long a request had waited when it was read, from its sender's time stamp.

    The clocks of the two ends need not agree. The lag between stamp and reading is smallest for a
    request that is read as soon as it arrives; whatever exceeds the smallest lag of the last 10 to
    20 s was waiting. Underestimates by what the clocks drift in 20 s.
    """

    _began_s: float = -math.inf
    _least_s: float = math.inf
    _least_before_s: float = math.inf

    def waited_s(self, sent_s: float, now_s: float) -> float:
        """Seconds that a request stamped `sent_s` and read at `now_s` has waited."""
        lag_s = now_s - sent_s
        age_s = now_s - self._began_s
        if age_s > _WINDOW_S:
            self._least_before_s = self._least_s if age_s <= 2.0 * _WINDOW_S else math.inf
            self._began_s, self._least_s = now_s, lag_s
        elif lag_s < self._least_s:
            self._least_s = lag_s
        return max(0.0, lag_s - min(self._least_s, self._least_before_s))


@dataclass(slots=True)
class LinkLimits:
    """The limits and types that the handshake negotiated, and what the daemon tracks of a link.

    `max_tokens` bounds a request, `max_experts_used` the pairs of a token. `local_ids` is for
    version 1, whose requests have global ids: by layer, the local id of each global one, -1 if the
    daemon does not have the expert.
    """

    hidden_size: int
    max_tokens: int
    max_experts_used: int
    version: int = 2
    generation: int = 0
    payload: PayloadType = PayloadType.F32
    local_ids: Mapping[int, I32Array] = field(default_factory=dict)
    last_sequence: int = 0
    arrivals: ArrivalClock = field(default_factory=ArrivalClock)

    def note_sequence(self, sequence: int) -> None:
        """Record a request's sequence, which must be greater than the last one.

        Raises: ProtocolError with code ``stale`` if it is not.
        """
        if sequence <= self.last_sequence:
            raise ProtocolError(f"request {sequence} came after {self.last_sequence}", code="stale")
        self.last_sequence = sequence


@dataclass(slots=True, eq=False)
class ReceivedRequest:
    """A well-formed request at the daemon: its link, header, batch and estimated waiting time."""

    link_id: str
    header: ExpertRequest
    batch: RoutedBatch
    waited_s: float = 0.0
    routing_bound: int = 0
    """The routing was checked against this number of experts; 0: not checked."""
    computed: Sums | None = None
    """The sums, if the transport has had them computed: after all checks of the request, since
    `started_s`."""
    started_s: float = 0.0

    def check(self, *, hidden_size: int, num_experts: int) -> None:
        """RoutedBatch.check, unless the transport has done it already.

        Raises: ProtocolError naming the first array that is wrong.
        """
        is_sound = 0 < self.routing_bound <= num_experts
        if not is_sound or self.batch.rows.shape[1] != hidden_size:
            self.batch.check(hidden_size=hidden_size, num_experts=num_experts)

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed, so that the parent no longer waits for a reply."""
        return self.waited_s * 1e3 > self.header.deadline_ms
