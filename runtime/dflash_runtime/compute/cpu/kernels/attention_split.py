"""Attention over a K/V cache, split by split: causal, with optional windows and chunks.

The words of a call's arguments, which all parts of attention read, are defined here too.

The order of additions for a query depends on positions alone, so a token has the same bits alone or
in any chunk, with any number of threads:

    position 0        64       128      192      256 …
             | block  | block  | block  | block  | …      online softmax from block to block,
             | split                             | split  restarted in each split;
                                                          splits are then merged in ascending order

A *tile* is some tokens of one block times the query heads of one K/V head; its rows share each read
of keys and values. An item is a tile with all its splits or, if those are too few for all threads,
one split of a tile; the thread that finishes a tile's last split merges them. A row reads no key or
value after its own position, not even times 0. Blocks and splits before the first position that the
layer's mask shows to a tile are skipped; other hidden positions get a score of minus infinity,
which adds zeros, so the bits are the same.

Source: Milakov & Gimelshein 2018 (arXiv 1805.02867) for the softmax, Dao et al. 2022
(arXiv 2205.14135) for blocks.
"""

from __future__ import annotations

import numpy as np

from dflash_runtime.compute.cpu.compile.compiling import helper
from dflash_runtime.compute.cpu.kernels import attention_tiles as tiles
from dflash_runtime.compute.cpu.kernels.attention_elements import (
    call_expand_keys,
    call_expand_values,
    call_mix,
    call_score,
)
from dflash_runtime.compute.cpu.kernels.attention_tiles import BLOCK
from dflash_runtime.compute.cpu.kernels.words import word
from dflash_runtime.compute.cpu.simd import atomics
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.exponentials import exp_lanes, exp_scalar

# The words of a call: addresses, except where the unit or the comment says otherwise.
(
    # A layer's cache.
    KEYS,
    VALUES,
    KV_HEADS,
    KEY_DIM,
    VALUE_DIM,
    SLAB_ROWS,  # rows whose keys and values, of all heads, lie together
    SLAB_BYTES,
    HEAD_BYTES,
    KEY_BLOCK_BYTES,  # keys of 32 positions
    VALUE_ROW_BYTES,
    WINDOW_ROWS,  # position j is row j % WINDOW_ROWS
    WINDOW,  # 0: none
    CHUNK,  # 0: none
    # Functions for the cache's element type, and the tasks.
    FETCH_SCORE,
    MIX,
    EXPAND_KEYS,
    EXPAND_VALUES,
    STORE_KEY,
    STORE_VALUES,
    SCORE_EXPANDED,
    MIX_EXPANDED,
    STORE_TASK,
    ATTEND_TASK,
    # How a layer's work is shared.
    SPAN,  # most positions that a token sees, or 0: all
    TILE_TOKENS,
    PARTIAL_BYTES,
    NUM_THREADS,
    LEAST_SHARED_VALUES,  # to be stored
    LEAST_SHARED_PRODUCTS,
    # A call and its scratch memory.
    SCRATCH,
    SCRATCH_BYTES,
    PARTIALS,
    PARTIALS_BYTES,  # of PARTIALS; 0: splits are not shared
    DONE,  # a word for each pair of a tile and a K/V head
    QUERIES,  # or 0: nothing is attended to
    NEW_KEYS,
    NEW_VALUES,
    SINKS,  # or 0
    OUT,
    FIRST_POSITION,
    NUM_TOKENS,
    NUM_HEADS,
    SCALE_BITS,
    ITEMS_A_PAIR,  # set by the call
) = range(44)

NUM_LAYER_WORDS = SPAN


SPLIT = 256
"""Positions in one split, an item of its own when few tokens attend to many positions."""

ENOUGH_PAIRS = 4
"""Pairs of a tile and a K/V head for each thread, with which splits are not shared out."""

_LOWEST = np.float32(-3.0e38)
"""Maximum score before any: finite, so that the difference of two such maxima is 0, not NaN."""

_FEW_ROWS = 16
"""Up to this many rows, elements are converted while multiplied rather than once before."""


def _vectors_bytes(num_floats: int) -> int:
    """Bytes of a row of floats that is read 32 at a time."""
    return (num_floats + 31) // 32 * 128


in_vectors = helper(_vectors_bytes)


def partial_bytes(num_rows: int, value_dim: int) -> int:
    """Bytes of a split's result: sums [rows][V padded], their totals and maximum scores."""
    return _vectors_bytes(num_rows) * 2 + 4 * num_rows * ((value_dim + 31) // 32 * 32)


def scratch_bytes(num_rows: int, key_dim: int, value_dim: int) -> int:
    """Scratch bytes of one thread for a tile of `num_rows` rows; see attention_tasks."""
    value_padded = (value_dim + 31) // 32 * 32
    rows = _vectors_bytes(num_rows * key_dim) + 4 * num_rows * (BLOCK + 32)
    cached = 4 * 32 * key_dim + 4 * BLOCK * value_padded
    a_row = 5 * _vectors_bytes(num_rows)
    return 64 + rows + a_row + cached + 2 * partial_bytes(num_rows, value_dim)


@helper
def blocks_of(dim: int) -> int:
    return (dim + 31) // 32


@helper
def keys_of(args: int, kv_head: int, position: int) -> int:
    """The address of a head's keys of 32 positions, of which this one is the first."""
    row, slab_rows = position % word(args, WINDOW_ROWS), word(args, SLAB_ROWS)
    keys = word(args, KEYS) + row // slab_rows * word(args, SLAB_BYTES)
    keys += kv_head * word(args, HEAD_BYTES)
    keys += row % slab_rows // 32 * word(args, KEY_BLOCK_BYTES)
    return keys  # type: ignore[no-any-return]


@helper
def values_of(args: int, kv_head: int, position: int) -> int:
    """The address of a head's row of values; in a slab the next rows lie VALUE_ROW_BYTES apart."""
    row, slab_rows = position % word(args, WINDOW_ROWS), word(args, SLAB_ROWS)
    values = word(args, VALUES) + row // slab_rows * word(args, SLAB_BYTES)
    values += kv_head * word(args, HEAD_BYTES)
    values += row % slab_rows * word(args, VALUE_ROW_BYTES)
    return values  # type: ignore[no-any-return]


@helper
def first_visible(args: int, position: int) -> int:
    """The first position that a token at `position` sees."""
    first, window, chunk = 0, word(args, WINDOW), word(args, CHUNK)
    if window > 0:
        first = max(first, position - window + 1)
    if chunk > 0:
        first = max(first, position // chunk * chunk)
    return first


@helper
def _soften(
    scores: int,
    num_rows: int,
    counts: int,
    hidden: int,
    maxima: int,
    factors: int,
    lane_sums: int,
) -> None:
    """Turn scores into ``exp(score - maximum)``; `factors` receive the scales of earlier sums.

    Row r sees the block's first ``counts[r]`` positions except the first ``hidden[r]`` (none are
    hidden if `hidden` is 0). Three passes, so that no row waits for its own maximum.
    """
    for row in range(num_rows):
        place, count = scores + 4 * BLOCK * row, atomics.relaxed_load(counts + 8 * row)
        low, high = v.load_floats(place), v.load_floats(place + 128)
        if count < BLOCK:
            low, high = tiles.keep_first(low, count), tiles.keep_first(high, count - 32)
            v.store_floats(place, low)
            v.store_floats(place + 128, high)
        if hidden != 0:
            num_hidden = atomics.relaxed_load(hidden + 8 * row)
            low, high = tiles.drop_first(low, num_hidden), tiles.drop_first(high, num_hidden - 32)
            v.store_floats(place, low)
            v.store_floats(place + 128, high)
        v.store_float(factors + 4 * row, v.largest_of(v.maximum(low, high)))
    for offset in range(0, 4 * num_rows, 128):
        before = v.load_floats(maxima + offset)
        highest = v.maximum(before, v.load_floats(factors + offset))
        v.store_floats(maxima + offset, highest)
        v.store_floats(factors + offset, exp_lanes(before - highest))
    for row in range(num_rows):
        place, total = scores + 4 * BLOCK * row, lane_sums + 128 * row
        shift = v.splat(v.load_float(maxima + 4 * row))
        low = exp_lanes(v.load_floats(place) - shift)
        high = exp_lanes(v.load_floats(place + 128) - shift)
        v.store_floats(place, low)
        v.store_floats(place + 128, high)
        factor = v.splat(v.load_float(factors + 4 * row))
        v.store_floats(total, v.load_floats(total) * factor + (low + high))


@helper
def _clear(partial: int, num_rows: int, value_padded: int, maxima: int, lane_sums: int) -> None:
    for row in range(num_rows):
        v.store_float(maxima + 4 * row, _LOWEST)
        v.store_floats(lane_sums + 128 * row, v.zeros())
        for first in range(0, value_padded, 32):
            v.store_floats(partial + 4 * (row * value_padded + first), v.zeros())


@helper
def attend_split(
    args: int,
    kv_head: int,
    first_position: int,
    end_position: int,
    split: int,
    scratch: int,
    queries: int,
    partial: int,
    tile_rows: int,
) -> None:
    """One split for the tokens at these positions, starting from zero. Scratch: see
    attention_tasks."""
    dim, value_dim = word(args, KEY_DIM), word(args, VALUE_DIM)
    value_blocks = (value_dim + 31) // 32
    stride = 128 * value_blocks
    value_block_bytes = word(args, VALUE_ROW_BYTES) // value_blocks
    group = word(args, NUM_HEADS) // word(args, KV_HEADS)
    num_rows = (end_position - first_position) * group
    key_block_bytes, row_bytes = word(args, KEY_BLOCK_BYTES), word(args, VALUE_ROW_BYTES)
    one = scratch
    scores = queries + in_vectors(tile_rows * dim)
    lane_sums = scores + 4 * BLOCK * tile_rows
    factors = lane_sums + 128 * tile_rows
    counts = factors + in_vectors(tile_rows)
    hidden = counts + 2 * in_vectors(tile_rows)
    wide_keys = hidden + 2 * in_vectors(tile_rows)
    wide_values = wide_keys + 128 * dim
    totals = partial + stride * tile_rows
    maxima = totals + in_vectors(tile_rows)
    _clear(partial, num_rows, 32 * value_blocks, maxima, lane_sums)
    lowest = first_visible(args, first_position)
    last_hidden = first_visible(args, end_position - 1)
    start = max(split * SPLIT, lowest // BLOCK * BLOCK)
    for first in range(start, min((split + 1) * SPLIT, end_position), BLOCK):
        end = min(first + BLOCK, end_position)
        values, first_part = values_of(args, kv_head, first), max(first, lowest // 32 * 32)
        keys = keys_of(args, kv_head, first_part)
        for part in range(first_part, end, 32):
            place = scores + 4 * (part - first)
            following = keys + key_block_bytes
            if part + 32 == first + BLOCK:
                following = keys_of(args, kv_head, part + 32)
            if num_rows <= _FEW_ROWS:
                ahead = values + (part - first) * row_bytes
                score = word(args, FETCH_SCORE)
                wanted = following if part + 32 < end_position else keys
                call_score(score, 0, queries, num_rows, keys, dim, place, wanted, ahead)
            else:
                call_expand_keys(word(args, EXPAND_KEYS), 0, keys, dim, wide_keys)
                score = word(args, SCORE_EXPANDED)
                call_score(score, 0, queries, num_rows, wide_keys, dim, place, 0, 0)
            keys = following
        row = 0
        for position in range(first_position, end_position):
            for _ in range(group):
                atomics.relaxed_store(counts + 8 * row, min(BLOCK, position + 1 - first))
                row += 1
        hides = first < last_hidden
        if hides:
            row = 0
            for position in range(first_position, end_position):
                for _ in range(group):
                    num_hidden = first_visible(args, position) - first
                    atomics.relaxed_store(hidden + 8 * row, num_hidden)
                    row += 1
        _soften(scores, num_rows, counts, hidden if hides else 0, maxima, factors, lane_sums)
        for block in range(value_blocks):
            sums, value = partial + 128 * block, values + block * value_block_bytes
            mix, value_stride = word(args, MIX), row_bytes
            if num_rows > _FEW_ROWS:
                expand = word(args, EXPAND_VALUES)
                call_expand_values(expand, 0, value, row_bytes, end - first, wide_values)
                mix, value, value_stride = word(args, MIX_EXPANDED), wide_values, 128
            call_mix(
                mix, 0, scores, num_rows, counts, value, value_stride, factors, one, sums, stride
            )
    for row in range(num_rows):
        v.store_float(totals + 4 * row, v.sum_of(v.load_floats(lane_sums + 128 * row)))


@helper
def merge(
    result: int, partial: int, num_rows: int, tile_rows: int, value_padded: int, is_first: bool
) -> None:
    """Add one more split to a result; both are laid out as a partial."""
    totals_offset = 4 * tile_rows * value_padded
    maxima_offset = totals_offset + in_vectors(tile_rows)
    if is_first:
        for lane in range(0, value_padded * num_rows, 32):
            v.store_floats(result + 4 * lane, v.load_floats(partial + 4 * lane))
        for place in range(totals_offset, maxima_offset + in_vectors(tile_rows), 128):
            v.store_floats(result + place, v.load_floats(partial + place))
        return
    for row in range(num_rows):
        before = v.load_float(result + maxima_offset + 4 * row)
        highest = v.load_float(partial + maxima_offset + 4 * row)
        if before > highest:
            highest = before
        old = exp_scalar(before - highest)
        new = exp_scalar(v.load_float(partial + maxima_offset + 4 * row) - highest)
        v.store_float(result + maxima_offset + 4 * row, highest)
        old_total = v.load_float(result + totals_offset + 4 * row) * old
        new_total = v.load_float(partial + totals_offset + 4 * row) * new
        v.store_float(result + totals_offset + 4 * row, old_total + new_total)
        for lane in range(value_padded * row, value_padded * (row + 1), 32):
            kept = v.load_floats(result + 4 * lane) * v.splat(old)
            mixed = v.fma(v.load_floats(partial + 4 * lane), v.splat(new), kept)
            v.store_floats(result + 4 * lane, mixed)
