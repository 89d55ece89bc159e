"""Experts that are read from the disk when they are used: how a backend keeps them, and what it
tells of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dflash_protocol.ids import F64Array
from dflash_runtime.compute.half_lives import CachePolicy


@dataclass(frozen=True, slots=True)
class ArenaOptions:
    """How experts are kept in memory, and read into it."""

    num_bytes: int
    """Memory for them."""
    looks_ahead: bool = True
    """A step's layer has read what the next one will probably choose."""
    policy: CachePolicy = CachePolicy.AUTO
    """Which experts leave."""
    shares: Mapping[int, F64Array] = field(default_factory=dict)
    """By layer id, how many of a token's selections are expected to be each expert. Those with the
    most are read at once. Shapes: [E], by global id."""
    spare_bytes: int = 0
    """Of the host's memory that stays free for other programs, for which experts leave; 0: they
    never do."""
    pins: int = 0
    """So many of the hottest experts of a layer never leave, half of those in memory at most."""
    pins_after: int = 0
    """Tokens that are counted first."""


@dataclass(frozen=True, slots=True)
class LookAheadStats:
    """What layers of steps have predicted of the next ones, and had read for them."""

    checked: int = 0
    """Experts that layers chose after this was predicted."""
    predicted: int = 0
    """Those of them that were predicted."""
    prefetched: int = 0
    """Experts that were read before they were chosen."""
    prefetched_used: int = 0


@dataclass(frozen=True, slots=True)
class PinStats:
    """Experts that never leave."""

    experts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Global ids by layer id; empty until they are pinned."""
    found_before: int = 0
    """Of `ArenaStats.found` and `missed`, those until then."""
    missed_before: int = 0


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """What an arena has done so far."""

    num_slots: int
    """Experts that it has room for."""
    found: int
    """Experts of batches, and of prompts that are computed with copies, that were there."""
    missed: int
    failed: int
    """Of these, used where the file is mapped, as a read failed or took too long; of copies each
    piece counts."""
    read_bytes: int
    read_s: float
    """In which batches waited."""
    look_ahead: LookAheadStats
    half_life: float
    """Tokens after which a use counts half, as to which experts stay."""
    share_found: float | None
    """Share of the experts chosen by recent steps that would be in memory if each layer had an
    equal part of it; None until enough steps were counted."""
    share_found_by_twice: float | None
    """The same with twice the memory."""
    shares_by_half_life: Mapping[str, float]
    """The same with the same memory, for each half-life that is tried, by its tokens; empty until
    enough steps were counted."""
    pins: PinStats


class ExpertArena(Protocol):
    """Memory for some of the experts of a file; see `ComputeBackend.bring_experts`."""

    def stats(self) -> ArenaStats:
        """Counts so far."""

    @property
    def num_bytes(self) -> int:
        """Memory of the experts that it has room for at present."""

    @property
    def empty_bytes(self) -> int:
        """Of these, those that hold no expert yet."""

    def allow(self, num_bytes: int) -> None:
        """Use at most so much of the memory that it was made for, now all of that, or what the
        largest layer needs. Waits for a batch that is computed."""

    def warn(self) -> None:
        """Say, once, that reads have failed."""

    @property
    def limit_s(self) -> float:
        """How long a read may take, after which no more are made."""

    @property
    def address(self) -> int:
        """Of its words, for compiled code."""

    def place_of(self, layer_id: int, global_expert_id: int) -> tuple[int, int] | None:
        """For compiled code that copies an expert (kernels/lent_runs): the address of its layer's
        words, and its number there; None if it is not in its banks."""

    def before_close(self, callback: Callable[[], None]) -> None:
        """Call it when the arena is closed, before its memory is free."""

    def close(self) -> None:
        """Its banks must not be used again. Idempotent."""
