"""ExpertCompute: what every owner of experts offers to the parent, and its counters.

Knows nothing of routing: it gets a batch of its own experts and returns weighted sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dflash_protocol.ids import F64Array
from dflash_protocol.routed_batch import RoutedBatch
from dflash_runtime.compute import ExpertBank


class OwnerKind(StrEnum):
    """Where an owner computes."""

    LOCAL = "local"
    DAEMON = "daemon"
    FALLBACK = "fallback"


@dataclass(slots=True)
class OwnerStats:
    """Counters of one owner since the engine was opened. Bytes count payload frames only."""

    kind: OwnerKind
    num_experts: int
    requests: int = 0
    tokens: int = 0
    pairs: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    wait_s: float = 0.0
    """Time the parent stood still for this owner."""
    restarts: int = 0


@dataclass(slots=True, eq=False)
class Ticket:
    """One submitted batch, to be collected once."""

    layer_id: int
    batch: RoutedBatch


class ExpertCompute(Protocol):
    """One owner's way to get its experts computed. Used by one thread."""

    @property
    def stats(self) -> OwnerStats: ...

    def submit(self, layer_id: int, batch: RoutedBatch) -> Ticket:
        """Start computing; expert ids are this owner's local ids.

        Raises: DaemonUnavailable if the owner cannot take work now.
        """

    def collect(self, ticket: Ticket, out: F64Array) -> None:
        """Wait for a ticket and add its weighted sums to `out` [T, H] float64.

        Raises: DaemonUnavailable if the owner was lost or late; `out` is then unchanged.
        """

    def abandon(self, ticket: Ticket) -> None:
        """Nobody will collect this ticket: forget it."""

    def close(self) -> None:
        """Release what this owner holds."""


class LocalExpertCompute:
    """Computes in this process, in `collect`, so that daemons work meanwhile."""

    def __init__(self, kind: OwnerKind, banks: dict[int, ExpertBank]) -> None:
        self.stats = OwnerStats(kind, sum(bank.num_experts for bank in banks.values()))
        self._banks = banks

    def submit(self, layer_id: int, batch: RoutedBatch) -> Ticket:
        return Ticket(layer_id, batch)

    def collect(self, ticket: Ticket, out: F64Array) -> None:
        batch = ticket.batch
        self._banks[ticket.layer_id].accumulate(batch, out)
        self.stats.requests += 1
        self.stats.tokens += batch.num_tokens
        self.stats.pairs += batch.num_pairs

    def abandon(self, ticket: Ticket) -> None:
        """Nothing was begun."""

    def close(self) -> None:
        self._banks.clear()
