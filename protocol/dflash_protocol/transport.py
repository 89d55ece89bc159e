"""What a transport of expert work offers to each side of a link.

Knows nothing of experts: it carries requests and replies that `messages` describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dflash_protocol.ids import F64Array
from dflash_protocol.messages import ExpertRequest
from dflash_protocol.routed_batch import RoutedBatch


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A computed request: sums [T, H] float64, and the time the daemon spent computing."""

    sums: F64Array
    compute_s: float


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
        the daemon refused the request or answered with the wrong shape.
        """

    def forget(self, sequence: int) -> None:
        """Nobody will wait for this request: drop its reply, come or to come."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedRequest:
    """A well-formed request at the daemon: from which link, and what."""

    link_id: str
    header: ExpertRequest
    batch: RoutedBatch
