"""RoutedBatch: tokens and their (token, expert, weight) triples, grouped by expert as CSR.

Ragged: a token may have 0..K experts here, an owner may get no token at all; nothing is padded.
Knows nothing of who computes it; the expert ids are whatever index space both sides agreed on.

::

    hidden        [T, H] float32     one row a token, each sent once
    expert_ids    [G]    int32       strictly ascending; every group has at least one pair
    group_starts  [G+1]  int32       pairs of group g: group_starts[g] … group_starts[g+1]-1
    token_indices [P]    int32       row of `hidden`; ascending inside a group
    weights       [P]    float32     routing weight of the pair
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import F32Array, I32Array, Phase


@dataclass(slots=True, eq=False)
class RoutedBatch:
    """One layer's expert work for one owner. See the module's drawing for the arrays.

    Not to be changed once made; not frozen, as that would cost every request some µs.
    """

    phase: Phase
    hidden: F32Array
    expert_ids: I32Array
    group_starts: I32Array
    token_indices: I32Array
    weights: F32Array

    @property
    def num_tokens(self) -> int:
        return int(self.hidden.shape[0])

    @property
    def num_pairs(self) -> int:
        return int(self.token_indices.shape[0])

    @property
    def num_groups(self) -> int:
        return int(self.expert_ids.shape[0])

    def check(self, *, hidden_size: int, num_experts: int) -> None:
        """Refuse a batch that came over the wire and does not hold together.

        Raises: ProtocolError naming the first array that is wrong.
        """
        if self.hidden.ndim != 2 or self.hidden.shape[1] != hidden_size:
            raise ProtocolError(f"hidden is {self.hidden.shape}, expected [T, {hidden_size}]")
        num_groups, num_pairs, starts = self.num_groups, self.num_pairs, self.group_starts
        if starts.shape != (num_groups + 1,) or self.weights.shape != (num_pairs,):
            raise ProtocolError("group_starts or weights have the wrong length")
        if starts[0] != 0 or starts[-1] != num_pairs or not (starts[1:] > starts[:-1]).all():
            raise ProtocolError("group_starts do not ascend from 0 to the number of pairs")
        if num_pairs == 0:
            return
        ids, tokens = self.expert_ids, self.token_indices
        if ids[0] < 0 or ids[-1] >= num_experts or not (ids[1:] > ids[:-1]).all():
            raise ProtocolError(f"expert ids must ascend within 0..{num_experts - 1}")
        ascends = tokens[1:] > tokens[:-1]
        ascends[starts[1:-1] - 1] = True  # a new group may begin with any token
        if not ascends.all():
            raise ProtocolError("token indices must ascend within each expert")
        if tokens.min() < 0 or tokens.max() >= self.num_tokens:
            raise ProtocolError(f"token indices must lie within 0..{self.num_tokens - 1}")


def group_by_expert(
    hidden: F32Array,
    token_indices: I32Array,
    expert_ids: I32Array,
    *,
    weights: F32Array,
    phase: Phase,
) -> RoutedBatch:
    """Sort P pairs by (expert, token). A (token, expert) pair may occur once.

    Shapes: hidden [T, H] float32; token_indices, expert_ids [P] int32; weights [P] float32.
    """
    if hidden.shape[0] == 1:  # decode: every pair is a group
        order = expert_ids.argsort()
        return RoutedBatch(
            phase=phase,
            hidden=hidden,
            expert_ids=expert_ids[order],
            group_starts=np.arange(order.size + 1, dtype=np.int32),
            token_indices=token_indices,
            weights=weights[order],
        )
    order = np.lexsort((token_indices, expert_ids))
    return _grouped(hidden, token_indices[order], expert_ids[order], weights[order], phase=phase)


def _grouped(
    hidden: F32Array,
    token_indices: I32Array,
    expert_ids: I32Array,
    weights: F32Array,
    *,
    phase: Phase,
) -> RoutedBatch:
    """The batch of pairs that are in order of (expert, token) already."""
    is_first = np.ones(expert_ids.size, dtype=bool)
    np.not_equal(expert_ids[1:], expert_ids[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    group_starts = np.empty(starts.size + 1, dtype=np.int32)
    group_starts[:-1] = starts
    group_starts[-1] = expert_ids.size
    return RoutedBatch(
        phase=phase,
        hidden=hidden,
        expert_ids=expert_ids[starts],
        group_starts=group_starts,
        token_indices=token_indices,
        weights=weights,
    )


def compact_tokens(batch: RoutedBatch) -> tuple[RoutedBatch, I32Array | None]:
    """Keep only the rows of `hidden` that some pair uses, so that each is sent once and none for
    nothing.

    Returns the batch and the original index of each kept row [T'] int32; or the batch as it was and
    None when every row is used.
    """
    if batch.num_tokens == 1 and batch.num_pairs:  # decode: one token, and it is used
        return batch, None
    is_used = np.zeros(batch.num_tokens, dtype=bool)
    is_used[batch.token_indices] = True
    rows = np.flatnonzero(is_used).astype(np.int32)
    if rows.size == batch.num_tokens:
        return batch, None
    new_index = np.cumsum(is_used, dtype=np.int32) - 1
    compacted = replace(
        batch, hidden=batch.hidden[rows], token_indices=new_index[batch.token_indices]
    )
    return compacted, rows


def tail_tokens(batch: RoutedBatch, first: int) -> RoutedBatch:
    """The rows from `first` on, with exactly their pairs."""
    chosen = batch.token_indices >= first
    expert_ids = np.repeat(batch.expert_ids, np.diff(batch.group_starts))
    return _grouped(
        batch.hidden[first:],
        batch.token_indices[chosen] - np.int32(first),
        expert_ids[chosen],
        batch.weights[chosen],
        phase=batch.phase,
    )


def slice_tokens(batch: RoutedBatch, max_tokens: int) -> Iterator[tuple[int, RoutedBatch]]:
    """Cut a batch into pieces of at most `max_tokens` consecutive rows, each with its first row.

    A piece holds exactly the pairs of its rows; a piece without pairs is left out.
    """
    if batch.num_tokens <= max_tokens:
        yield 0, batch
        return
    # Pairs are in order of expert and token: sorted by slice they are so within each slice.
    slice_of_pair = batch.token_indices // max_tokens
    order = np.argsort(slice_of_pair, kind="stable")
    expert_ids = np.repeat(batch.expert_ids, np.diff(batch.group_starts))[order]
    token_indices, weights = batch.token_indices[order], batch.weights[order]
    slices, starts = np.unique(slice_of_pair[order], return_index=True)
    bounds = [*starts.tolist(), order.size]
    for index, first in enumerate((slices * max_tokens).tolist()):
        pairs = slice(bounds[index], bounds[index + 1])
        yield (
            first,
            _grouped(
                batch.hidden[first : first + max_tokens],
                token_indices[pairs] - np.int32(first),
                expert_ids[pairs],
                weights[pairs],
                phase=batch.phase,
            ),
        )
