"""What a transport of expert work offers to each side of a link.

Knows nothing of experts: it carries requests and replies that `messages` describes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dflash_protocol.batch import RoutedBatch, Sums
from dflash_protocol.device_payload import DeviceSums
from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import F64Array, I32Array
from dflash_protocol.payloads import PayloadType
from dflash_protocol.wire.messages import ExpertRequest

_WINDOW_S = 10.0


@dataclass(slots=True, eq=False)
class Reply:
    """A computed request: sums [T, H] float64, and the time the daemon spent computing it and, as
    far as it could tell, left it waiting."""

    sums: F64Array
    compute_s: float
    """NaN if the daemon does not say."""
    queue_s: float = 0.0
    is_finite: bool = True
    """Whether no sum is NaN or infinite."""

    @property
    def placed(self) -> Sums:
        """The sums, wherever they are. Shapes: [T, H]."""
        return self.sums


class DeviceReply(Reply):
    """A reply whose sums are on a device: `sums` is a copy of them, made for whoever asks."""

    __slots__ = ("_placed",)

    def __init__(
        self,
        placed: DeviceSums,
        compute_s: float,
        queue_s: float = 0.0,
        *,
        is_finite: bool = True,
    ) -> None:
        self._placed = placed
        self.compute_s = compute_s
        self.queue_s = queue_s
        self.is_finite = is_finite

    @property
    def sums(self) -> F64Array:
        return self._placed.to_host()

    @sums.setter
    def sums(self, sums: F64Array) -> None:
        raise AttributeError("the sums of this reply are on a device")

    @property
    def placed(self) -> Sums:
        return self._placed


@dataclass(slots=True)
class TransportCounters:
    """What happened at one end of a link's data path. Times are this end's own work."""

    checksum_failures: int = 0
    """Messages whose bytes were not those that were sent."""
    stale: int = 0
    """Messages of another link, out of order, repeated, or that nobody waits for any more."""
    widened: int = 0
    """Messages that went in a wide type since the negotiated one would not hold their values."""
    bytes_sent: int = 0
    bytes_received: int = 0
    """Arrays only, not headers."""
    send_s: float = 0.0
    receive_s: float = 0.0


class ClientTransport(Protocol):
    """The parent's end of a link's data path. Owned by one thread for life."""

    bytes_sent: int
    bytes_received: int

    def submit(self, layer_id: int, batch: RoutedBatch, *, deadline_s: float) -> int:
        """Send a request and return its sequence number, under which to wait for it.

        Raises: DaemonUnavailable if nothing can be sent now.
        """

    def wait(self, sequence: int, *, deadline_s: float) -> Reply:
        """The reply to a submitted request; replies to other ones are kept for their own wait.

        Raises: DeadlineExceeded; DaemonUnavailable if the link is lost meanwhile; ProtocolError if
        the daemon refused the request or answered with the wrong shape. Its code is one of
        REQUEST_FAILURES if only this request is concerned.
        """

    def forget(self, sequence: int) -> None:
        """Nobody will wait for this request: drop its reply, come or to come."""

    def close(self) -> None: ...


REQUEST_FAILURES = frozenset({"checksum", "internal", "late", "not_finite", "stale"})
"""Codes of failures that say nothing against the link: the next request may well succeed."""


@dataclass(slots=True)
class ArrivalClock:
    """Tells how long a request had been waiting when it was read, from its sender's clock.

    The clocks of the two ends need not agree. What lies between the sender's stamp and our reading
    is least for a request that is read as soon as it arrives, so whatever is above the least of the
    last seconds was waiting. Errs on the side of too little, by what the clocks drift in 20 s.
    """

    _began_s: float = -math.inf
    _least_s: float = math.inf
    _least_before_s: float = math.inf

    def waited_s(self, sent_s: float, now_s: float) -> float:
        """Seconds, for a request stamped `sent_s` by its sender and read at `now_s`."""
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
    """What a link's two ends agreed on, as the daemon's end checks it: width of a row, most tokens
    of a request, most experts of a token, and what the handshake chose.

    `local_ids` serves version 1, whose requests name experts by global id: by layer, the local id
    of each global one, -1 for those that are not here.
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
        """Take note of a request's place in its link.

        Raises: ProtocolError under the code ``stale`` if it does not come after the last one.
        """
        if sequence <= self.last_sequence:
            raise ProtocolError(f"request {sequence} came after {self.last_sequence}", code="stale")
        self.last_sequence = sequence


@dataclass(slots=True, eq=False)
class ReceivedRequest:
    """A well-formed request at the daemon: from which link, and what, and how long it has waited
    there since it arrived."""

    link_id: str
    header: ExpertRequest
    batch: RoutedBatch
    waited_s: float = 0.0
    routing_bound: int = 0
    """The routing is known to be sound for so many experts or more; 0 if it was not looked at."""

    def check(self, *, hidden_size: int, num_experts: int) -> None:
        """RoutedBatch.check, unless the transport has done it already.

        Raises: ProtocolError naming the first array that is wrong.
        """
        is_sound = 0 < self.routing_bound <= num_experts
        if not is_sound or self.batch.hidden_shape[1] != hidden_size:
            self.batch.check(hidden_size=hidden_size, num_experts=num_experts)

    @property
    def is_late(self) -> bool:
        """Whether nobody waits for its reply any more."""
        return self.waited_s * 1e3 > self.header.deadline_ms
