"""How captured steps of a host ask the owners of experts from compiled code: routes to daemons, and
what was asked of each owner.

The owners are those of `experts.runtime`, which makes the routes and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dflash_protocol.ids import I64Array, Phase
from dflash_protocol.placement import LayerRouting
from dflash_protocol.transports.lent_slot import LentSlot


@dataclass(frozen=True, slots=True, eq=False)
class AskRoute:
    """A daemon that compiled code asks through a slot of the ring that it shares with us; the same
    object while its session lasts. Used by the thread that runs the model."""

    owner_index: int
    lend: Callable[[], LentSlot]
    """Lends a slot for requests of one step. Raises: DaemonUnavailable."""
    deadline_s: Callable[[Phase, int], float]
    """The deadline of a request of so many pairs."""
    fail: Callable[[LentSlot, int, float], None]
    """Reports that a request in this slot has ended with this status, after so many seconds."""


@dataclass(frozen=True, slots=True)
class OwnerTotals:
    """What one owner has computed in captured steps of one token, each a request. Of this process
    only the counts and `compute_s` are known."""

    num_requests: int
    num_pairs: int
    compute_s: float
    queue_s: float = 0.0
    wait_s: float = 0.0
    trip_s: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True, slots=True)
class AskedLayers:
    """Counts of captured steps since they were taken last."""

    num_layers: int
    num_hot_only: int
    """Layers that needed only this process's device, or the host if it has none."""
    owners: Sequence[OwnerTotals]
    """By owner index."""
    selections: dict[int, I64Array]
    """How often each expert was routed to, by layer id. Shapes: each [E], by global id."""


class AskedOwners(Protocol):
    """Owners that compiled code may ask, through the host's memory."""

    @property
    def num_owners(self) -> int: ...

    @property
    def asks_daemons(self) -> bool:
        """Whether some experts belong to other processes, connected or not."""

    def daemon_threads(self, unknown: int) -> int:
        """How many threads daemons compute with, those of other machines included; `unknown` is
        taken for a daemon that did not say."""

    @property
    def own_index(self) -> int:
        """The owner whose experts this process's host computes; -1 if there is none."""

    @property
    def device_index(self) -> int:
        """The owner whose experts this process's device computes; -1 if there is none."""

    def routing(self, layer_id: int) -> LayerRouting:
        """Who computes which expert."""

    def ask_routes(self) -> Sequence[AskRoute] | None:
        """Routes to all daemons that own experts; None if one of them cannot be asked by compiled
        code now."""

    def is_any_to_be_checked(self, num_requests: int) -> bool:
        """Whether a reply to one of this many requests is to be checked: the host, when it
        asks, then decides about each of them. Else they count as not checked."""

    def count_asked(self, taken: AskedLayers, phase: Phase = Phase.DECODE) -> None:
        """Add to the statistics."""

    def settle_with(self, settle: Callable[[], None] | None) -> None:
        """Have this called before statistics are read; it calls `count_asked`."""
