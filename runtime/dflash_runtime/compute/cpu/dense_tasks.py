"""RMS norm, rotary embedding and routing: what threads do with rows of them, item by item.

A row's result depends on that row alone. Knows nothing of arrays: a call is described in words
that its kernel, the function Python calls, fills in.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.cpu import dense_lanes as lanes
from dflash_runtime.compute.cpu import vector as v
from dflash_runtime.compute.cpu.compiling import (
    Kernel,
    RowFunction,
    compile_kernel,
    compile_row_function,
    helper,
)
from dflash_runtime.compute.cpu.parallel import claim, run_on
from dflash_runtime.compute.cpu.untyped import types
from dflash_runtime.compute.cpu.vector.atomics import relaxed_load, relaxed_store

ROWS_AN_ITEM = 16
TOKENS_AN_ITEM = 8

_TAKEN, _NOT_A_NUMBER, _PADDING = np.float32(-1), np.float32(-0.5), np.float32(-2)
"""Among scores, none of which is negative."""
_SMALLEST_NORMAL_HALF = np.float32(6.103515625e-05)
_MINUS_INFINITY = np.float32(-np.inf)

NUM_WORDS = 16


@helper
def _word(args: int, index: int) -> int:
    return relaxed_load(args + 8 * index)  # type: ignore[no-any-return]


@helper
def _set_word(args: int, index: int, value: int) -> None:
    relaxed_store(args + 8 * index, value)


# -- RMS norm -------------------------------------------------------------------------------------


@helper
def _norm_row(x: int, weight: int, columns: int, eps: float, out: int) -> None:
    """Squares are summed in float64. `out` may be `x`."""
    whole, rest = columns // 32 * 32, columns % 32
    total = v.double_zeros()
    for column in range(0, whole, 32):
        total = v.add_squares(v.load_floats(x + 4 * column), total)
    if rest:
        total = v.add_squares(v.load_padded(x + 4 * whole, rest), total)
    scale = np.float32(1.0 / math.sqrt(v.sum_of_doubles(total) / columns + eps))
    factor = v.splat(scale)
    for column in range(0, whole, 32):
        scaled = v.load_floats(x + 4 * column) * factor
        v.store_floats(out + 4 * column, scaled * v.load_floats(weight + 4 * column))
    for column in range(whole, columns):
        scaled_one = v.load_float(x + 4 * column) * scale
        v.store_float(out + 4 * column, scaled_one * v.load_float(weight + 4 * column))


def _norm_task(args: int, counter: int, worker_idx: int) -> None:
    """Words: x, weight, out, rows, columns, eps."""
    x, weight, out, num_rows = _word(args, 0), _word(args, 1), _word(args, 2), _word(args, 3)
    columns, eps = _word(args, 4), lanes.double_from_bits(_word(args, 5))
    while True:
        first = claim(counter) * ROWS_AN_ITEM
        if first >= num_rows:
            return
        for row in range(first, min(first + ROWS_AN_ITEM, num_rows)):
            place = 4 * columns * row
            _norm_row(x + place, weight, columns, eps, out + place)


def _norm(
    x: F32Array,
    weight: F32Array,
    eps: float,
    out: F32Array,
    args: int,
    counter: int,
    pool: int,
    task: int,
) -> None:
    """`out` may be `x`. Shapes: x, out [rows, n]; weight [n]."""
    _set_word(args, 0, v.address_of(x))
    _set_word(args, 1, v.address_of(weight))
    _set_word(args, 2, v.address_of(out))
    _set_word(args, 3, x.shape[0])
    _set_word(args, 4, x.shape[1])
    _set_word(args, 5, lanes.bits_of_double(eps))
    run_on(pool, task, args, counter)


# -- rotary embedding -----------------------------------------------------------------------------


@helper
def _rotate(x: int, cos: int, sin: int, half: int, is_interleaved: bool) -> None:
    """One head in place: (a, b) becomes (a cos - b sin, a sin + b cos)."""
    whole = half // 32 * 32
    for pair in range(0, whole, 32):
        c, s = v.load_floats(cos + 4 * pair), v.load_floats(sin + 4 * pair)
        if is_interleaved:
            place = x + 8 * pair
            low, high = v.load_floats(place), v.load_floats(place + 128)
            a, b = lanes.even_lanes(low, high), lanes.odd_lanes(low, high)
            first, second = a * c - b * s, a * s + b * c
            v.store_floats(place, lanes.zip_low(first, second))
            v.store_floats(place + 128, lanes.zip_high(first, second))
        else:
            place = x + 4 * pair
            a, b = v.load_floats(place), v.load_floats(place + 4 * half)
            v.store_floats(place, a * c - b * s)
            v.store_floats(place + 4 * half, a * s + b * c)
    step, partner = (8, 4) if is_interleaved else (4, 4 * half)
    for pair in range(whole, half):
        c1, s1 = v.load_float(cos + 4 * pair), v.load_float(sin + 4 * pair)
        place = x + step * pair
        a1, b1 = v.load_float(place), v.load_float(place + partner)
        v.store_float(place, a1 * c1 - b1 * s1)
        v.store_float(place + partner, a1 * s1 + b1 * c1)


def _rope_task(args: int, counter: int, worker_idx: int) -> None:
    """Words: tokens, D, eps, cos, sin, pairs, interleaved; then x, weight or 0, heads, twice."""
    num_tokens, dim = _word(args, 0), _word(args, 1)
    eps = lanes.double_from_bits(_word(args, 2))
    half, is_interleaved = _word(args, 5), _word(args, 6) != 0
    while True:
        first = claim(counter) * TOKENS_AN_ITEM
        if first >= num_tokens:
            return
        for token in range(first, min(first + TOKENS_AN_ITEM, num_tokens)):
            cos, sin = _word(args, 3) + 4 * half * token, _word(args, 4) + 4 * half * token
            for which in range(7, 13, 3):
                weight, num_heads = _word(args, which + 1), _word(args, which + 2)
                x = _word(args, which) + 4 * dim * num_heads * token
                for _ in range(num_heads):
                    if weight != 0:
                        _norm_row(x, weight, dim, eps, x)
                    _rotate(x, cos, sin, half, is_interleaved)
                    x += 4 * dim


def _rope(
    q: F32Array,
    k: F32Array,
    q_weight: F32Array,
    k_weight: F32Array,
    eps: float,
    cos: F32Array,
    sin: F32Array,
    is_interleaved: bool,
    args: int,
    counter: int,
    pool: int,
    task: int,
) -> None:
    """In place. Shapes: q, k [T, heads, D]; weights [D], or [0] for none; cos, sin [T, pairs]."""
    _set_word(args, 0, q.shape[0])
    _set_word(args, 1, q.shape[2])
    _set_word(args, 2, lanes.bits_of_double(eps))
    _set_word(args, 3, v.address_of(cos))
    _set_word(args, 4, v.address_of(sin))
    _set_word(args, 5, cos.shape[1])
    _set_word(args, 6, is_interleaved)
    _set_word(args, 7, v.address_of(q))
    _set_word(args, 8, v.address_of(q_weight) if q_weight.size else 0)
    _set_word(args, 9, q.shape[1])
    _set_word(args, 10, v.address_of(k))
    _set_word(args, 11, v.address_of(k_weight) if k_weight.size else 0)
    _set_word(args, 12, k.shape[1])
    run_on(pool, task, args, counter)


# -- routing --------------------------------------------------------------------------------------


@helper
def _route_token(
    logits: int, num_experts: int, normalise: bool, num_used: int, scratch: int, ids: int, out: int
) -> None:
    """Softmax, then K times the best score left; of equal scores the lowest id.

    Scratch: scores [E padded], and these again with what is taken marked.
    """
    padded = (num_experts + 31) // 32 * 32
    highest = v.splat(_MINUS_INFINITY)
    for expert in range(0, padded, 32):
        rest = num_experts - expert
        if rest >= 32:
            logit = v.load_floats(logits + 4 * expert)
        else:
            logit = lanes.pad(v.load_padded(logits + 4 * expert, rest), rest, _MINUS_INFINITY)
        v.store_floats(scratch + 4 * expert, logit)
        highest = v.maximum(logit, highest)
    shift, total = v.splat(v.largest_of(highest)), v.zeros()
    for place in range(scratch, scratch + 4 * padded, 128):
        term = v.exp_lanes(v.load_floats(place) - shift)
        v.store_floats(place, term)
        total = total + term
    total = v.splat(v.sum_of(total))
    left = scratch + 4 * padded
    for expert in range(0, padded, 32):
        score = v.load_floats(scratch + 4 * expert) / total
        v.store_floats(scratch + 4 * expert, score)
        # Even of NaNs some expert is chosen: ids are indices, whatever the logits were.
        score = lanes.without_nan(score, _NOT_A_NUMBER)
        v.store_floats(left + 4 * expert, lanes.pad(score, num_experts - expert, _PADDING))
    chosen_total = np.float32(0)
    for rank in range(num_used):
        best = v.load_floats(left)
        for place in range(left + 128, left + 4 * padded, 128):
            best = v.maximum(best, v.load_floats(place))
        best_score, expert = v.largest_of(best), 0
        lane = lanes.first_equal(v.load_floats(left), best_score)
        while lane == 32:
            expert += 32
            lane = lanes.first_equal(v.load_floats(left + 4 * expert), best_score)
        expert += lane
        v.store_float(left + 4 * expert, _TAKEN)
        score_one = v.load_float(scratch + 4 * expert)
        chosen_total += score_one
        lanes.store_i32(ids + 4 * rank, expert)
        v.store_float(out + 4 * rank, score_one)
    if normalise:
        for rank in range(num_used):
            share = v.load_float(out + 4 * rank) / max(chosen_total, _SMALLEST_NORMAL_HALF)
            v.store_float(out + 4 * rank, share)


def _route_task(args: int, counter: int, worker_idx: int) -> None:
    """Words: logits, ids, weights, T, E, K, normalise, scratch."""
    num_tokens, num_experts, num_used = _word(args, 3), _word(args, 4), _word(args, 5)
    scratch = _word(args, 7) + worker_idx * 8 * ((num_experts + 31) // 32 * 32)
    while True:
        first = claim(counter) * TOKENS_AN_ITEM
        if first >= num_tokens:
            return
        for token in range(first, min(first + TOKENS_AN_ITEM, num_tokens)):
            chosen = 4 * num_used * token
            _route_token(
                _word(args, 0) + 4 * num_experts * token,
                num_experts,
                _word(args, 6) != 0,
                num_used,
                scratch,
                _word(args, 1) + chosen,
                _word(args, 2) + chosen,
            )


def _route(
    logits: F32Array,
    normalise: bool,
    ids: I32Array,
    weights: F32Array,
    scratch: int,
    args: int,
    counter: int,
    pool: int,
    task: int,
) -> None:
    """Shapes: logits [T, E]; ids, weights [T, K]; scratch: 8 bytes for each E, padded, a thread."""
    _set_word(args, 0, v.address_of(logits))
    _set_word(args, 1, v.address_of(ids))
    _set_word(args, 2, v.address_of(weights))
    _set_word(args, 3, logits.shape[0])
    _set_word(args, 4, logits.shape[1])
    _set_word(args, 5, ids.shape[1])
    _set_word(args, 6, normalise)
    _set_word(args, 7, scratch)
    run_on(pool, task, args, counter)


# -- compiled -------------------------------------------------------------------------------------

_CALL = [v.i64] * 4  # args, counter, pool, task


def _input(ndim: int) -> Any:
    return types.Array(v.f32, ndim, "C", readonly=True)


def _task(function: Kernel) -> RowFunction:
    return compile_row_function(function, v.void, *[v.i64] * 3)


@cache
def norm_kernel() -> tuple[Kernel, RowFunction]:
    """Like the others a function to call, and the task that it takes the address of."""
    arguments = [_input(2), _input(1), v.f64, v.f32[:, ::1], *_CALL]
    return compile_kernel(_norm, *arguments), _task(_norm_task)


@cache
def rope_kernel() -> tuple[Kernel, RowFunction]:
    heads = v.f32[:, :, ::1]
    arguments = [heads, heads, _input(1), _input(1), v.f64, _input(2), _input(2), types.boolean]
    return compile_kernel(_rope, *arguments, *_CALL), _task(_rope_task)


@cache
def route_kernel() -> tuple[Kernel, RowFunction]:
    arguments = [_input(2), types.boolean, types.int32[:, ::1], v.f32[:, ::1]]
    return compile_kernel(_route, *arguments, v.i64, *_CALL), _task(_route_task)
