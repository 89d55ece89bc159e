"""RMS norm, rotary embedding and gates.

A row's result depends on that row alone.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from dflash_adapters.layers import Gate
from dflash_protocol.ids import F32Array
from dflash_runtime.compute.cpu.compile.compiling import RowFunction, compile_task, helper
from dflash_runtime.compute.cpu.kernels.words import (
    FIRST_FIELD,
    Call,
    address,
    double_bits,
    get,
    task_call,
)
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.exponentials import exp_lanes, softplus_lanes
from dflash_runtime.compute.cpu.threads.parallel import claim

ROWS_AN_ITEM = 16
TOKENS_AN_ITEM = 8
GATED_ROWS_AN_ITEM = 4

KINDS = {kind: number for number, kind in enumerate(Gate)}
_SIGMOID, _SOFTPLUS = KINDS[Gate.SIGMOID], KINDS[Gate.SOFTPLUS]


# -- RMS norm -------------------------------------------------------------------------------------


@helper
def _norm_factor(x: int, columns: int, eps: float) -> float:
    """The factor of a row. Squares are summed in float64."""
    whole, rest = columns // 32 * 32, columns % 32
    total = v.double_zeros()
    for column in range(0, whole, 32):
        total = v.add_squares(v.load_floats(x + 4 * column), total)
    if rest:
        total = v.add_squares(v.load_padded(x + 4 * whole, rest), total)
    return np.float32(1.0 / math.sqrt(v.sum_of_doubles(total) / columns + eps))  # type: ignore[return-value]


@helper
def _norm_row(x: int, weight: int, columns: int, eps: float, out: int) -> None:
    """`out` may be `x`."""
    whole = columns // 32 * 32
    scale = _norm_factor(x, columns, eps)
    factor = v.splat(scale)
    for column in range(0, whole, 32):
        scaled = v.load_floats(x + 4 * column) * factor
        v.store_floats(out + 4 * column, scaled * v.load_floats(weight + 4 * column))
    for column in range(whole, columns):
        scaled_one = v.load_float(x + 4 * column) * scale
        v.store_float(out + 4 * column, scaled_one * v.load_float(weight + 4 * column))


@helper
def _norm_in_place(x: int, columns: int, eps: float) -> None:
    """RMS norm without weights."""
    scale = _norm_factor(x, columns, eps)
    for column in range(0, columns - 31, 32):
        v.store_floats(x + 4 * column, v.load_floats(x + 4 * column) * v.splat(scale))
    for column in range(columns // 32 * 32, columns):
        v.store_float(x + 4 * column, v.load_float(x + 4 * column) * scale)


(
    X,
    WEIGHT,
    OUT,
    ROWS,
    COLUMNS,
    EPS_BITS,
) = range(FIRST_FIELD, FIRST_FIELD + 6)


def _norm_task(args: int, counter: int, worker_idx: int) -> None:
    x, weight, out, num_rows = get(args, X), get(args, WEIGHT), get(args, OUT), get(args, ROWS)
    columns, eps = get(args, COLUMNS), v.double_from_bits(get(args, EPS_BITS))
    while True:
        first = claim(counter) * ROWS_AN_ITEM
        if first >= num_rows:
            return
        for row in range(first, min(first + ROWS_AN_ITEM, num_rows)):
            place = 4 * columns * row
            _norm_row(x + place, weight, columns, eps, out + place)


def norm_call(x: F32Array, weight: F32Array, out: F32Array, eps: float) -> Call:
    """Over the last axis. `out` may be `x`. Shapes: x, out [..., n]; weight [n]."""
    columns = weight.shape[0]
    places = address(x), address(weight), address(out)
    fields = [*places, x.size // columns, columns, double_bits(eps)]
    return task_call(norm_task(), x.size, fields, per_token=(ROWS,))


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
            a, b = v.even_lanes(low, high), v.odd_lanes(low, high)
            first, second = a * c - b * s, a * s + b * c
            v.store_floats(place, v.zip_low(first, second))
            v.store_floats(place + 128, v.zip_high(first, second))
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


(
    NUM_TOKENS,
    HEAD_DIM,
    ROPE_EPS_BITS,
    COSINES,  # [T, PAIRS]
    SINES,  # the same
    PAIRS,
    INTERLEAVED,
    NORMS_AFTER,
    QUERIES,  # three fields each: heads, their norm's weight or 0, their number
    KEYS,
) = (*range(FIRST_FIELD, FIRST_FIELD + 9), FIRST_FIELD + 11)


def _rope_task(args: int, counter: int, worker_idx: int) -> None:
    num_tokens, dim = get(args, NUM_TOKENS), get(args, HEAD_DIM)
    eps = v.double_from_bits(get(args, ROPE_EPS_BITS))
    half, is_interleaved = get(args, PAIRS), get(args, INTERLEAVED) != 0
    norms_after = get(args, NORMS_AFTER) != 0
    while True:
        first = claim(counter) * TOKENS_AN_ITEM
        if first >= num_tokens:
            return
        for token in range(first, min(first + TOKENS_AN_ITEM, num_tokens)):
            cos, sin = get(args, COSINES) + 4 * half * token, get(args, SINES) + 4 * half * token
            for which in range(QUERIES, KEYS + 3, 3):
                weight, num_heads = get(args, which + 1), get(args, which + 2)
                x = get(args, which) + 4 * dim * num_heads * token
                for _ in range(num_heads):
                    if weight != 0:
                        _norm_row(x, weight, dim, eps, x)
                    _rotate(x, cos, sin, half, is_interleaved)
                    if norms_after:
                        _norm_in_place(x, dim, eps)
                    x += 4 * dim


def rope_call(
    q: F32Array,
    k: F32Array,
    norms: tuple[F32Array | None, F32Array | None],
    angles: F32Array,
    *,
    eps: float,
    is_interleaved: bool,
    norms_after: bool,
) -> Call:
    """In place. `norms` are the weights of the heads' norms, `angles` cosines and sines of
    successive tokens, the first of which are these.

    Shapes: q, k [T, heads, D]; norms [D] each; angles [2, T or more, pairs].
    """
    q_norm, k_norm = norms
    num_tokens, q_heads, dim = q.shape
    cosines, num_pairs = address(angles), angles.shape[2]
    sines = cosines + 4 * num_pairs * angles.shape[1]
    fields = [num_tokens, dim, double_bits(eps), cosines, sines]
    fields += [num_pairs, is_interleaved, norms_after]
    fields += [address(q), 0 if q_norm is None else address(q_norm), q_heads]
    fields += [address(k), 0 if k_norm is None else address(k_norm), k.shape[1]]
    row_bytes = 4 * num_pairs
    return task_call(
        rope_task(),
        q.size + k.size,
        fields,
        per_token=(NUM_TOKENS,),
        per_position=((COSINES, row_bytes), (SINES, row_bytes)),
    )


# -- gates ----------------------------------------------------------------------------------------


@helper
def _factor(gate: Any, kind: int) -> Any:
    if kind == _SOFTPLUS:
        return softplus_lanes(gate)
    share = v.splat(1.0) / (v.splat(1.0) + exp_lanes(v.zeros() - gate))
    return share if kind == _SIGMOID else gate * share


@helper
def _gate_row(x: int, gate: int, out: int, columns: int, num_gates: int, kind: int) -> None:
    width = columns // num_gates
    if width == 1:
        for column in range(0, columns - 31, 32):
            factor = _factor(v.load_floats(gate + 4 * column), kind)
            v.store_floats(out + 4 * column, v.load_floats(x + 4 * column) * factor)
        whole, rest = 4 * (columns // 32 * 32), columns % 32
        if rest:
            factor = _factor(v.load_padded(gate + whole, rest), kind)
            v.store_partial(out + whole, v.load_padded(x + whole, rest) * factor, rest)
        return
    for column in range(0, columns, width):
        factor = _factor(v.splat(v.load_float(gate)), kind)
        gate += 4
        place, target = x + 4 * column, out + 4 * column
        for lane in range(0, width - 31, 32):
            v.store_floats(target + 4 * lane, v.load_floats(place + 4 * lane) * factor)
        whole, rest = 4 * (width // 32 * 32), width % 32
        if rest:
            v.store_partial(target + whole, v.load_padded(place + whole, rest) * factor, rest)


(
    GATED,
    GATE,
    GATED_OUT,
    GATED_ROWS,
    GATED_COLUMNS,
    NUM_GATES,  # of a row
    KIND,
) = range(FIRST_FIELD, FIRST_FIELD + 7)


def _gate_task(args: int, counter: int, worker_idx: int) -> None:
    x, gate, out = get(args, GATED), get(args, GATE), get(args, GATED_OUT)
    num_rows, columns = get(args, GATED_ROWS), get(args, GATED_COLUMNS)
    num_gates, kind = get(args, NUM_GATES), get(args, KIND)
    while True:
        first = claim(counter) * GATED_ROWS_AN_ITEM
        if first >= num_rows:
            return
        for row in range(first, min(first + GATED_ROWS_AN_ITEM, num_rows)):
            place = 4 * columns * row
            _gate_row(x + place, gate + 4 * num_gates * row, out + place, columns, num_gates, kind)


def gate_call(x: F32Array, gate: F32Array, kind: Gate, out: F32Array) -> Call:
    """`out` may be `x`. Shapes: x, out [T, C]; gate [T, n]."""
    places = address(x), address(gate), address(out)
    fields = [*places, x.shape[0], x.shape[1], gate.shape[1], KINDS[kind]]
    return task_call(gate_task(), x.size, fields, per_token=(GATED_ROWS,))


# -- compiled -------------------------------------------------------------------------------------


@cache
def norm_task() -> RowFunction:
    return compile_task(_norm_task)


@cache
def rope_task() -> RowFunction:
    return compile_task(_rope_task)


@cache
def gate_task() -> RowFunction:
    return compile_task(_gate_task)
