"""MoeExpertComputeRuntime: the one boundary through which routed experts are computed.

It splits a layer's routing by owner, submits to all of them, collects, and recomputes the pairs of
a lost owner on a replica or the fallback, so that a fault costs time and never a token.
Knows nothing of architectures, tokens or sockets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ids import F32Array, F64Array, I32Array, Phase
from dflash_protocol.placement import LayerRouting, Placement
from dflash_protocol.routed_batch import group_by_expert
from dflash_runtime.experts.compute import ExpertCompute, OwnerKind, OwnerStats, Ticket
from dflash_runtime.experts.selections import SelectionCounts


@dataclass(slots=True)
class _Pairs:
    """Some of a layer's (token, expert, weight) triples. Shapes: all [P]."""

    token_indices: I32Array
    global_expert_ids: I32Array
    weights: F32Array

    @property
    def num_pairs(self) -> int:
        return int(self.token_indices.size)


@dataclass(slots=True)
class _InFlight:
    """A submitted share of a layer that is still to be collected."""

    owner: ExpertCompute
    owner_index: int
    ticket: Ticket
    pairs: _Pairs


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
        self._is_daemon = tuple(owner.stats.kind is OwnerKind.DAEMON for owner in owners)
        self._lost_reason = ""
        self._selections = SelectionCounts(placement.experts_per_layer)

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
        Raises: DaemonUnavailable if all owners of an expert are lost and there is no fallback.
        """
        sums = np.zeros(hidden.shape, dtype=np.float64)
        num_tokens, num_used = topk_ids.shape
        if num_tokens == 1:
            token_indices = np.zeros(num_used, dtype=np.int32)
        else:
            token_indices = np.repeat(np.arange(num_tokens, dtype=np.int32), num_used)
        pairs = _Pairs(token_indices, topk_ids.reshape(-1), topk_weights.reshape(-1))
        self._selections.add(layer_id, pairs.global_expert_ids)
        lost: frozenset[int] = frozenset()
        while pairs.num_pairs:
            orphans = self._compute_round(layer_id, hidden, pairs, phase, lost, sums)
            lost = lost.union(orphans)
            self._count_retries(layer_id, orphans, lost)
            pairs = _concatenated(list(orphans.values()))
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

    def selections(self) -> dict[int, list[int]]:
        """How often each expert was chosen: by layer id, then by global id. From any thread."""
        return self._selections.snapshot()

    def close(self) -> None:
        for owner in self._owners:
            owner.close()
        if self._fallback is not None:
            self._fallback.close()

    def _is_computed_here(self, entry: _InFlight) -> bool:
        return entry.owner_index < 0 or not self._is_daemon[entry.owner_index]

    def _count_retries(
        self, layer_id: int, orphans: dict[int, _Pairs], lost: frozenset[int]
    ) -> None:
        """Count batches that have to be computed elsewhere, at the owners that were to do it."""
        for owner_index, pairs in orphans.items():
            routing = self._placement.routing_without(lost)[layer_id]
            stats = self._owners[owner_index].stats
            stats.retries += 1
            is_homeless = (routing.owner_index[pairs.global_expert_ids] < 0).any()
            stats.fallbacks += bool(is_homeless and self._fallback is not None)

    def _compute_round(
        self,
        layer_id: int,
        hidden: F32Array,
        pairs: _Pairs,
        phase: Phase,
        lost: frozenset[int],
        sums: F64Array,
    ) -> dict[int, _Pairs]:
        """Have pairs computed by the first of their owners that is not `lost`, else the fallback.

        Adds to `sums`; returns the pairs of owners that were lost meanwhile, by owner index.
        """
        routing = self._placement.routing_without(lost)[layer_id]
        orphans: dict[int, _Pairs] = {}
        in_flight: list[_InFlight] = []
        try:
            for owner_index, share in _split(pairs, routing):
                owner, expert_ids = self._fallback, share.global_expert_ids
                if owner_index >= 0:
                    owner = self._owners[owner_index]
                    if not routing.is_identity:
                        expert_ids = routing.local_expert_id[expert_ids]
                elif owner is None:
                    raise DaemonUnavailable(f"{self._lost_reason}; daemons are required")
                batch = group_by_expert(
                    hidden, share.token_indices, expert_ids, weights=share.weights, phase=phase
                )
                try:
                    ticket = owner.submit(layer_id, batch)
                except DaemonUnavailable as error:
                    orphans[owner_index] = share
                    self._lost_reason = str(error)
                else:
                    in_flight.append(_InFlight(owner, owner_index, ticket, share))
            # What is computed in this process is computed in `collect`: it is popped first, while
            # the daemons are at work.
            in_flight.sort(key=self._is_computed_here)
            while in_flight:
                entry = in_flight[-1]
                try:
                    entry.owner.collect(entry.ticket, sums)
                except DaemonUnavailable as error:
                    orphans[entry.owner_index] = entry.pairs
                    self._lost_reason = str(error)
                in_flight.pop()
        finally:
            for entry in in_flight:
                entry.owner.abandon(entry.ticket)
        return orphans


def _split(pairs: _Pairs, routing: LayerRouting) -> Iterator[tuple[int, _Pairs]]:
    """Each owner's share; owner -1 is nobody."""
    if routing.sole_owner is not None:
        yield routing.sole_owner, pairs
        return
    owner_of_pair = routing.owner_index[pairs.global_expert_ids]
    num_pairs_of_owner = np.bincount(owner_of_pair + 1)  # nobody's first
    if num_pairs_of_owner[-1] == pairs.num_pairs:
        yield num_pairs_of_owner.size - 2, pairs
        return
    for owner_index in (np.flatnonzero(num_pairs_of_owner) - 1).tolist():
        mine = owner_of_pair == owner_index
        yield (
            owner_index,
            _Pairs(pairs.token_indices[mine], pairs.global_expert_ids[mine], pairs.weights[mine]),
        )


def _concatenated(shares: list[_Pairs]) -> _Pairs:
    return _Pairs(
        np.concatenate([share.token_indices for share in shares] or [np.empty(0, np.int32)]),
        np.concatenate([share.global_expert_ids for share in shares] or [np.empty(0, np.int32)]),
        np.concatenate([share.weights for share in shares] or [np.empty(0, np.float32)]),
    )
