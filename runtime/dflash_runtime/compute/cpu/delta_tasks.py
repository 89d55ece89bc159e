"""The gated delta rule, one key head with its value heads after the other.

Positions are cut into blocks of 32. Within a block the matrix M of a value head stays what it was
at the block's begin; what tokens add to it is kept as rows beside it, one for each token:

    M(t) = P(t) M + sum over j <= t of D(t, j) row_j k_jᵀ           P, D: products of exp(g)
    row_t = b (v_t - P(t) M k_t - sum over j < t of D(t, j) (k_j · k_t) row_j)
    out_t =         P(t) M q_t + sum over j <= t of D(t, j) (k_j · q_t) row_j

At the end of a block the rows are added to the matrix. So a step reads the matrix once and seldom
writes it, many tokens are products of matrices, and all sums are chains whose order depends on
positions alone: a token has the same bits alone or in any chunk, with any number of threads.

Source: Yang et al. 2024 (arXiv 2406.06484, the delta rule by chunks; arXiv 2412.06464, its decay).
Knows nothing of arrays: a call is described in words that its kernel fills in.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from dflash_protocol.ids import F32Array, I64Array
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
from dflash_runtime.compute.cpu.recurrent_tiles import add_products
from dflash_runtime.compute.cpu.untyped import types
from dflash_runtime.compute.cpu.words import set_word, word

DELTA_BLOCK = 32
"""Positions between two states of a matrix: as many as a vector has lanes."""

(
    # Of a layer and its state, addresses first; see recurrent.RecurrentState.
    MATRICES,
    KEYS,
    ROWS,
    DECAYS,
    TOTALS,
    KEY_HEADS,
    VALUE_HEADS,
    KEY_DIM,
    VALUE_DIM,
    IS_TILED,
    # Of a call.
    MIXED,
    ALPHA,
    BETA,
    A,
    DT_BIAS,
    OUT,
    NUM_TOKENS,
    FIRST_POSITION,
    EPS_BITS,
    SCRATCH,
    SCRATCH_BYTES,
    PRODUCTS,
) = range(22)

NUM_WORDS = 22
NUM_OF_LAYER = MIXED

_ROWS_AT_ONCE = 8

_TRACE = np.float32(2.0**-80)
"""What has decayed to less is nothing: CPUs take long for products of numbers that are almost 0."""


def scratch_bytes(key_dim: int, value_dim: int) -> int:
    """What one thread needs; see `_delta_task`."""
    padded = -(-value_dim // 32) * 32
    pairs = 2 * DELTA_BLOCK
    return 4 * (pairs * (key_dim + 32) + pairs * (32 + 32 + padded) + 32 * key_dim + 3 * 32)


@helper
def _padded(dim: int) -> int:
    return (dim + 31) // 32 * 32


@helper
def _unit_row(x: int, dim: int, eps: float, factor: float, out: int) -> None:
    """``factor x / sqrt(sum x² + eps)``; squares are summed in float64."""
    whole, rest = dim // 32 * 32, dim % 32
    total = v.double_zeros()
    for d in range(0, whole, 32):
        total = v.add_squares(v.load_floats(x + 4 * d), total)
    if rest:
        total = v.add_squares(v.load_padded(x + 4 * whole, rest), total)
    scale = np.float32(factor / math.sqrt(v.sum_of_doubles(total) + eps))
    for d in range(0, whole, 32):
        v.store_floats(out + 4 * d, v.load_floats(x + 4 * d) * v.splat(scale))
    for d in range(whole, dim):
        v.store_float(out + 4 * d, v.load_float(x + 4 * d) * scale)


@helper
def _clear(place: int, num_floats: int) -> None:
    for offset in range(0, 4 * num_floats, 128):
        v.store_floats(place + offset, v.zeros())


@helper
def _scale(place: int, num_floats: int, factor: Any) -> None:
    for offset in range(0, 4 * num_floats, 128):
        v.store_floats(place + offset, v.load_floats(place + offset) * v.splat(factor))


@helper
def _fade(place: int, num_floats: int, factor: Any) -> None:
    """What is left of numbers after they have decayed."""
    for offset in range(0, 4 * num_floats, 128):
        faded = v.load_floats(place + offset) * v.splat(factor)
        v.store_floats(place + offset, lanes.without_traces(faded, _TRACE))


@helper
def _prepare_key_head(
    args: int, key_head: int, token: int, num_tokens: int, first: int, units: int, dots: int
) -> None:
    """Keys and queries of length 1, in turn, and their products with all keys of the block.

    `first`: where in the block the tokens begin. Shapes: units [2 num_tokens][Dk]; dots
    [2 num_tokens][32].
    """
    dim, key_heads = word(args, KEY_DIM), word(args, KEY_HEADS)
    channels = 2 * key_heads * dim + word(args, VALUE_HEADS) * word(args, VALUE_DIM)
    eps = lanes.double_from_bits(word(args, EPS_BITS))
    keys = word(args, KEYS) + 128 * dim * key_head
    for t in range(num_tokens):
        query = word(args, MIXED) + 4 * ((token + t) * channels + key_head * dim)
        unit = units + 8 * dim * t
        _unit_row(query + 4 * key_heads * dim, dim, eps, 1.0, unit)
        _unit_row(query, dim, eps, 1.0 / math.sqrt(dim), unit + 4 * dim)
        for d in range(dim):
            v.store_float(keys + 128 * d + 4 * (first + t), v.load_float(unit + 4 * d))
    _clear(dots, 2 * num_tokens * 32)
    products = word(args, PRODUCTS)
    add_products(products, 2 * num_tokens, 32, units, 4 * dim, keys, 128, dim, dots, 128)


@helper
def _gates(args: int, head: int, token: int, num_tokens: int, decays: int, shares: int) -> None:
    """exp(g) and b of each token, as 32 lanes each."""
    heads = word(args, VALUE_HEADS)
    for t in range(num_tokens):
        place = 4 * ((token + t) * heads + head)
        v.store_float(decays + 4 * t, v.load_float(word(args, ALPHA) + place))
        v.store_float(shares + 4 * t, v.load_float(word(args, BETA) + place))
    bias = v.splat(v.load_float(word(args, DT_BIAS) + 4 * head))
    rate = v.splat(v.load_float(word(args, A) + 4 * head))
    decay = rate * v.softplus_lanes(v.load_padded(decays, num_tokens) + bias)
    v.store_floats(decays, v.exp_lanes(decay))
    one = v.splat(np.float32(1))
    share = one / (one + v.exp_lanes(v.zeros() - v.load_padded(shares, num_tokens)))
    v.store_floats(shares, share)


@helper
def _terms(
    args: int, head: int, num_tokens: int, first: int, decays: int, dots: int, terms: int
) -> None:
    """Factors of earlier rows: those of row_t with their sign, then those of out_t, in turn.

    `decays`, exp(g) of each token, become what is left of the matrix after it. Only the first
    ``first + t`` of the 32 factors of a row, and one more of an out, mean anything.
    """
    since, total = word(args, DECAYS) + 128 * head, word(args, TOTALS) + 4 * head
    left, product = v.load_floats(since), v.load_float(total)
    if first == 0:
        left, product = v.zeros(), np.float32(1)
    for t in range(num_tokens):
        decay = v.load_float(decays + 4 * t)
        left = lanes.without_traces(left * v.splat(decay), _TRACE)
        left = lanes.with_one(left, first + t)
        product = product * decay
        if product < _TRACE:
            product = np.float32(0)
        v.store_float(decays + 4 * t, product)
        pair = 256 * t
        v.store_floats(terms + pair, v.zeros() - v.load_floats(dots + pair) * left)
        v.store_floats(terms + pair + 128, v.load_floats(dots + pair + 128) * left)
    v.store_floats(since, left)
    v.store_float(total, product)


@helper
def _begin_rows(
    args: int,
    head: int,
    token: int,
    num_tokens: int,
    has_matrix: bool,
    totals: int,
    products: int,
    row: int,
) -> None:
    """What rows and outs are without earlier rows: ``v - P M k`` and ``P M q``.

    Shapes: products [2 num_tokens][V padded], M k and M q in turn, if there is a matrix; the latter
    become outs.
    """
    dim, value_dim = word(args, KEY_DIM), word(args, VALUE_DIM)
    width = _padded(value_dim)
    num_queries = 2 * word(args, KEY_HEADS) * dim
    channels = num_queries + word(args, VALUE_HEADS) * value_dim
    for t in range(num_tokens):
        value = word(args, MIXED) + 4 * ((token + t) * channels + num_queries + head * value_dim)
        total = v.splat(v.load_float(totals + 4 * t))
        out = products + 4 * width
        for lane in range(0, width, 32):
            if lane + 32 <= value_dim:
                begin = v.load_floats(value + 4 * lane)
            else:
                begin = v.load_padded(value + 4 * lane, value_dim - lane)
            if has_matrix:
                begin = v.fma(v.zeros() - total, v.load_floats(products + 4 * lane), begin)
                v.store_floats(out + 4 * lane, v.load_floats(out + 4 * lane) * total)
            else:
                v.store_floats(out + 4 * lane, v.zeros())
            v.store_floats(row + 4 * lane, begin)
        products += 8 * width
        row += 4 * width


@helper
def _finish_rows(
    function: int,
    num_tokens: int,
    first: int,
    width: int,
    terms: int,
    shares: int,
    rows: int,
    products: int,
) -> None:
    """Add earlier rows to rows and outs: those of before some tokens at once, then one by one."""
    stride = 4 * width
    start = 0
    while start < num_tokens:
        end = min(start + _ROWS_AT_ONCE, num_tokens)
        known = first + start
        row, out = rows + stride * known, products + stride * (2 * start + 1)
        term, size = terms + 256 * start, end - start
        add_products(function, size, width, term, 256, rows, stride, known, row, stride)
        add_products(function, size, width, term + 128, 256, rows, stride, known, out, 2 * stride)
        begin = row
        term += 4 * known
        for t in range(size):
            add_products(function, 1, width, term, 0, begin, stride, t, row, 0)
            _scale(row, width, v.load_float(shares + 4 * (start + t)))
            add_products(function, 1, width, term + 128, 0, begin, stride, t + 1, out, 0)
            term += 256
            row += stride
            out += 2 * stride
        start = end


@helper
def _end_block(args: int, key_head: int, head: int, has_matrix: bool, factors: int) -> None:
    """``M = P M + sum of D(end, j) row_j k_jᵀ``. Shapes: factors [Dk][32]."""
    dim, width = word(args, KEY_DIM), _padded(word(args, VALUE_DIM))
    matrix = word(args, MATRICES) + 4 * width * dim * head
    rows = word(args, ROWS) + 128 * width * head
    keys = word(args, KEYS) + 128 * dim * key_head
    left = v.load_floats(word(args, DECAYS) + 128 * head)
    for offset in range(0, 128 * dim, 128):
        v.store_floats(factors + offset, v.load_floats(keys + offset) * left)
    if has_matrix:
        _fade(matrix, dim * width, v.load_float(word(args, TOTALS) + 4 * head))
    else:
        _clear(matrix, dim * width)
    products, stride = word(args, PRODUCTS), 4 * width
    add_products(products, dim, width, factors, 128, rows, stride, 32, matrix, stride)


@helper
def _store_outs(args: int, head: int, token: int, num_tokens: int, outs: int) -> None:
    heads, dim = word(args, VALUE_HEADS), word(args, VALUE_DIM)
    width = _padded(dim)
    for t in range(num_tokens):
        target = word(args, OUT) + 4 * dim * ((token + t) * heads + head)
        out = outs + 8 * width * t
        for lane in range(0, width, 32):
            if lane + 32 <= dim:
                v.store_floats(target + 4 * lane, v.load_floats(out + 4 * lane))
            else:
                v.store_partial(target + 4 * lane, v.load_floats(out + 4 * lane), dim - lane)


def _delta_task(args: int, counter: int, worker_idx: int) -> None:
    """Take items until none is left: a key head with its value heads.

    Scratch: units [64][Dk], dots [64][32], terms [64][32], products [64][V padded], factors
    [Dk][32], decays and shares [32].
    """
    key_heads = word(args, KEY_HEADS)
    group = word(args, VALUE_HEADS) // key_heads
    dim, value_dim = word(args, KEY_DIM), word(args, VALUE_DIM)
    width = _padded(value_dim)
    end = word(args, FIRST_POSITION) + word(args, NUM_TOKENS)
    units = word(args, SCRATCH) + worker_idx * word(args, SCRATCH_BYTES)
    dots = units + 4 * 64 * _padded(dim)
    terms = dots + 64 * 128
    products = terms + 64 * 128
    factors = products + 4 * 64 * width
    decays = factors + 128 * dim
    shares = decays + 128
    while True:
        key_head = claim(counter)
        if key_head >= key_heads:
            return
        position = word(args, FIRST_POSITION)
        while position < end:
            first = position % 32
            size = min(32 - first, end - position)
            token = position - word(args, FIRST_POSITION)
            has_matrix = position >= 32
            _prepare_key_head(args, key_head, token, size, first, units, dots)
            for member in range(group):
                head = key_head + member * key_heads
                if word(args, IS_TILED) == 0:
                    head = key_head * group + member
                rows = word(args, ROWS) + 128 * width * head
                _gates(args, head, token, size, decays, shares)
                _terms(args, head, size, first, decays, dots, terms)
                if has_matrix:
                    matrix, stride = word(args, MATRICES) + 4 * width * dim * head, 4 * width
                    _clear(products, 2 * size * width)
                    add_products(
                        word(args, PRODUCTS),
                        2 * size,
                        width,
                        units,
                        4 * dim,
                        matrix,
                        stride,
                        dim,
                        products,
                        stride,
                    )
                row = rows + 4 * width * first
                _begin_rows(args, head, token, size, has_matrix, decays, products, row)
                function = word(args, PRODUCTS)
                _finish_rows(function, size, first, width, terms, shares, rows, products)
                _store_outs(args, head, token, size, products + 4 * width)
                if first + size == 32:
                    _end_block(args, key_head, head, has_matrix, factors)
            position += size


def _delta_rule(
    layer: I64Array,
    mixed: F32Array,
    alpha: F32Array,
    beta: F32Array,
    a: F32Array,
    dt_bias: F32Array,
    out: F32Array,
    first_position: int,
    eps: float,
    one_scratch: int,
    args: int,
    scratch: int,
    counter: int,
    pool: int,
    task: int,
    products: int,
) -> None:
    """`layer` is copied to `args`, which has room for NUM_WORDS words; else see ops.Ops."""
    for index in range(NUM_OF_LAYER):
        set_word(args, index, layer[index])
    set_word(args, MIXED, v.address_of(mixed))
    set_word(args, ALPHA, v.address_of(alpha))
    set_word(args, BETA, v.address_of(beta))
    set_word(args, A, v.address_of(a))
    set_word(args, DT_BIAS, v.address_of(dt_bias))
    set_word(args, OUT, v.address_of(out))
    set_word(args, NUM_TOKENS, mixed.shape[0])
    set_word(args, FIRST_POSITION, first_position)
    set_word(args, EPS_BITS, lanes.bits_of_double(eps))
    set_word(args, SCRATCH, scratch)
    set_word(args, SCRATCH_BYTES, one_scratch)
    set_word(args, PRODUCTS, products)
    run_on(pool, task, args, counter)


@cache
def delta_kernel() -> tuple[Kernel, RowFunction]:
    """A function to call, and the task that it takes the address of."""
    row, rows = (types.Array(v.f32, ndim, "C", readonly=True) for ndim in (1, 2))
    arguments = [v.i64[::1], rows, rows, rows, row, row, v.f32[:, :, ::1], v.i64, v.f64]
    task = compile_row_function(_delta_task, v.void, *[v.i64] * 3)
    return compile_kernel(_delta_rule, *arguments, *[v.i64] * 7), task
