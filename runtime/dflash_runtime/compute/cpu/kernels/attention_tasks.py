"""Attention's tasks: storing new keys and values, and attending.

An item of attending is a tile with all its splits (see attention_split) or, if those are too few
for all threads, one split of a tile; the thread that finishes a tile's last split merges them, in
ascending order.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from dflash_runtime.compute.cpu.compile.compiling import RowFunction, compile_task, helper
from dflash_runtime.compute.cpu.kernels import attention_split as a
from dflash_runtime.compute.cpu.kernels.attention_elements import (
    call_store,
    element_functions,
)
from dflash_runtime.compute.cpu.kernels.words import set_word, word
from dflash_runtime.compute.cpu.simd import atomics
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.exponentials import exp_scalar
from dflash_runtime.compute.cpu.threads.parallel import claim, run_on
from dflash_runtime.compute.kv_cache import KvType


def _store(args: int, counter: int, worker_idx: int) -> None:
    """Store new keys and values. An item is up to 32 positions in one block of keys of one head."""
    first_position, kv_heads = word(args, a.FIRST_POSITION), word(args, a.KV_HEADS)
    end_position = first_position + word(args, a.NUM_TOKENS)
    key_dim, value_dim = word(args, a.KEY_DIM), word(args, a.VALUE_DIM)
    row_bytes = word(args, a.VALUE_ROW_BYTES)
    first_block = first_position // 32
    num_items = kv_heads * ((end_position + 31) // 32 - first_block)
    while True:
        item = claim(counter)
        if item >= num_items:
            return
        block, kv_head = first_block + item // kv_heads, item % kv_heads
        keys = a.keys_of(args, kv_head, 32 * block)
        values = a.values_of(args, kv_head, 32 * block)
        for position in range(max(first_position, 32 * block), min(end_position, 32 * block + 32)):
            row = (position - first_position) * kv_heads + kv_head
            source = word(args, a.NEW_KEYS) + 4 * key_dim * row
            call_store(word(args, a.STORE_KEY), 0, source, key_dim, keys, position % 32)
            source = word(args, a.NEW_VALUES) + 4 * value_dim * row
            target = values + position % 32 * row_bytes
            block_bytes = row_bytes // a.blocks_of(value_dim)
            call_store(word(args, a.STORE_VALUES), 0, source, value_dim, target, block_bytes)


@helper
def _copy_queries(args: int, first_token: int, num_tokens: int, kv_head: int, target: int) -> None:
    """Copy a tile's rows, scaled, one after another."""
    dim, num_heads = word(args, a.KEY_DIM), word(args, a.NUM_HEADS)
    group = num_heads // word(args, a.KV_HEADS)
    scale = v.float_from_bits(word(args, a.SCALE_BITS))
    source = word(args, a.QUERIES) + 4 * dim * (first_token * num_heads + kv_head * group)
    for _ in range(num_tokens):
        for _ in range(group):
            for d in range(0, dim - 31, 32):
                v.store_floats(target + 4 * d, v.load_floats(source + 4 * d) * v.splat(scale))
            for d in range(dim // 32 * 32, dim):
                v.store_float(target + 4 * d, v.load_float(source + 4 * d) * scale)
            source += 4 * dim
            target += 4 * dim
        source += 4 * dim * (num_heads - group)


@helper
def _finish(
    args: int, result: int, first_token: int, num_tokens: int, kv_head: int, tile_rows: int
) -> None:
    """Divide by the totals, sinks included, into the rows of OUT."""
    value_dim, num_heads = word(args, a.VALUE_DIM), word(args, a.NUM_HEADS)
    value_padded = (value_dim + 31) // 32 * 32
    group = num_heads // word(args, a.KV_HEADS)
    totals = result + 4 * tile_rows * value_padded
    maxima, sinks = totals + a.in_vectors(tile_rows), word(args, a.SINKS)
    target = word(args, a.OUT) + 4 * value_dim * (first_token * num_heads + kv_head * group)
    for _ in range(num_tokens):
        for head in range(group):
            total_one, factor = v.load_float(totals), np.float32(1)
            if sinks != 0:
                sink = v.load_float(sinks + 4 * (kv_head * group + head))
                highest = max(v.load_float(maxima), sink)
                factor = exp_scalar(v.load_float(maxima) - highest)
                total_one = total_one * factor + exp_scalar(sink - highest)
                maxima += 4
            total = v.splat(total_one)
            for lane in range(0, value_dim, 32):
                lanes = v.load_floats(result + 4 * lane) * v.splat(factor) / total
                if lane + 32 <= value_dim:
                    v.store_floats(target + 4 * lane, lanes)
                else:
                    v.store_partial(target + 4 * lane, lanes, value_dim - lane)
            totals += 4
            result += 4 * value_padded
            target += 4 * value_dim
        target += 4 * value_dim * (num_heads - group)


def _attend(args: int, counter: int, worker_idx: int) -> None:
    """Take items until none is left.

    Scratch: the number 1; queries [rows][D]; scores [rows][BLOCK]; sums of terms by lanes
    [rows][32]; factors [rows]; counts [rows] int64; keys [D][32]; values [BLOCK][32 of V]; a
    partial; a result.
    """
    kv_heads, tile_tokens = word(args, a.KV_HEADS), word(args, a.TILE_TOKENS)
    group = word(args, a.NUM_HEADS) // kv_heads
    tile_rows = tile_tokens * group
    chunk_start = word(args, a.FIRST_POSITION)
    chunk_end = chunk_start + word(args, a.NUM_TOKENS)
    first_tile, base_split = (
        chunk_start // tile_tokens,
        a.first_visible(args, chunk_start) // a.SPLIT,
    )
    num_tiles = (chunk_end - 1) // tile_tokens - first_tile + 1
    value_padded = (word(args, a.VALUE_DIM) + 31) // 32 * 32
    partials, one_partial = word(args, a.PARTIALS), word(args, a.PARTIAL_BYTES)
    items_a_pair = word(args, a.ITEMS_A_PAIR)
    is_streaming = items_a_pair == 1
    scratch = word(args, a.SCRATCH) + worker_idx * word(args, a.SCRATCH_BYTES)
    queries = scratch + 64
    result = scratch + word(args, a.SCRATCH_BYTES) - one_partial
    v.store_float(scratch, np.float32(1))
    while True:
        item = claim(counter)
        if item >= num_tiles * kv_heads * items_a_pair:
            return
        # The last tiles have most work: they come first.
        pair = item // items_a_pair
        tile, kv_head = first_tile + num_tiles - 1 - pair // kv_heads, pair % kv_heads
        start = max(chunk_start, tile * tile_tokens)
        end = min(chunk_end, (tile + 1) * tile_tokens)
        num_rows, end_split = (end - start) * group, (end - 1) // a.SPLIT + 1
        tile_split = a.first_visible(args, start) // a.SPLIT
        first_split = tile_split if is_streaming else base_split + item % items_a_pair
        if not tile_split <= first_split < end_split:
            continue
        _copy_queries(args, start - chunk_start, end - start, kv_head, queries)
        if is_streaming:
            for split in range(tile_split, end_split):
                partial = result - one_partial
                a.attend_split(
                    args, kv_head, start, end, split, scratch, queries, partial, tile_rows
                )
                a.merge(result, partial, num_rows, tile_rows, value_padded, split == tile_split)
        else:
            of_pair = partials + (pair * items_a_pair - base_split) * one_partial
            partial = of_pair + first_split * one_partial
            a.attend_split(
                args, kv_head, start, end, first_split, scratch, queries, partial, tile_rows
            )
            num_splits = end_split - tile_split
            if atomics.atomic_add(word(args, a.DONE) + 8 * pair, 1) < num_splits - 1:
                continue
            for split in range(tile_split, end_split):
                partial = of_pair + split * one_partial
                a.merge(result, partial, num_rows, tile_rows, value_padded, split == tile_split)
        _finish(args, result, start - chunk_start, end - start, kv_head, tile_rows)


def _run_attention(args: int, counter: int, pool: int) -> None:
    """Store every new row, then attend: a token sees earlier tokens of its chunk.

    Splits are shared among threads where there are few pairs of a tile and a K/V head.
    """
    num_tokens, first_position = word(args, a.NUM_TOKENS), word(args, a.FIRST_POSITION)
    kv_heads, key_dim, value_dim = (
        word(args, a.KV_HEADS),
        word(args, a.KEY_DIM),
        word(args, a.VALUE_DIM),
    )
    num_values = num_tokens * kv_heads * (key_dim + value_dim)
    store_pool = pool if num_values >= word(args, a.LEAST_SHARED_VALUES) else 0
    run_on(store_pool, word(args, a.STORE_TASK), args, counter)
    if word(args, a.QUERIES) == 0:
        return
    num_visible, tile_tokens = first_position + num_tokens, word(args, a.TILE_TOKENS)
    num_tiles = (num_visible - 1) // tile_tokens - first_position // tile_tokens + 1
    num_pairs = num_tiles * kv_heads
    base_split = a.first_visible(args, first_position) // a.SPLIT
    num_splits = (num_visible + a.SPLIT - 1) // a.SPLIT - base_split
    num_seen = num_visible
    if word(args, a.SPAN) > 0:
        num_seen = min(num_visible, word(args, a.SPAN))
    num_products = num_tokens * word(args, a.NUM_HEADS) * num_seen * (key_dim + value_dim)
    num_threads = word(args, a.NUM_THREADS)
    is_shared = num_threads > 1 and num_products >= word(args, a.LEAST_SHARED_PRODUCTS)
    items_a_pair, all_partials = num_splits, num_pairs * num_splits * word(args, a.PARTIAL_BYTES)
    if (
        not is_shared
        or num_pairs >= a.ENOUGH_PAIRS * num_threads
        or all_partials > word(args, a.PARTIALS_BYTES)
    ):
        items_a_pair = 1
    set_word(args, a.ITEMS_A_PAIR, items_a_pair)
    if items_a_pair > 1:
        for pair in range(num_pairs):
            atomics.relaxed_store(word(args, a.DONE) + 8 * pair, 0)
    run_on(pool if is_shared else 0, word(args, a.ATTEND_TASK), args, counter)


@cache
def run_attention() -> RowFunction:
    """The function of calls."""
    return compile_task(_run_attention)


@cache
def attend_task() -> RowFunction:
    return compile_task(_attend)


@cache
def store_task() -> RowFunction:
    return compile_task(_store)


def function_words(kv_type: KvType) -> dict[int, int]:
    """The words of a layer that hold functions for this element type, by index.

    Compiled functions are never freed.
    """
    stored, expanded = element_functions(kv_type), element_functions(KvType.F32)
    functions = {
        a.FETCH_SCORE: stored.fetch_score,
        a.MIX: stored.mix,
        a.EXPAND_KEYS: stored.expand_keys,
        a.EXPAND_VALUES: stored.expand_values,
        a.STORE_KEY: stored.store_key,
        a.STORE_VALUES: stored.store_values,
        a.SCORE_EXPANDED: expanded.score,
        a.MIX_EXPANDED: expanded.mix,
        a.STORE_TASK: store_task(),
        a.ATTEND_TASK: attend_task(),
    }
    return {index: function.address for index, function in functions.items()}
