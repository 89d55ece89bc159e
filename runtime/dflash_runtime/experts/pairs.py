"""A layer's pairs as they were routed, and their split by owner. Pure functions; ids are global."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dflash_protocol.batch import Pairs
from dflash_protocol.ids import F32Array, I32Array, I64Array
from dflash_protocol.placement import LayerRouting, Placement
from dflash_protocol.ring import compiled as ring_native

_FEW_PAIRS = 64
"""Up to this many pairs, numpy is no slower than the fixed cost of calling compiled code."""


def all_pairs(topk_ids: I32Array, topk_weights: F32Array) -> Pairs:
    """All pairs of a layer. Shapes: both [T, K]."""
    return Pairs(_tokens_of_pairs(*topk_ids.shape), topk_ids.reshape(-1), topk_weights.reshape(-1))


def pairs_of_some(
    topk_ids: I32Array, topk_weights: F32Array, is_some: npt.NDArray[np.bool_]
) -> tuple[Pairs, int, I64Array | None]:
    """The pairs of some experts; the number of tokens all of whose experts are among these; and how
    often each expert was routed to, all experts included, if counted.

    Shapes: topk_* [T, K]; is_some [E]; counts [E].
    """
    num_tokens, num_used = topk_ids.shape
    kernels = ring_native.if_compiled()
    if kernels is not None and topk_ids.size > _FEW_PAIRS:
        tokens, ids = np.empty((2, topk_ids.size), np.int32)
        weights, counts = np.empty(topk_ids.size, np.float32), np.zeros(is_some.size, np.int64)
        found = kernels.choose_pairs(
            np.ascontiguousarray(topk_ids).reshape(-1),
            np.ascontiguousarray(topk_weights).reshape(-1),
            num_used,
            is_some.view(np.uint8),
            tokens,
            ids,
            weights,
            counts,
        )
        if found >= 0:
            num_pairs, num_whole = ring_native.two_counts(found)
            own_counts = counts * is_some
            pairs = Pairs(tokens[:num_pairs], ids[:num_pairs], weights[:num_pairs], own_counts)
            return pairs, num_whole, counts
    every = all_pairs(topk_ids, topk_weights)
    pairs = every.where(is_some[every.expert_ids])
    num_whole = num_tokens if pairs.num_pairs == topk_ids.size else 0
    if not num_whole and num_tokens > 1:
        of_token = np.bincount(pairs.token_indices, minlength=num_tokens)
        num_whole = int(np.count_nonzero(of_token == num_used))
    return pairs, num_whole, None


@lru_cache(maxsize=8)
def _tokens_of_pairs(num_tokens: int, num_used: int) -> I32Array:
    """The token of each pair; read-only. Shapes: result [T * K]."""
    indices = np.repeat(np.arange(num_tokens, dtype=np.int32), num_used)
    indices.flags.writeable = False
    return indices


def split_by_owner(pairs: Pairs, routing: LayerRouting) -> Iterator[tuple[int, Pairs]]:
    """Each owner's pairs; owner -1 stands for experts without one."""
    if routing.sole_owner is not None:
        yield routing.sole_owner, pairs
        return
    if pairs.counts is not None:
        owners = routing.owner_index[np.flatnonzero(pairs.counts)]
        if owners.size and (owners == owners[0]).all():
            yield int(owners[0]), pairs
            return
    owner_of_pair = routing.owner_index[pairs.expert_ids]
    if owner_of_pair.size <= _FEW_PAIRS:
        found = sorted(set(owner_of_pair.tolist()))
    else:
        found = (np.flatnonzero(np.bincount(owner_of_pair + 1)) - 1).tolist()
    for owner_index in found:
        yield owner_index, pairs if len(found) == 1 else pairs.where(owner_of_pair == owner_index)


def shared_routing(
    placement: Placement, routing: LayerRouting, pairs: Pairs, *, layer_id: int, never: int | None
) -> LayerRouting:
    """A chunk's routing: experts with several equal owners go to these so that they have about as
    many pairs.

    It follows from the numbers of pairs alone: the expert with most of them first, to the owner
    that has least. `never`: an owner that is asked for none of them; `pairs` have none of its own.
    """
    counts = pairs.counts
    if counts is None:
        counts = np.bincount(pairs.expert_ids, minlength=routing.owner_index.size)
    shared = [
        (-int(counts[expert]), expert, [index for index in able if index != never])
        for expert, able in routing.shared
        if counts[expert]
    ]
    if not shared:
        return routing
    owner_index = routing.owner_index.copy()
    fixed = counts.copy()
    fixed[[expert for _, expert, _ in shared]] = 0
    loads = np.bincount(owner_index + 1, fixed, minlength=len(placement.owners) + 1)[1:].tolist()
    for count, expert, able in sorted(shared):
        owner = min(able, key=loads.__getitem__)
        owner_index[expert] = owner
        loads[owner] -= count
    places = np.arange(owner_index.size)
    local_ids = np.where(
        owner_index >= 0, placement.local_ids(layer_id)[owner_index, places], np.int32(-1)
    )
    return LayerRouting(owner_index, local_ids, sole_owner=None, is_identity=False)


def concatenated(shares: Sequence[Pairs]) -> Pairs:
    """All of them in the order of tokens."""
    if len(shares) == 1:
        return shares[0]
    return Pairs(
        np.concatenate([share.token_indices for share in shares]),
        np.concatenate([share.expert_ids for share in shares]),
        np.concatenate([share.weights for share in shares]),
    ).in_order()
