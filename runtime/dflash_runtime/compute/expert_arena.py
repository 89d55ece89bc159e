"""Experts that are read from the disk when they are used: what a backend tells of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """What an arena has done so far."""

    num_slots: int
    """Experts that it has room for."""
    found: int
    """Experts of batches that were there."""
    missed: int
    failed: int
    """Of these, used where the file is mapped, as a read failed or took too long."""
    read_bytes: int
    read_s: float
    """In which batches waited."""
    prefetched: int = 0
    """Experts that a step's layer had read for the next one, by its router."""
    prefetched_used: int = 0
    checked: int = 0
    """Experts that layers chose after this was predicted."""
    predicted: int = 0
    """Those of them that were predicted."""
    half_life: float = 0.0
    """Tokens after which a use counts half, as to which experts stay."""


class ExpertArena(Protocol):
    """Memory for some of the experts of a file; see `ComputeBackend.bring_experts`."""

    def stats(self) -> ArenaStats:
        """Counts so far."""

    def warn(self) -> None:
        """Say, once, that reads have failed."""

    def close(self) -> None:
        """Its banks must not be used again. Idempotent."""
