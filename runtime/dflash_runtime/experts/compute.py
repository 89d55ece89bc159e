"""ExpertCompute, the interface of an owner of experts to the parent, and its counters.

An owner gets batches of its own experts, already routed, and returns weighted sums.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Protocol

from dflash_protocol.batch import Hidden, Pairs, RoutedBatch, Sums
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
    """How a daemon was last reached: ``stream`` or ``shared``."""
    device: str = ""
    """The device that a daemon reports; empty for this process."""
    is_lost: bool = False
    """Whether a daemon cannot be reached now."""
    requests: int = 0
    tokens: int = 0
    pairs: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    wait_s: float = 0.0
    """Time the parent waited for this owner."""
    restarts: int = 0
    retries: int = 0
    """Batches of this owner that failed and were computed by another one."""
    fallbacks: int = 0
    """Retries that needed the fallback, since no replica was left."""
    checksum_failures: int = 0
    """Requests that failed because they, or their reply, were damaged in transit."""
    deadline_failures: int = 0
    """Requests that failed because they took too long."""
    not_finite: int = 0
    """Requests whose reply was NaN or infinite though the rows were not; recomputed by another
    owner."""
    checked: int = 0
    """Batches that the parent computed too, and compared."""
    wrong_replies: int = 0
    """Checked batches that were wrong: the daemon is dropped at the first."""
    stale: int = 0
    """Messages that answered no pending request."""
    widened: int = 0
    """Messages sent in a wider type because the negotiated one could not hold their values."""
    breaker: str = ""
    """State of a daemon's circuit breaker: ``closed``, ``open`` or ``half-open``."""
    breaker_opened: int = 0
    """Times the breaker opened."""
    breaker_refused: int = 0
    """Batches not sent because the breaker was open."""
    daemon_late: int = 0
    """Requests that the daemon dropped because their deadline had passed, of all its parents, since
    it was started. This and the next two are as of its last heartbeat."""
    daemon_stale: int = 0
    daemon_checksum_failures: int = 0
    phases: dict[Phase, PhaseStats] = field(default_factory=dict)
    """By phase, for phases that have occurred."""

    def of_phase(self, phase: Phase) -> PhaseStats:
        stats = self.phases.get(phase)
        if stats is None:
            stats = self.phases[phase] = PhaseStats()
        return stats

    def copy(self) -> OwnerStats:
        """These counters as they are now, which nothing changes any more."""
        phases = {phase: each.copy() for phase, each in self.phases.items()}
        return replace(self, phases=phases)

    def add_up_phases(self) -> None:
        """Set the totals to the sums over all phases."""
        for name in ("requests", "tokens", "pairs", "bytes_sent", "bytes_received"):
            setattr(self, name, sum(getattr(phase, name) for phase in self.phases.values()))
        self.wait_s = sum(phase.wait_s + phase.receive_s for phase in self.phases.values())

    @property
    def troubles(self) -> str:
        """Problems in words; empty if none is known."""
        parts = []
        if self.breaker_opened:
            times = noun(self.breaker_opened, "time")
            parts.append(f"breaker {self.breaker}, opened {self.breaker_opened} {times}")
        if self.wrong_replies:
            parts.append("answered wrongly and is not used any more")
        for count, what in (
            (self.daemon_late, "late"),
            (self.daemon_stale, "stale"),
            (self.daemon_checksum_failures, "damaged"),
        ):
            if count:
                parts.append(f"the daemon dropped {count} {what}")
        return ", ".join(parts)

    def as_record(self) -> dict[str, object]:
        """All counters by name, as in ``--json``."""
        record: dict[str, object] = {
            field_.name: getattr(self, field_.name) for field_ in fields(self)
        }
        record["kind"] = self.kind.value
        record["phases"] = {phase.value: each.as_record() for phase, each in self.phases.items()}
        return record


@dataclass(slots=True, eq=False)
class Ticket:
    """Work that an owner has begun, to be finished or abandoned once."""

    layer_id: int
    phase: Phase
    rows: Hidden
    pairs: Pairs
    """Their expert ids are the owner's local ids."""


class ExpertCompute(Protocol):
    """One owner of experts. Used by one thread, and only by the runtime.

    A device asks such owners that have a `mail_route` itself: one launch posts to all of a layer's,
    so that they are routes of the device's own kernels and not calls here.
    """

    @property
    def stats(self) -> OwnerStats:
        """The counters themselves, brought up to date; for the thread that uses the owner."""

    @property
    def pairs_per_s(self) -> float:
        """The owner's rate as it reported it before any request; 0 if it did not."""

    def begin(self, layer_id: int, rows: Hidden, pairs: Pairs, *, phase: Phase) -> Ticket:
        """Begin to compute pairs, whose expert ids are this owner's local ids. Shapes: rows [T, H],
        which must not change until the ticket is finished or abandoned.

        Raises: DaemonUnavailable if the owner cannot take work now.
        """

    def poll(self, *, until_sent: bool = False) -> None:
        """Make progress with what was begun, without waiting; with `until_sent` after waiting until
        all of it is sent that has room. Raises: DeviceUnavailable."""

    def finish(self, ticket: Ticket, out: Sums) -> None:
        """Wait for a ticket and add its weighted sums to `out` [T, H], on a device if the ticket's
        rows are.

        Raises: DaemonUnavailable if the owner was lost or late; `out` is then unchanged.
        """

    def abandon(self, ticket: Ticket) -> None:
        """Drop a ticket that will not be finished."""

    def mail_route(self, local_ids: Mapping[int, I32Array]) -> MailRoute | None:
        """A route to a device that computes these experts through a mailbox; None if there is none
        now. The same object as before while it is valid. `local_ids`: see MailRoute."""

    def close(self) -> None:
        """Release what this owner holds."""


class LocalExpertCompute:
    """Implements ExpertCompute in this process. It computes in `finish`, so that daemons, which
    were all asked before, compute at the same time."""

    def __init__(
        self, kind: OwnerKind, banks: dict[int, ExpertBank], *, pairs_per_s: float = 0.0
    ) -> None:
        self.pairs_per_s = pairs_per_s
        self.stats = OwnerStats(kind, sum(bank.num_experts for bank in banks.values()))
        self._banks = banks

    def begin(self, layer_id: int, rows: Hidden, pairs: Pairs, *, phase: Phase) -> Ticket:
        return Ticket(layer_id, phase, rows, pairs)

    def poll(self, *, until_sent: bool = False) -> None:
        """Do nothing: work is done in `finish`."""

    def finish(self, ticket: Ticket, out: Sums) -> None:
        batch = RoutedBatch.group(ticket.phase, ticket.rows, ticket.pairs)
        bank = self._banks[ticket.layer_id]
        started_s = time.perf_counter()
        if out.is_on_device:
            out.add(sums_of(bank, batch))
        else:
            bank.accumulate(batch, out.to_host())
        phase = self.stats.of_phase(ticket.phase)
        phase.compute_s += time.perf_counter() - started_s
        num_tokens, num_pairs = batch.num_tokens, batch.num_pairs
        for counted in (self.stats, phase):
            counted.requests += 1
            counted.tokens += num_tokens
            counted.pairs += num_pairs

    def abandon(self, ticket: Ticket) -> None:
        """Do nothing: work is done in `finish`."""

    def mail_route(self, local_ids: Mapping[int, I32Array]) -> None:
        """None: this process computes without a mailbox."""

    def close(self) -> None:
        self._banks.clear()
