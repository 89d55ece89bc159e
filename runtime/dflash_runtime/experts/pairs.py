"""A layer's (token, expert, weight) triples, and their split by owner. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dflash_protocol.ids import F32Array, I32Array, I64Array
from dflash_protocol.placement import LayerRouting
from dflash_protocol.ring import compiled as ring_native

_FEW_PAIRS = 64
"""Up to this many pairs, numpy is no slower than the fixed cost of calling compiled code."""


@dataclass(slots=True)
class Pairs:
    """Some of a layer's (token, expert, weight) triples. Shapes: all [P]."""

    token_indices: I32Array
    global_expert_ids: I32Array
    weights: F32Array
    counts: I64Array | None = None
    """Number of pairs of each expert, if counted. Shapes: [E]."""

    @property
    def num_pairs(self) -> int:
        return int(self.token_indices.size)

    def where(self, chosen: npt.NDArray[np.bool_]) -> Pairs:
        """Those that are `chosen`. Shapes: chosen [P]."""
        places = np.flatnonzero(chosen)  # for thousands, a tenth of the time of boolean indexing
        return Pairs(
            self.token_indices[places], self.global_expert_ids[places], self.weights[places]
        )


@dataclass(frozen=True, slots=True)
class Share:
    """The pairs of some experts."""

    pairs: Pairs
    num_whole_tokens: int
    """Tokens all of whose experts are among them."""
    counts: I64Array | None
    """How often each expert was routed to, all experts included, if counted. Shapes: [E]."""


def all_pairs(topk_ids: I32Array, topk_weights: F32Array) -> Pairs:
    """All pairs of a layer, in order of tokens. Shapes: both [T, K]."""
    return Pairs(_tokens_of_pairs(*topk_ids.shape), topk_ids.reshape(-1), topk_weights.reshape(-1))


def share_of(topk_ids: I32Array, topk_weights: F32Array, is_some: npt.NDArray[np.bool_]) -> Share:
    """The pairs of some experts, in order of tokens. Shapes: topk_* [T, K]; is_some [E]."""
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
            pairs = Pairs(
                tokens[:num_pairs], ids[:num_pairs], weights[:num_pairs], counts * is_some
            )
            return Share(pairs, num_whole, counts)
    every = all_pairs(topk_ids, topk_weights)
    pairs = every.where(is_some[every.global_expert_ids])
    num_whole = num_tokens if pairs.num_pairs == topk_ids.size else 0
    if not num_whole and num_tokens > 1:
        of_token = np.bincount(pairs.token_indices, minlength=num_tokens)
        num_whole = int(np.count_nonzero(of_token == num_used))
    return Share(pairs, num_whole, None)


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
    owner_of_pair = routing.owner_index[pairs.global_expert_ids]
    num_pairs_of_owner = np.bincount(owner_of_pair + 1)  # first those without an owner
    if num_pairs_of_owner[-1] == pairs.num_pairs:
        yield num_pairs_of_owner.size - 2, pairs
        return
    for owner_index in (np.flatnonzero(num_pairs_of_owner) - 1).tolist():
        yield owner_index, pairs.where(owner_of_pair == owner_index)


def concatenated(shares: Sequence[Pairs]) -> Pairs:
    return Pairs(
        np.concatenate([share.token_indices for share in shares] or [np.empty(0, np.int32)]),
        np.concatenate([share.global_expert_ids for share in shares] or [np.empty(0, np.int32)]),
        np.concatenate([share.weights for share in shares] or [np.empty(0, np.float32)]),
    )
