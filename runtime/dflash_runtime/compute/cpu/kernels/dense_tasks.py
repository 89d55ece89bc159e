"""RMS norm, rotary embedding and gates.

A row's result depends on that row alone. Each kernel, which Python calls, writes a call's arguments
as words; threads run its task on rows.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from dflash_adapters.layers import Gate
from dflash_protocol.ids import F32Array
from dflash_runtime.compute.cpu.compile.compiling import (
    Kernel,
    RowFunction,
    compile_kernel,
    compile_task,
    helper,
    read_only,
)
from dflash_runtime.compute.cpu.kernels.words import set_word, word
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.exponentials import exp_lanes, softplus_lanes
from dflash_runtime.compute.cpu.simd.types import f32, f64, i64
from dflash_runtime.compute.cpu.simd.untyped import types
from dflash_runtime.compute.cpu.threads.parallel import claim, run_on

ROWS_AN_ITEM = 16
TOKENS_AN_ITEM = 8
GATED_ROWS_AN_ITEM = 4

NUM_WORDS = 14
"""Of a call's arguments, at most."""

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


def _norm_task(args: int, counter: int, worker_idx: int) -> None:
    """Words: x, weight, out, rows, columns, eps."""
    x, weight, out, num_rows = word(args, 0), word(args, 1), word(args, 2), word(args, 3)
    columns, eps = word(args, 4), v.double_from_bits(word(args, 5))
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
    memory: tuple[int, ...],
    pool: int,
    task: int,
) -> None:
    """`out` may be `x`. Shapes: x, out [rows, n]; weight [n]. Memory: as `_rope`'s."""
    args, counter = memory
    set_word(args, 0, v.address_of(x))
    set_word(args, 1, v.address_of(weight))
    set_word(args, 2, v.address_of(out))
    set_word(args, 3, x.shape[0])
    set_word(args, 4, x.shape[1])
    set_word(args, 5, v.bits_of_double(eps))
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


def _rope_task(args: int, counter: int, worker_idx: int) -> None:
    """Words: tokens, D, eps, cos, sin, pairs, interleaved; then twice: x, weight or 0, heads; then
    whether heads are divided by their root mean square afterwards."""
    num_tokens, dim = word(args, 0), word(args, 1)
    eps = v.double_from_bits(word(args, 2))
    half, is_interleaved = word(args, 5), word(args, 6) != 0
    norms_after = word(args, 13) != 0
    while True:
        first = claim(counter) * TOKENS_AN_ITEM
        if first >= num_tokens:
            return
        for token in range(first, min(first + TOKENS_AN_ITEM, num_tokens)):
            cos, sin = word(args, 3) + 4 * half * token, word(args, 4) + 4 * half * token
            for which in range(7, 13, 3):
                weight, num_heads = word(args, which + 1), word(args, which + 2)
                x = word(args, which) + 4 * dim * num_heads * token
                for _ in range(num_heads):
                    if weight != 0:
                        _norm_row(x, weight, dim, eps, x)
                    _rotate(x, cos, sin, half, is_interleaved)
                    if norms_after:
                        _norm_in_place(x, dim, eps)
                    x += 4 * dim


def _rope(
    q: F32Array,
    k: F32Array,
    q_weight: F32Array,
    k_weight: F32Array,
    eps: float,
    angles: tuple[F32Array, bool],
    norms_after: bool,
    memory: tuple[int, ...],
    pool: int,
    task: int,
) -> None:
    """In place. `angles`: cosines and sines, and whether pairs are interleaved. Memory: NUM_WORDS
    words and the counter.

    Shapes: q, k [T, heads, D]; weights [D], or [0] for none; cosines and sines [2, T, pairs].
    """
    args, counter = memory
    turns, is_interleaved = angles
    num_bytes = 4 * turns.shape[1] * turns.shape[2]
    set_word(args, 0, q.shape[0])
    set_word(args, 1, q.shape[2])
    set_word(args, 2, v.bits_of_double(eps))
    set_word(args, 3, v.address_of(turns))
    set_word(args, 4, v.address_of(turns) + num_bytes)
    set_word(args, 5, turns.shape[2])
    set_word(args, 6, is_interleaved)
    set_word(args, 7, v.address_of(q))
    set_word(args, 8, v.address_of(q_weight) if q_weight.size else 0)
    set_word(args, 9, q.shape[1])
    set_word(args, 10, v.address_of(k))
    set_word(args, 11, v.address_of(k_weight) if k_weight.size else 0)
    set_word(args, 12, k.shape[1])
    set_word(args, 13, norms_after)
    run_on(pool, task, args, counter)


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


def _gate_task(args: int, counter: int, worker_idx: int) -> None:
    """Words: x, gate, out, rows, columns, gates of a row, kind."""
    x, gate, out, num_rows = word(args, 0), word(args, 1), word(args, 2), word(args, 3)
    columns, num_gates, kind = word(args, 4), word(args, 5), word(args, 6)
    while True:
        first = claim(counter) * GATED_ROWS_AN_ITEM
        if first >= num_rows:
            return
        for row in range(first, min(first + GATED_ROWS_AN_ITEM, num_rows)):
            place = 4 * columns * row
            _gate_row(x + place, gate + 4 * num_gates * row, out + place, columns, num_gates, kind)


def _gate(
    x: F32Array,
    gate: F32Array,
    kind: int,
    out: F32Array,
    memory: tuple[int, ...],
    pool: int,
    task: int,
) -> None:
    """`out` may be `x`. Shapes: x, out [rows, C]; gate [rows, n]. Memory: NUM_WORDS words and the
    counter."""
    args, counter = memory
    set_word(args, 0, v.address_of(x))
    set_word(args, 1, v.address_of(gate))
    set_word(args, 2, v.address_of(out))
    set_word(args, 3, x.shape[0])
    set_word(args, 4, x.shape[1])
    set_word(args, 5, gate.shape[1])
    set_word(args, 6, kind)
    run_on(pool, task, args, counter)


# -- compiled -------------------------------------------------------------------------------------


@cache
def norm_kernel() -> tuple[Kernel, RowFunction]:
    """The kernel, and the task whose address it is passed."""
    arguments = [read_only(f32, 2), read_only(f32, 1), f64, f32[:, ::1], types.UniTuple(i64, 2)]
    return compile_kernel(_norm, *arguments, i64, i64), compile_task(_norm_task)


@cache
def rope_kernel() -> tuple[Kernel, RowFunction]:
    heads, angles = f32[:, :, ::1], types.Tuple((read_only(f32, 3), types.boolean))
    arguments = [heads, heads, read_only(f32, 1), read_only(f32, 1), f64, angles, types.boolean]
    memory = types.UniTuple(i64, 2)
    return compile_kernel(_rope, *arguments, memory, i64, i64), compile_task(_rope_task)


@cache
def gate_kernel() -> tuple[Kernel, RowFunction]:
    rows, memory = read_only(f32, 2), types.UniTuple(i64, 2)
    arguments = [rows, rows, i64, f32[:, ::1], memory, i64, i64]
    return compile_kernel(_gate, *arguments), compile_task(_gate_task)
