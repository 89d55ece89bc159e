"""RoutedBatch: tokens and their (token, expert, weight) triples, grouped by expert as CSR.

Ragged: a token may have 0..K experts here, and an owner may get no token; nothing is padded. The
expert ids are local or global, as the two sides agreed.

::

    hidden        [T, H] float32     one row a token
    expert_ids    [G]    int32       strictly ascending; every group has at least one pair
    group_starts  [G+1]  int32       pairs of group g: group_starts[g] … group_starts[g+1]-1
    token_indices [P]    int32       row of `hidden`; ascending inside a group
    weights       [P]    float32     routing weight of the pair
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from dflash_protocol.device_payload import DeviceRows, DeviceSums, SomeRows
from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import F32Array, F64Array, I32Array, I64Array, Phase
from dflash_protocol.ring import compiled as ring_native

Hidden: TypeAlias = F32Array | DeviceRows
"""Hidden rows [T, H] float32, on the host or on a device."""
Sums: TypeAlias = F64Array | DeviceSums
"""Sums [T, H] float64, on the host or on a device."""

_KEY_LIMIT = 1 << 15
"""Keys below it are radix-sorted as int16, in a tenth of the time of a comparison sort."""
_NEARLY_ALL = 0.75
"""From this share of used rows on, a device sends all of them: a gather and the scatter of the
sums need the indices on the device, which takes longer."""
_MOST_COUNTED_IDS = 1 << 12
"""Compiled code groups ids below it by counting sort; no model has as many experts."""


@dataclass(slots=True, eq=False)
class RoutedBatch:
    """One layer's expert work for one owner; the arrays are drawn in the module's docstring.

    Immutable by convention; not frozen, since that would cost some µs a request.
    """

    phase: Phase
    hidden: F32Array
    expert_ids: I32Array
    group_starts: I32Array
    token_indices: I32Array
    weights: F32Array

    @property
    def rows(self) -> Hidden:
        """The hidden rows, on the host or on a device. Shapes: [T, H]."""
        return self.hidden

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """[T, H]; of any rank before `check`."""
        return self.hidden.shape

    @property
    def num_tokens(self) -> int:
        return int(self.hidden_shape[0])

    @property
    def num_pairs(self) -> int:
        return int(self.token_indices.shape[0])

    @property
    def num_groups(self) -> int:
        return int(self.expert_ids.shape[0])

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


@dataclass(frozen=True, slots=True, eq=False)
class TokenOrder:
    """Pairs sorted by token, before they are grouped by expert. Shapes: all [P]."""

    token_indices: I32Array
    expert_ids: I32Array
    weights: F32Array


class DeviceBatch(RoutedBatch):
    """A batch whose rows are on a device; reading `hidden` copies them to the host.

    One made by `of_pairs` is grouped lazily, when an array of the routing is first read, so that it
    can be sliced before that and the device can work meanwhile.
    """

    __slots__ = ("_pairs", "_rows")

    def __init__(
        self,
        phase: Phase,
        rows: DeviceRows,
        *,
        expert_ids: I32Array,
        group_starts: I32Array,
        token_indices: I32Array,
        weights: F32Array,
    ) -> None:
        self._rows = rows
        self._pairs: TokenOrder | None = None
        self.phase = phase
        self.expert_ids = expert_ids
        self.group_starts = group_starts
        self.token_indices = token_indices
        self.weights = weights

    @classmethod
    def of_pairs(cls, phase: Phase, rows: DeviceRows, pairs: TokenOrder) -> DeviceBatch:
        """A batch that is not grouped yet."""
        batch = cls.__new__(cls)
        batch._rows, batch._pairs, batch.phase = rows, pairs, phase
        return batch

    @property
    def hidden(self) -> F32Array:
        return self._rows.to_host()

    @hidden.setter
    def hidden(self, hidden: F32Array) -> None:
        raise AttributeError("the rows of this batch are on a device")

    @property
    def rows(self) -> DeviceRows:
        return self._rows

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        return self._rows.shape

    @property
    def num_pairs(self) -> int:
        return int((self._pairs or self).token_indices.shape[0])

    @property
    def pairs(self) -> TokenOrder | None:
        """The pairs sorted by token; None if the batch was made grouped."""
        return self._pairs

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            # Called for routing arrays only while they are unset: group now.
            if name not in _ROUTING:
                raise AttributeError(name)
            pairs = self._pairs
            order = _stable_order(pairs.expert_ids)
            ids, starts = _groups(pairs.expert_ids[order])
            self.have_grouped(
                ids, starts, token_indices=pairs.token_indices[order], weights=pairs.weights[order]
            )
            return getattr(self, name)

    def have_grouped(
        self,
        expert_ids: I32Array,
        group_starts: I32Array,
        *,
        token_indices: I32Array,
        weights: F32Array,
    ) -> None:
        """Set the grouped arrays of a batch made by `of_pairs`."""
        self.expert_ids, self.group_starts = expert_ids, group_starts
        self.token_indices, self.weights = token_indices, weights


_ROUTING = frozenset(("expert_ids", "group_starts", "token_indices", "weights"))


def zero_sums(rows: Hidden) -> Sums:
    """Zero sums for these rows, where the rows are. Shapes: result [T, H]."""
    return np.zeros(rows.shape) if isinstance(rows, np.ndarray) else rows.new_sums()


def add_sums(out: Sums, sums: Sums, rows: SomeRows | None = None) -> None:
    """Add `sums` to the distinct `rows` of `out`, or to all. Shapes: out [T, H]; sums [T', H]."""
    if not isinstance(out, np.ndarray):
        out.add(sums, rows)
        return
    more = sums if isinstance(sums, np.ndarray) else sums.to_host()
    if rows is None:
        np.add(out, more, out=out)
    else:
        out[rows] += more


def group_by_expert(
    hidden: Hidden,
    token_indices: I32Array,
    expert_ids: I32Array,
    *,
    weights: F32Array,
    phase: Phase,
) -> RoutedBatch:
    """Sort pairs by (expert, token) and group them.

    Shapes: hidden [T, H]; token_indices, expert_ids [P] int32; weights [P] float32.
    """
    if hidden.shape[0] == 1:  # decode: every pair is a group
        order = expert_ids.argsort()
        return _batch_of(
            phase,
            hidden,
            expert_ids=expert_ids[order],
            group_starts=np.arange(order.size + 1, dtype=np.int32),
            token_indices=token_indices,
            weights=weights[order],
        )
    is_in_order = not (token_indices[1:] < token_indices[:-1]).any()
    if is_in_order and not isinstance(hidden, np.ndarray):
        pairs = TokenOrder(token_indices, expert_ids, weights)
        return DeviceBatch.of_pairs(phase, hidden, pairs)
    order = _stable_order(expert_ids) if is_in_order else np.lexsort((token_indices, expert_ids))
    return _grouped(hidden, token_indices[order], expert_ids[order], weights[order], phase=phase)


def _stable_order(keys: I32Array) -> I64Array:
    """Stable argsort. Shapes: both [P]."""
    if keys.size and keys.min() >= 0 and keys.max() < _KEY_LIMIT:
        return np.argsort(keys.astype(np.int16), kind="stable")
    return np.argsort(keys, kind="stable")


def _grouped(
    hidden: Hidden,
    token_indices: I32Array,
    expert_ids: I32Array,
    weights: F32Array,
    *,
    phase: Phase,
) -> RoutedBatch:
    """The batch of pairs that are sorted by (expert, token) already."""
    ids, group_starts = _groups(expert_ids)
    return _batch_of(
        phase,
        hidden,
        expert_ids=ids,
        group_starts=group_starts,
        token_indices=token_indices,
        weights=weights,
    )


def _groups(expert_ids: I32Array) -> tuple[I32Array, I32Array]:
    """Ids and starts of groups. Shapes: expert_ids [P], ascending; results [G], [G+1]."""
    is_first = np.ones(expert_ids.size, dtype=bool)
    np.not_equal(expert_ids[1:], expert_ids[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    group_starts = np.empty(starts.size + 1, dtype=np.int32)
    group_starts[:-1] = starts
    group_starts[-1] = expert_ids.size
    return expert_ids[starts], group_starts


def _batch_of(
    phase: Phase,
    rows: Hidden,
    *,
    expert_ids: I32Array,
    group_starts: I32Array,
    token_indices: I32Array,
    weights: F32Array,
) -> RoutedBatch:
    """A RoutedBatch or DeviceBatch, by where the rows are."""
    if isinstance(rows, np.ndarray):
        return RoutedBatch(phase, rows, expert_ids, group_starts, token_indices, weights)
    return DeviceBatch(
        phase,
        rows,
        expert_ids=expert_ids,
        group_starts=group_starts,
        token_indices=token_indices,
        weights=weights,
    )


def compact_tokens(
    batch: RoutedBatch, *, by_device: bool = False
) -> tuple[RoutedBatch, I32Array | None]:
    """Drop the hidden rows that no pair uses. With `by_device`, a device that sends its own rows
    keeps all of them if nearly all are used.

    Returns the batch and the original index of each kept row [T'] int32; or the unchanged batch and
    None if every row is kept.
    """
    if batch.num_tokens == 1 and batch.num_pairs:  # decode: one token, and it is used
        return batch, None
    if isinstance(batch, DeviceBatch) and batch.pairs is not None and batch.num_pairs:
        share = _NEARLY_ALL if by_device else 1.0
        return _compact_in_order(batch, batch.pairs, whole_from=ceil(share * batch.num_tokens))
    is_used = np.zeros(batch.num_tokens, dtype=bool)
    is_used[batch.token_indices] = True
    if is_used.all():
        return batch, None
    rows = np.flatnonzero(is_used).astype(np.int32)
    new_index = np.cumsum(is_used, dtype=np.int32) - 1
    compacted = _batch_of(
        batch.phase,
        _chosen(batch.rows, rows),
        expert_ids=batch.expert_ids,
        group_starts=batch.group_starts,
        token_indices=new_index[batch.token_indices],
        weights=batch.weights,
    )
    return compacted, rows


def _chosen(hidden: Hidden, rows: SomeRows) -> Hidden:
    return hidden[rows] if isinstance(hidden, np.ndarray) else hidden.chosen(rows)


def tail_tokens(batch: RoutedBatch, first: int) -> RoutedBatch:
    """The rows from `first` on, with their pairs."""
    chosen = batch.token_indices >= first
    expert_ids = np.repeat(batch.expert_ids, np.diff(batch.group_starts))
    return _grouped(
        _chosen(batch.rows, slice(first, batch.num_tokens)),
        batch.token_indices[chosen] - np.int32(first),
        expert_ids[chosen],
        batch.weights[chosen],
        phase=batch.phase,
    )


def slice_tokens(batch: RoutedBatch, max_tokens: int) -> Iterator[tuple[int, RoutedBatch]]:
    """Cut a batch into pieces of at most `max_tokens` consecutive rows.

    Yields the index of a piece's first row, and the piece with the pairs of its rows. Pieces
    without pairs are left out.
    """
    if batch.num_tokens <= max_tokens:
        yield 0, batch
        return
    if isinstance(batch, DeviceBatch) and batch.pairs is not None:
        yield from _slices_in_order(batch, batch.pairs, max_tokens)
        return
    # A stable sort by slice keeps the order by (expert, token) within each slice.
    slice_of_pair = batch.token_indices // max_tokens
    order = _stable_order(slice_of_pair)
    expert_ids = np.repeat(batch.expert_ids, np.diff(batch.group_starts))[order]
    token_indices, weights = batch.token_indices[order], batch.weights[order]
    pairs_of_slice = np.bincount(slice_of_pair)
    ends = np.cumsum(pairs_of_slice)
    for index in np.flatnonzero(pairs_of_slice).tolist():
        first = index * max_tokens
        pairs = slice(int(ends[index] - pairs_of_slice[index]), int(ends[index]))
        yield (
            first,
            _grouped(
                _chosen(batch.rows, slice(first, min(first + max_tokens, batch.num_tokens))),
                token_indices[pairs] - np.int32(first),
                expert_ids[pairs],
                weights[pairs],
                phase=batch.phase,
            ),
        )


def _compact_in_order(
    batch: DeviceBatch, pairs: TokenOrder, *, whole_from: int
) -> tuple[DeviceBatch, I32Array | None]:
    """`compact_tokens` of ungrouped pairs; keeps all rows if `whole_from` or more are used.

    Compiled code, if it is loaded, groups the pairs in the same pass.
    """
    kernels = ring_native.if_compiled()
    if kernels is not None:
        count = pairs.token_indices.size
        rows, row_of_pair, ids, grouped_rows = np.empty((4, count), np.int32)
        starts, grouped_weights = np.empty(count + 1, np.int32), np.empty(count, np.float32)
        found = kernels.group_pairs(
            pairs.token_indices,
            pairs.expert_ids,
            pairs.weights,
            whole_from,
            rows,
            row_of_pair,
            ids,
            starts,
            grouped_rows,
            grouped_weights,
            np.empty(_MOST_COUNTED_IDS, np.int32),
        )
        if found >= 0:
            num_rows, num_groups = ring_native.two_counts(found)
            kept = None if num_rows >= whole_from else rows[:num_rows]
            compacted = batch if kept is None else _in_rows(batch, pairs, kept, row_of_pair)
            compacted.have_grouped(
                ids[:num_groups],
                starts[: num_groups + 1],
                token_indices=grouped_rows,
                weights=grouped_weights,
            )
            return compacted, kept
    tokens = pairs.token_indices
    is_next = np.zeros(tokens.size, dtype=bool)
    np.not_equal(tokens[1:], tokens[:-1], out=is_next[1:])
    after_first = np.flatnonzero(is_next)
    if after_first.size + 1 >= whole_from:
        return batch, None
    rows = np.concatenate((tokens[:1], tokens[after_first]))
    return _in_rows(batch, pairs, rows, np.cumsum(is_next, dtype=np.int32)), rows


def _in_rows(
    batch: DeviceBatch, pairs: TokenOrder, rows: I32Array, row_of_pair: I32Array
) -> DeviceBatch:
    """The batch of some rows. Shapes: rows [T']; row_of_pair [P], indices into `rows`."""
    in_rows = replace(pairs, token_indices=row_of_pair)
    return DeviceBatch.of_pairs(batch.phase, batch.rows.chosen(rows), in_rows)


def _slices_in_order(
    batch: DeviceBatch, pairs: TokenOrder, max_tokens: int
) -> Iterator[tuple[int, RoutedBatch]]:
    """`slice_tokens` of ungrouped pairs; the pieces are views."""
    firsts = range(0, batch.num_tokens, max_tokens)
    bounds = [*np.searchsorted(pairs.token_indices, firsts).tolist(), pairs.token_indices.size]
    for index, first in enumerate(firsts):
        some = slice(bounds[index], bounds[index + 1])
        if some.start < some.stop:
            piece = TokenOrder(
                pairs.token_indices[some] - np.int32(first),
                pairs.expert_ids[some],
                pairs.weights[some],
            )
            rows = batch.rows.chosen(slice(first, min(first + max_tokens, batch.num_tokens)))
            yield first, DeviceBatch.of_pairs(batch.phase, rows, piece)
