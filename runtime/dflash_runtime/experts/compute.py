"""ExpertCompute, the interface of an owner of experts to the parent; the owner in this process.

An owner gets batches of its own experts, already routed, and returns weighted sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from dflash_protocol.batch import Hidden, Pairs, RoutedBatch, Sums
from dflash_protocol.ids import I32Array, Phase
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.compute import ExpertBank
from dflash_runtime.compute.asking import AskRoute, OwnerTotals
from dflash_runtime.compute.backend import DeviceBank, MailRoute, sums_of
from dflash_runtime.experts.telemetry import OwnerKind, OwnerStats

LocalIds: TypeAlias = Callable[[], Mapping[int, I32Array]]


@dataclass(slots=True, eq=False)
class Ticket:
    """Work that an owner has begun, to be finished or abandoned once."""

    layer_id: int
    phase: Phase
    rows: Hidden
    pairs: Pairs
    """Their expert ids are the owner's local ids."""


class PreparedExperts(Protocol):
    """Other experts that an owner loads, until they are its own or withdrawn. Used by the thread
    that uses the owner."""

    @property
    def is_ready(self) -> bool:
        """Whether it has them. Raises: DflashError, if it cannot have them any more."""

    def wait(self) -> None:
        """Wait until it has them, or cannot have them. Raises: DflashError, as above."""

    def take_over(self) -> None:
        """These are the owner's experts from now on. If it cannot have them any more, it is lost
        until it can. Nothing may be in flight."""

    def withdraw(self) -> None:
        """It keeps those that it has, unless these have taken over."""


class ExpertCompute(Protocol):
    """One owner of experts. Used by one thread, and only by the runtime.

    A device asks such owners that have a `mail_route` itself: one launch posts to all of a layer's,
    so that they are routes of the device's own kernels and not calls here.
    """

    @property
    def stats(self) -> OwnerStats:
        """The counters themselves, brought up to date; for the thread that uses the owner."""

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

    def mail_route(self, owner_index: int, local_ids: LocalIds) -> MailRoute | None:
        """A route to this owner, which is the one of that index, through a mailbox with its device;
        None if there is none now. The same object as before while it is valid. `local_ids` is
        called for a new one: see MailRoute."""

    def ask_route(self, owner_index: int) -> AskRoute | None:
        """A route for compiled code to ask this owner, which is the one of that index; None if it
        cannot be asked so now. The same object as before while it is valid."""

    def count_asked(self, asked: OwnerTotals, phase: Phase = Phase.DECODE) -> None:
        """Count what compiled code has asked of this owner, or has computed in its place."""

    def prepare(self, owned: OwnedExperts) -> PreparedExperts | None:
        """Begin to load other experts beside those of this owner, which it goes on computing. None:
        this owner's are replaced in place.

        Raises: DaemonUnavailable.
        """

    def close(self) -> None:
        """Release what this owner holds."""


class LocalExpertCompute:
    """Implements ExpertCompute in this process. It computes in `finish`, so that daemons, which
    were all asked before, compute at the same time."""

    def __init__(
        self, kind: OwnerKind, banks: dict[int, ExpertBank], *, numeric_class: str = ""
    ) -> None:
        self.stats = OwnerStats(kind, sum(bank.num_experts for bank in banks.values()))
        self.stats.numeric_class = numeric_class
        self.banks = banks

    def begin(self, layer_id: int, rows: Hidden, pairs: Pairs, *, phase: Phase) -> Ticket:
        return Ticket(layer_id, phase, rows, pairs)

    def poll(self, *, until_sent: bool = False) -> None:
        """Do nothing: work is done in `finish`."""

    def finish(self, ticket: Ticket, out: Sums) -> None:
        bank, is_on_device = self.banks[ticket.layer_id], out.is_on_device
        is_here = is_on_device and isinstance(bank, DeviceBank)
        # Only rows that are used leave a device.
        whole_from = None if is_on_device and not is_here else 0
        batch, used = RoutedBatch.group_used(
            ticket.phase, ticket.rows, ticket.pairs, whole_from=whole_from
        )
        started_s = time.perf_counter()
        if is_here:
            out.add(sums_of(bank, batch))
        else:
            out.add_computed(
                batch.rows,
                used,
                lambda rows, sums: bank.accumulate(replace(batch, rows=rows), sums),
            )
        phase = self.stats.of_phase(ticket.phase)
        phase.compute_s += time.perf_counter() - started_s
        num_tokens, num_pairs = batch.num_tokens, batch.num_pairs
        for counted in (self.stats, phase):
            counted.requests += 1
            counted.tokens += num_tokens
            counted.pairs += num_pairs

    def abandon(self, ticket: Ticket) -> None:
        """Do nothing: work is done in `finish`."""

    def mail_route(self, owner_index: int, local_ids: LocalIds) -> None:
        """None: this process computes without a mailbox."""

    def ask_route(self, owner_index: int) -> None:
        """None: it is in this process."""

    def count_asked(self, asked: OwnerTotals, phase: Phase = Phase.DECODE) -> None:
        of_phase = self.stats.of_phase(phase)
        of_phase.compute_s += asked.compute_s
        for counted in (self.stats, of_phase):
            counted.requests += asked.num_requests
            counted.tokens += asked.num_requests
            counted.pairs += asked.num_pairs

    def prepare(self, owned: OwnedExperts) -> None:
        """None: see replacing.replace_experts."""

    def close(self) -> None:
        self.banks.clear()
