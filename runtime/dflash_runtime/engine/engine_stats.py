"""What an engine has counted since it was opened."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash_runtime.compute.expert_arena import ArenaStats
from dflash_runtime.compute.kv_cache import CacheStats
from dflash_runtime.compute.slot_stats import SlotStats
from dflash_runtime.experts.events import Event
from dflash_runtime.experts.telemetry import (
    ExpertMemoryStats,
    HitCounts,
    MoveStats,
    OwnerStats,
)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the counters since the engine was opened: owners by name, events in order.

    Nothing changes it, so that any thread may read it.
    """

    owners: dict[str, OwnerStats]
    events: list[Event]
    selections: dict[int, list[int]]
    """How often each expert was chosen: by layer id, then by global expert id. Steps that a device
    runs by itself are added when a generation ends, including the one or two discarded ones that
    were launched after its last."""
    hits: HitCounts = field(default_factory=HitCounts)
    """How many chosen experts were local."""
    moves: MoveStats = field(default_factory=MoveStats)
    """Experts that were moved between this process's owners."""
    disk: ArenaStats | None = None
    """Experts that are read from the disk; None if all are in memory."""
    slots: SlotStats | None = None
    """Experts that steps keep on a device besides those that live there; None if they keep none.
    Added as selections are."""
    memory: ExpertMemoryStats | None = None
    """Memory of a device that its experts can give back; None if they cannot."""
    daemon_memory: dict[str, ExpertMemoryStats] = field(default_factory=dict)
    """By daemon, the same of its device, for experts that the parent's processor can take over; in
    bytes of the model's file. Without daemons of which none can leave."""
    cache: CacheStats = field(default_factory=CacheStats)
