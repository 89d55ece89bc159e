"""Experts that decode steps keep on a device besides those that live there: what a backend tells of
them, and of what its steps chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from dflash_protocol.ids import I64Array


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """What steps have done with slots."""

    found: int = 0
    """(token, expert) pairs whose expert was there, or was fetched for an earlier pair of the
    step."""
    fetched: int = 0
    """Experts that were read over the bus."""
    kept: int = 0
    """Of these, experts that stayed for other tokens."""
    fetched_bytes: int = 0

    def __add__(self, other: SlotCounts) -> Self:
        return replace(
            self,
            found=self.found + other.found,
            fetched=self.fetched + other.fetched,
            kept=self.kept + other.kept,
            fetched_bytes=self.fetched_bytes + other.fetched_bytes,
        )

    @property
    def num_pairs(self) -> int:
        """Pairs that the device has computed though their experts live elsewhere."""
        return self.found + self.fetched


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStats(SlotCounts):
    """The same since the start."""

    num_slots: int
    """Experts of each layer that there is room for."""
    pins: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Experts that do not leave once they are there: global ids by layer id."""


@dataclass(frozen=True, slots=True, eq=False)
class MailedCounts:
    """What steps have chosen in a layer whose other owners the device asks itself."""

    selections: I64Array
    """How often each expert was chosen. Shapes: [E]."""
    slots: SlotCounts = SlotCounts()

    def __add__(self, other: MailedCounts) -> MailedCounts:
        return MailedCounts(self.selections + other.selections, self.slots + other.slots)
