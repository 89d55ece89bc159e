"""Owners of experts that are not asked, for passes that belong to no request: trials, timings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_protocol.batch import Hidden, Sums
from dflash_protocol.ids import AnyArray, F64Array, I32Array, Phase


class AbsentOwners:
    """Implements backend.RemoteExperts: remote sums are zero, nothing is counted. Immutable."""

    may_offload = False

    def __init__(self, local_experts_mask: Callable[[int], npt.NDArray[np.bool_]]) -> None:
        """`local_experts_mask`: as RemoteExperts.local_experts_mask."""
        self.local_experts_mask = local_experts_mask

    def count_local(
        self, phase: Phase, *, num_tokens: int, num_pairs: int, num_layers: int = 1
    ) -> None:
        """Nothing."""

    def count_selections(self, phase: Phase, layer_id: int, topk_ids: I32Array) -> None:
        """Nothing."""

    def to_offload(self, layer_id: int, num_tokens: int) -> npt.NDArray[np.bool_] | None:
        """None."""
        return None

    def never_offload(self) -> None:
        """Nothing."""

    def begin(
        self,
        layer_id: int,
        hidden: Hidden | None,
        *choice: AnyArray,
        phase: Phase,
        offloaded: AnyArray | None = None,
        counts: AnyArray | None = None,
        mailed: frozenset[int] = frozenset(),
    ) -> Any:
        assert hidden is not None  # nothing is offloaded
        return hidden.new_sums()

    def finish(self, ticket: Any, out: F64Array | None = None) -> Sums:
        sums: Sums = ticket
        return sums

    def poll(self) -> None:
        """Nothing."""

    def abandon(self, ticket: Any) -> None:
        """Nothing."""
