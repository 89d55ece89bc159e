"""How often each expert was routed to: for heat maps and planners, whichever owner computed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from dflash_protocol.ids import I32Array, I64Array

_FEW_PAIRS = 64
"""Up to this many are counted one by one: a decode step has a handful, and that is faster than a
call into numpy."""


@dataclass(slots=True)
class HitCounts:
    """How many selections were computed by the parent, since the start.

    A layer is counted once for each step and each chunk.
    """

    layers: int = 0
    layers_hot_only: int = 0
    """Layers that needed only the parent's own device."""
    hot: int = 0
    """Selections computed by the parent's own experts; `remote` by daemons, `cold` by the
    fallback."""
    remote: int = 0
    cold: int = 0
    offloaded: int = 0
    """Selections of remote experts that the parent's device computed with weights copied for a
    chunk."""

    def as_record(self) -> dict[str, int]:
        """Counts by name, as in ``--json``."""
        return asdict(self)


class SelectionCounts:
    """Counts by layer and global expert id since the start. Written by one thread.

    Lists of Python ints: adding to eight of them takes half of the fixed cost of numpy, a compiled
    kernel or a memoryview.
    """

    def __init__(self, experts_per_layer: Mapping[int, int]) -> None:
        self._by_layer = {layer: [0] * num for layer, num in experts_per_layer.items()}

    def add(self, layer_id: int, global_expert_ids: I32Array) -> None:
        """Count one layer's selections. Shapes: global_expert_ids [P]."""
        counts = self._by_layer[layer_id]
        if global_expert_ids.size <= _FEW_PAIRS:
            for global_expert_id in global_expert_ids.tolist():
                counts[global_expert_id] += 1
            return
        self.add_counts(layer_id, np.bincount(global_expert_ids, minlength=len(counts)))

    def add_counts(self, layer_id: int, counts: I64Array) -> None:
        """Add counts made by a device or kernel. Shapes: counts [E]."""
        ours = self._by_layer[layer_id]
        ours[:] = [old + new for old, new in zip(ours, counts.tolist(), strict=True)]

    def snapshot(self) -> dict[int, list[int]]:
        """A copy by layer id, each list by global expert id."""
        return {layer_id: counts.copy() for layer_id, counts in self._by_layer.items()}
