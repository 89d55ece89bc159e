"""Hidden rows, their (token, expert, weight) triples, and batches of them grouped by expert.

A layer's triples come in the order of tokens (Pairs). An owner's are grouped by expert, as CSR,
when they are to be sent or computed (RoutedBatch). Ragged: a token may have 0..K experts here, and
an owner may get no token; nothing is padded. The expert ids are local or global, as the two sides
agreed.

::

    rows          [T, H] float32     one row a token, on the host or on a device
    expert_ids    [G]    int32       strictly ascending; every group has at least one pair
    group_starts  [G+1]  int32       pairs of group g: group_starts[g] … group_starts[g+1]-1
    token_indices [P]    int32       row of `rows`; ascending inside a group
    weights       [P]    float32     routing weight of the pair
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import F32Array, I32Array, I64Array, Phase
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.rows import Hidden as Hidden
from dflash_protocol.rows import HostHidden as HostHidden
from dflash_protocol.rows import HostSums as HostSums
from dflash_protocol.rows import SomeRows as SomeRows
from dflash_protocol.rows import Sums as Sums

_KEY_LIMIT = 1 << 15
"""Keys below it are radix-sorted as int16, in a tenth of the time of a comparison sort."""
_MOST_COUNTED_IDS = 1 << 12
"""Compiled code groups ids below it by counting sort; no model has as many experts."""


@dataclass(slots=True, eq=False)
class Pairs:
    """A layer's (token, expert, weight) triples, or some of them, in the order of tokens.

    Their expert ids are global or local, as the holder says; those of one token differ.
    Shapes: all [P]; token_indices ascend.
    """

    token_indices: I32Array
    expert_ids: I32Array
    weights: F32Array
    counts: I64Array | None = None
    """Number of pairs of each expert, if counted. Shapes: [E]."""

    @property
    def num_pairs(self) -> int:
        return int(self.token_indices.size)

    @property
    def first_of_token(self) -> I64Array:
        """The first pair of each token that has any. Shapes: result [T'], ascending."""
        is_first = np.ones(self.token_indices.size, dtype=bool)
        np.not_equal(self.token_indices[1:], self.token_indices[:-1], out=is_first[1:])
        return np.flatnonzero(is_first)

    def where(self, chosen: npt.NDArray[np.bool_]) -> Pairs:
        """Those that are `chosen`. Shapes: chosen [P]."""
        places = np.flatnonzero(chosen)  # for thousands, a tenth of the time of boolean indexing
        return Pairs(self.token_indices[places], self.expert_ids[places], self.weights[places])

    def part(self, some: slice, first_token: int = 0) -> Pairs:
        """A run of pairs, as views; tokens are counted from `first_token`."""
        tokens = self.token_indices[some]
        if first_token:
            tokens = tokens - np.int32(first_token)
        return Pairs(tokens, self.expert_ids[some], self.weights[some])

    def in_order(self) -> Pairs:
        """The same pairs sorted by token, for pairs that are in no order."""
        order = _stable_order(self.token_indices)
        return Pairs(self.token_indices[order], self.expert_ids[order], self.weights[order])


@dataclass(slots=True, eq=False)
class RoutedBatch:
    """One layer's expert work for one owner; the arrays are drawn in the module's docstring.

    Immutable by convention; not frozen, since that would cost some µs a request.
    """

    phase: Phase
    rows: Hidden
    expert_ids: I32Array
    group_starts: I32Array
    token_indices: I32Array
    weights: F32Array

    @classmethod
    def group(cls, phase: Phase, rows: Hidden, pairs: Pairs) -> RoutedBatch:
        """Group pairs by expert, keeping all rows."""
        return cls.group_used(phase, rows, pairs, whole_from=0)[0]

    @classmethod
    def group_used(
        cls, phase: Phase, rows: Hidden, pairs: Pairs, *, whole_from: int | None = None
    ) -> tuple[RoutedBatch, I32Array | None]:
        """Group pairs by expert, and drop the rows that no pair uses, unless at least `whole_from`
        (by default all) are used.

        The order is that of a stable sort by expert id. Compiled code, if it is loaded, does all of
        it in one pass; numpy gets the same arrays.
        Returns the batch and the index of each kept row [T'] int32, None if every row is kept.
        """
        num_tokens = rows.shape[0]
        if num_tokens == 1 and pairs.num_pairs:  # decode: every pair is a group
            order = pairs.expert_ids.argsort()
            batch = cls(
                phase,
                rows,
                pairs.expert_ids[order],
                _ascending(order.size + 1),
                pairs.token_indices,
                pairs.weights[order],
            )
            return batch, None
        if whole_from is None:
            whole_from = num_tokens
        grouped = _group_compiled(pairs, whole_from) or _group(pairs, whole_from)
        used = grouped.used
        if used is not None:
            rows = rows.chosen(used)
        return cls(phase, rows, *grouped.arrays), used

    @property
    def hidden(self) -> F32Array:
        """The rows on the host; those of a device are copied. Shapes: [T, H]."""
        return self.rows.to_host()

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """[T, H]; of any rank before `check`."""
        return self.rows.shape

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0]

    @property
    def num_pairs(self) -> int:
        return int(self.token_indices.shape[0])

    @property
    def num_groups(self) -> int:
        return int(self.expert_ids.shape[0])

    def pairs(self) -> Pairs:
        """The pairs in the order of tokens; those of a token in the order of experts."""
        expert_ids = np.repeat(self.expert_ids, np.diff(self.group_starts))
        return Pairs(self.token_indices, expert_ids, self.weights).in_order()

    def check(self, *, hidden_size: int, num_experts: int) -> None:
        """Check a batch that came over the wire.

        Raises: ProtocolError naming the first array that is wrong.
        """
        shape = self.hidden_shape
        if len(shape) != 2 or shape[1] != hidden_size:
            raise ProtocolError(f"hidden is {shape}, expected [T, {hidden_size}]")
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
    """A batch of rows on the host and pairs in any order.

    Shapes: hidden [T, H]; token_indices, expert_ids [P] int32; weights [P] float32.
    """
    pairs = Pairs(token_indices, expert_ids, weights).in_order()
    return RoutedBatch.group(phase, HostHidden(hidden), pairs)


def slice_tokens(batch: RoutedBatch, max_tokens: int) -> Iterator[tuple[int, RoutedBatch]]:
    """Cut a batch into pieces of at most `max_tokens` consecutive rows.

    Yields the index of a piece's first row, and the piece with the pairs of its rows. Pieces
    without pairs are left out.
    """
    if batch.num_tokens <= max_tokens:
        yield 0, batch
        return
    pairs = batch.pairs()
    for first in range(0, batch.num_tokens, max_tokens):
        span = slice(first, min(first + max_tokens, batch.num_tokens))
        some = slice(*np.searchsorted(pairs.token_indices, (span.start, span.stop)).tolist())
        if some.start < some.stop:
            rows = batch.rows.chosen(span)
            yield first, RoutedBatch.group(batch.phase, rows, pairs.part(some, first))


class _Grouped(NamedTuple):
    """The routing of a batch, and the rows it uses; None: all."""

    arrays: tuple[I32Array, I32Array, I32Array, F32Array]
    used: I32Array | None


def _group_compiled(pairs: Pairs, whole_from: int) -> _Grouped | None:
    """`_group` by compiled code; None if it is not loaded, or does not take these ids."""
    kernels = ring_native.if_compiled()
    if kernels is None:
        return None
    num_pairs = pairs.token_indices.size
    indices, weights = np.empty((4, num_pairs + 1), np.int32), np.empty(num_pairs, np.float32)
    found = kernels.group_pairs(
        pairs.token_indices,
        pairs.expert_ids,
        pairs.weights,
        whole_from,
        indices,
        weights,
        np.empty(_MOST_COUNTED_IDS, np.int32),
    )
    if found < 0:
        return None
    num_rows, num_groups = ring_native.two_counts(found)
    rows, ids, starts, grouped_rows = indices
    arrays = ids[:num_groups], starts[: num_groups + 1], grouped_rows[:num_pairs], weights
    return _Grouped(arrays, None if num_rows >= whole_from else rows[:num_rows])


def _group(pairs: Pairs, whole_from: int) -> _Grouped:
    """Group pairs; the tokens are indices into the rows that are used, if these are fewer than
    `whole_from`."""
    tokens, used = pairs.token_indices, None
    firsts = pairs.first_of_token if whole_from else None
    if firsts is not None and firsts.size < whole_from:
        used = tokens[firsts]
        is_next = np.zeros(tokens.size, np.int32)
        is_next[firsts[1:]] = 1
        tokens = np.cumsum(is_next, dtype=np.int32)
    order = _stable_order(pairs.expert_ids)
    ids = pairs.expert_ids[order]
    is_first = np.ones(ids.size, dtype=bool)
    np.not_equal(ids[1:], ids[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    group_starts = np.empty(starts.size + 1, dtype=np.int32)
    group_starts[:-1] = starts
    group_starts[-1] = ids.size
    return _Grouped((ids[starts], group_starts, tokens[order], pairs.weights[order]), used)


def _stable_order(keys: I32Array) -> I64Array:
    """Stable argsort. Shapes: both [P]."""
    if keys.size and keys.min() >= 0 and keys.max() < _KEY_LIMIT:
        return np.argsort(keys.astype(np.int16), kind="stable")
    return np.argsort(keys, kind="stable")


@lru_cache(maxsize=64)
def _ascending(count: int) -> I32Array:
    """0, 1, …; read-only. Shapes: result [count]."""
    numbers = np.arange(count, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers
