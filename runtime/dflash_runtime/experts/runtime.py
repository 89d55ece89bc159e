"""MoeExpertComputeRuntime: the one boundary through which routed experts are computed.

It splits a layer's routing by owner, submits to all of them, collects, and recomputes the pairs of
a lost owner on the fallback, so that a fault costs time and never a token.
Knows nothing of architectures, tokens or sockets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ids import F32Array, F64Array, I32Array, Phase
from dflash_protocol.placement import Placement
from dflash_protocol.routed_batch import group_by_expert
from dflash_runtime.experts.compute import ExpertCompute, OwnerKind, OwnerStats, Ticket


@dataclass(frozen=True, slots=True)
class _Pairs:
    """One owner's share of a layer. Shapes: all [P]."""

    token_indices: I32Array
    global_expert_ids: I32Array
    weights: F32Array


class MoeExpertComputeRuntime:
    """Computes routed experts by placement.

    `owners` are in the placement's order. `fallback` holds every expert under its global id; it is
    None when all experts are local, or when daemons are required. Used by one thread.
    Owns: owners and fallback.
    """

    def __init__(
        self,
        placement: Placement,
        owners: Sequence[ExpertCompute],
        *,
        fallback: ExpertCompute | None,
    ) -> None:
        assert len(owners) == len(placement.owners)
        self._placement = placement
        self._owners = tuple(owners)
        self._fallback = fallback

    def compute(
        self,
        layer_id: int,
        hidden: F32Array,
        topk_ids: I32Array,
        topk_weights: F32Array,
        *,
        phase: Phase,
    ) -> F32Array:
        """Weighted sum of each token's chosen experts.

        Partial sums are added in float64 and rounded once, so the split does not show in the bits.
        Shapes: hidden [T, H]; topk_ids [T, K] int32 global ids; topk_weights [T, K]; result [T, H].
        Raises: DaemonUnavailable if an owner is lost and there is no fallback.
        """
        sums = np.zeros(hidden.shape, dtype=np.float64)
        in_flight: list[tuple[ExpertCompute, Ticket, _Pairs]] = []
        orphans: list[_Pairs] = []
        for owner_index, pairs in self._split(layer_id, topk_ids, topk_weights):
            owner = self._owners[owner_index]
            local_ids = self._placement.routing[layer_id].local_expert_id[pairs.global_expert_ids]
            batch = group_by_expert(
                hidden, pairs.token_indices, local_ids, pairs.weights, phase=phase
            )
            try:
                in_flight.append((owner, owner.submit(layer_id, batch), pairs))
            except DaemonUnavailable:
                if self._fallback is None:
                    raise
                orphans.append(pairs)
        # What is local is computed in `collect`: first of all, while the daemons are at work.
        in_flight.sort(key=lambda entry: entry[0].stats.kind is not OwnerKind.LOCAL)
        for owner, ticket, pairs in in_flight:
            try:
                owner.collect(ticket, sums)
            except DaemonUnavailable:
                if self._fallback is None:
                    raise
                orphans.append(pairs)
        for pairs in orphans:
            self._recompute(layer_id, hidden, pairs, phase, sums)
        return sums.astype(np.float32)

    def stats(self) -> dict[str, OwnerStats]:
        """Counters by owner name; the fallback's under ``fallback`` once it has been used."""
        counters = {
            name: owner.stats
            for name, owner in zip(self._placement.owner_names, self._owners, strict=True)
        }
        if self._fallback is not None and self._fallback.stats.requests:
            counters["fallback"] = self._fallback.stats
        return counters

    def close(self) -> None:
        for owner in self._owners:
            owner.close()
        if self._fallback is not None:
            self._fallback.close()

    def _split(
        self, layer_id: int, topk_ids: I32Array, topk_weights: F32Array
    ) -> Iterator[tuple[int, _Pairs]]:
        """Each owner's pairs; owners without any are left out."""
        owner_of_pair = self._placement.routing[layer_id].owner_index[topk_ids]
        for owner_index in range(len(self._owners)):
            token_indices, slots = np.nonzero(owner_of_pair == owner_index)
            if token_indices.size:
                yield (
                    owner_index,
                    _Pairs(
                        token_indices.astype(np.int32),
                        topk_ids[token_indices, slots],
                        topk_weights[token_indices, slots],
                    ),
                )

    def _recompute(
        self, layer_id: int, hidden: F32Array, pairs: _Pairs, phase: Phase, sums: F64Array
    ) -> None:
        assert self._fallback is not None
        batch = group_by_expert(
            hidden, pairs.token_indices, pairs.global_expert_ids, pairs.weights, phase=phase
        )
        self._fallback.collect(self._fallback.submit(layer_id, batch), sums)
