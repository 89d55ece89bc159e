"""ExpertCompute: what every owner of experts offers to the parent, and its counters.

Knows nothing of routing: it gets a batch of its own experts and returns weighted sums.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Protocol

import numpy as np

from dflash_protocol.batch import RoutedBatch, Sums
from dflash_protocol.ids import I32Array, Phase
from dflash_protocol.process.output import noun
from dflash_runtime.compute import ExpertBank
from dflash_runtime.compute.backend import MailRoute, sums_of
from dflash_runtime.experts.telemetry import PhaseStats


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
    transport: str = ""
    """How a daemon was reached last: ``stream`` or ``shared``."""
    device: str = ""
    """What a daemon computes on, as it said; empty for this process."""
    is_lost: bool = False
    """A daemon that cannot be reached now."""
    requests: int = 0
    tokens: int = 0
    pairs: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    wait_s: float = 0.0
    """Time the parent stood still for this owner."""
    restarts: int = 0
    retries: int = 0
    """Batches of this owner that failed and were computed elsewhere."""
    fallbacks: int = 0
    """Those of them for which the fallback was needed, since no replica is left."""
    checksum_failures: int = 0
    """Requests that failed since they, or their reply, were damaged on the way."""
    deadline_failures: int = 0
    """Requests that failed since they took too long."""
    not_finite: int = 0
    """Requests whose reply was NaN or infinite though the rows were not; computed elsewhere."""
    checked: int = 0
    """Batches that were computed here too, and compared."""
    wrong_replies: int = 0
    """Those of them that were wrong: the daemon is given up at the first."""
    stale: int = 0
    """Messages that answered nothing that was waited for."""
    widened: int = 0
    """Messages that went in a wide type since the negotiated one would not hold their values."""
    breaker: str = ""
    """State of a daemon's circuit breaker: ``closed``, ``open`` or ``half-open``."""
    breaker_opened: int = 0
    """Times it opened."""
    breaker_refused: int = 0
    """Batches that were not even sent since it was open."""
    daemon_late: int = 0
    """Requests that the daemon dropped since their deadline had passed, of all its parents and
    since it was started; so are the next two, as its last heartbeat said."""
    daemon_stale: int = 0
    daemon_checksum_failures: int = 0
    phases: dict[Phase, PhaseStats] = field(default_factory=dict)
    """By phase, once there was one."""

    def of_phase(self, phase: Phase) -> PhaseStats:
        stats = self.phases.get(phase)
        if stats is None:
            stats = self.phases[phase] = PhaseStats()
        return stats

    def add_up_phases(self) -> None:
        """Have the sums over all phases be those of what was counted by phase."""
        for name in ("requests", "tokens", "pairs", "bytes_sent", "bytes_received"):
            setattr(self, name, sum(getattr(phase, name) for phase in self.phases.values()))
        self.wait_s = sum(phase.wait_s + phase.receive_s for phase in self.phases.values())

    @property
    def troubles(self) -> str:
        """What is not as it should be, for people; empty if nothing is known."""
        parts = []
        if self.breaker_opened:
            times = noun(self.breaker_opened, "time")
            parts.append(f"breaker {self.breaker}, opened {self.breaker_opened} {times}")
        if self.wrong_replies:
            parts.append("answered wrongly and is used no more")
        for count, what in (
            (self.daemon_late, "late"),
            (self.daemon_stale, "stale"),
            (self.daemon_checksum_failures, "damaged"),
        ):
            if count:
                parts.append(f"the daemon dropped {count} {what}")
        return ", ".join(parts)

    def as_record(self) -> dict[str, object]:
        """All of it as numbers, texts and maps by name, as in ``--json``."""
        record: dict[str, object] = {
            field_.name: getattr(self, field_.name) for field_ in fields(self)
        }
        record["kind"] = self.kind.value
        record["phases"] = {phase.value: each.as_record() for phase, each in self.phases.items()}
        return record


@dataclass(slots=True, eq=False)
class Ticket:
    """One submitted batch, to be collected once."""

    layer_id: int
    batch: RoutedBatch


class ExpertCompute(Protocol):
    """One owner's way to get its experts computed. Used by one thread."""

    @property
    def stats(self) -> OwnerStats: ...

    @property
    def pairs_per_s(self) -> float:
        """What it said it computes, before anything was asked of it; 0 if it said nothing."""

    def submit(self, layer_id: int, batch: RoutedBatch) -> Ticket:
        """Start computing; expert ids are this owner's local ids.

        Raises: DaemonUnavailable if the owner cannot take work now.
        """

    def collect(self, ticket: Ticket, out: Sums) -> None:
        """Wait for a ticket and add its weighted sums to `out` [T, H] float64, which are on a
        device if the batch's rows are.

        Raises: DaemonUnavailable if the owner was lost or late; `out` is then unchanged.
        """

    def push(self, ticket: Ticket) -> None:
        """Have all of it on its way that can be, before anybody waits for other owners."""

    def poll(self) -> None:
        """Go on with whatever has been submitted, as far as nothing has to be waited for."""

    def abandon(self, ticket: Ticket) -> None:
        """Nobody will collect this ticket: forget it."""

    def mail_route(self, local_ids: Mapping[int, I32Array]) -> MailRoute | None:
        """A way to have these experts computed by a device that answers ours; None: there is none
        now. The same as before, if that still holds. `local_ids`: as the route has them."""

    def close(self) -> None:
        """Release what this owner holds."""


class LocalExpertCompute:
    """Computes in this process, in `collect`, so that daemons work meanwhile."""

    def __init__(
        self, kind: OwnerKind, banks: dict[int, ExpertBank], *, pairs_per_s: float = 0.0
    ) -> None:
        self.pairs_per_s = pairs_per_s
        self.stats = OwnerStats(kind, sum(bank.num_experts for bank in banks.values()))
        self._banks = banks

    def submit(self, layer_id: int, batch: RoutedBatch) -> Ticket:
        return Ticket(layer_id, batch)

    def collect(self, ticket: Ticket, out: Sums) -> None:
        batch, bank = ticket.batch, self._banks[ticket.layer_id]
        started_s = time.perf_counter()
        if isinstance(out, np.ndarray):
            bank.accumulate(batch, out)
        else:
            out.add(sums_of(bank, batch))
        phase = self.stats.of_phase(batch.phase)
        phase.compute_s += time.perf_counter() - started_s
        for counted in (self.stats, phase):
            counted.requests += 1
            counted.tokens += batch.num_tokens
            counted.pairs += batch.num_pairs

    def push(self, ticket: Ticket) -> None:
        """There is no way to go."""

    def poll(self) -> None:
        """Nothing was begun; nor is there anything to abandon."""

    def abandon(self, ticket: Ticket) -> None:
        """Nothing was begun."""

    def mail_route(self, local_ids: Mapping[int, I32Array]) -> None:
        """None: this process computes."""

    def close(self) -> None:
        self._banks.clear()
