"""The gated delta rule: its parts, each for some tokens of a block, and the task that uses them for
consecutive tokens.

Positions are cut into blocks of 32. Within a block the matrix M of a value head stays as it was at
the block's start; each token's update is kept beside it as a row:

    M(t) = P(t) M + sum over j <= t of D(t, j) row_j k_jᵀ           P, D: products of exp(g)
    row_t = b (v_t - P(t) M k_t - sum over j < t of D(t, j) (k_j · k_t) row_j)
    out_t =         P(t) M q_t + sum over j <= t of D(t, j) (k_j · q_t) row_j

At the end of a block the rows are added to the matrix. So a step reads the matrix once and seldom
writes it, many tokens become matrix products, and all sums are chains whose order depends on
positions alone: a token has the same bits alone or in any chunk, with any number of threads.

Source: Yang et al. 2024 (arXiv 2406.06484, the delta rule by chunks; arXiv 2412.06464, its decay).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from dflash_protocol.ids import F32Array, I64Array
from dflash_runtime.compute.cpu.compile.compiling import RowFunction, compile_task, helper
from dflash_runtime.compute.cpu.kernels.recurrent_tiles import add_products, products_function
from dflash_runtime.compute.cpu.kernels.words import (
    FIRST_FIELD,
    Call,
    address,
    double_bits,
    task_call,
    word,
)
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.exponentials import exp_lanes, softplus_lanes
from dflash_runtime.compute.cpu.threads.parallel import claim
from dflash_runtime.compute.host_ops import DeltaInputs
from dflash_runtime.compute.host_room import STATE_BLOCK

# -- parts ----------------------------------------------------------------------------------------

DELTA_BLOCK = STATE_BLOCK
"""Positions between updates of a matrix: as many as a vector has lanes."""

(
    # A layer and its state, addresses first; see kv_cache.BlockedState.
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
    # A call.
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
) = range(FIRST_FIELD, FIRST_FIELD + 22)

NUM_WORDS = FIRST_FIELD + 22
NUM_LAYER_WORDS = MIXED

_ROWS_AT_ONCE = 8

_TINY = np.float32(2.0**-80)
"""Smaller values become 0 when they decay: products of denormal numbers are slow on CPUs."""


@helper
def padded(dim: int) -> int:
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
def unit_pair(args: int, query: int, out: int) -> None:
    """A token's key and query of one head, normalised to length 1. Shapes: out [2][Dk]."""
    dim, eps = word(args, KEY_DIM), v.double_from_bits(word(args, EPS_BITS))
    _unit_row(query + 4 * word(args, KEY_HEADS) * dim, dim, eps, 1.0, out)
    _unit_row(query, dim, eps, 1.0 / math.sqrt(dim), out + 4 * dim)


@helper
def clear(place: int, num_floats: int) -> None:
    for offset in range(0, 4 * num_floats, 128):
        v.store_floats(place + offset, v.zeros())


@helper
def _scale(place: int, num_floats: int, factor: Any) -> None:
    for offset in range(0, 4 * num_floats, 128):
        v.store_floats(place + offset, v.load_floats(place + offset) * v.splat(factor))


@helper
def _decay(place: int, num_floats: int, factor: Any) -> None:
    """Multiply numbers by their decay; tiny results become 0."""
    for offset in range(0, 4 * num_floats, 128):
        decayed = v.load_floats(place + offset) * v.splat(factor)
        v.store_floats(place + offset, v.flush_tiny(decayed, _TINY))


@helper
def value_head(args: int, key_head: int, member: int) -> int:
    """The `member`-th value head of a key head."""
    key_heads = word(args, KEY_HEADS)
    if word(args, IS_TILED) == 0:
        return key_head * (word(args, VALUE_HEADS) // key_heads) + member  # type: ignore[no-any-return]
    return key_head + member * key_heads  # type: ignore[no-any-return]


@helper
def prepare_key_head(
    args: int, key_head: int, token: int, num_tokens: int, first: int, units: int, dots: int
) -> None:
    """Normalised keys and queries, alternating, and their products with all keys of the block.

    `first`: index in the block of the first token.
    Shapes: units [2 num_tokens][Dk]; dots [2 num_tokens][32].
    """
    dim, key_heads = word(args, KEY_DIM), word(args, KEY_HEADS)
    channels = 2 * key_heads * dim + word(args, VALUE_HEADS) * word(args, VALUE_DIM)
    keys = word(args, KEYS) + 128 * dim * key_head
    for t in range(num_tokens):
        query = word(args, MIXED) + 4 * ((token + t) * channels + key_head * dim)
        unit = units + 8 * dim * t
        unit_pair(args, query, unit)
        for d in range(dim):
            v.store_float(keys + 128 * d + 4 * (first + t), v.load_float(unit + 4 * d))
    clear(dots, 2 * num_tokens * 32)
    products = word(args, PRODUCTS)
    add_products(products, 2 * num_tokens, 32, units, 4 * dim, keys, 128, dim, dots, 128)


@helper
def gates(args: int, head: int, token: int, num_tokens: int, decays: int, shares: int) -> None:
    """exp(g) and b of each token, in 32 lanes each."""
    heads = word(args, VALUE_HEADS)
    for t in range(num_tokens):
        place = 4 * ((token + t) * heads + head)
        v.store_float(decays + 4 * t, v.load_float(word(args, ALPHA) + place))
        v.store_float(shares + 4 * t, v.load_float(word(args, BETA) + place))
    bias = v.splat(v.load_float(word(args, DT_BIAS) + 4 * head))
    rate = v.splat(v.load_float(word(args, A) + 4 * head))
    decay = rate * softplus_lanes(v.load_padded(decays, num_tokens) + bias)
    v.store_floats(decays, exp_lanes(decay))
    one = v.splat(np.float32(1))
    share = one / (one + exp_lanes(v.zeros() - v.load_padded(shares, num_tokens)))
    v.store_floats(shares, share)


@helper
def decayed_terms(
    args: int, head: int, num_tokens: int, first: int, decays: int, dots: int, terms: int
) -> None:
    """Factors of earlier rows: negated those of row_t, then those of out_t, alternating.

    `decays`, exp(g) of each token on entry, become the matrix's remaining factor after it. Only the
    first ``first + t`` of a row's 32 factors, and one more of an out's, are meaningful.
    """
    since, total = word(args, DECAYS) + 128 * head, word(args, TOTALS) + 4 * head
    left, product = v.load_floats(since), v.load_float(total)
    if first == 0:
        left, product = v.zeros(), np.float32(1)
    for t in range(num_tokens):
        decay = v.load_float(decays + 4 * t)
        left = v.flush_tiny(left * v.splat(decay), _TINY)
        left = v.with_one(left, first + t)
        product = product * decay
        if product < _TINY:
            product = np.float32(0)
        v.store_float(decays + 4 * t, product)
        pair = 256 * t
        v.store_floats(terms + pair, v.zeros() - v.load_floats(dots + pair) * left)
        v.store_floats(terms + pair + 128, v.load_floats(dots + pair + 128) * left)
    v.store_floats(since, left)
    v.store_float(total, product)


@helper
def begin_rows(
    args: int,
    head: int,
    token: int,
    num_tokens: int,
    has_matrix: bool,
    totals: int,
    products: int,
    row: int,
) -> None:
    """Start rows and outs without earlier rows: ``v - P M k`` and ``P M q``.

    Shapes: products [2 num_tokens][V padded], M k and M q alternating, if there is a matrix; the
    latter become outs.
    """
    dim, value_dim = word(args, KEY_DIM), word(args, VALUE_DIM)
    width = padded(value_dim)
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
def finish_rows(
    function: int,
    num_tokens: int,
    first: int,
    width: int,
    terms: int,
    shares: int,
    rows: int,
    products: int,
) -> None:
    """Add earlier rows to rows and outs: those before these tokens at once, then one by one."""
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
def end_block(args: int, key_head: int, head: int, has_matrix: bool, factors: int) -> None:
    """``M = P M + sum of D(end, j) row_j k_jᵀ``. Shapes: factors [Dk][32]."""
    dim, width = word(args, KEY_DIM), padded(word(args, VALUE_DIM))
    matrix = word(args, MATRICES) + 4 * width * dim * head
    rows = word(args, ROWS) + 128 * width * head
    keys = word(args, KEYS) + 128 * dim * key_head
    left = v.load_floats(word(args, DECAYS) + 128 * head)
    for offset in range(0, 128 * dim, 128):
        v.store_floats(factors + offset, v.load_floats(keys + offset) * left)
    if has_matrix:
        _decay(matrix, dim * width, v.load_float(word(args, TOTALS) + 4 * head))
    else:
        clear(matrix, dim * width)
    products, stride = word(args, PRODUCTS), 4 * width
    add_products(products, dim, width, factors, 128, rows, stride, 32, matrix, stride)


@helper
def store_outs(args: int, head: int, token: int, num_tokens: int, outs: int) -> None:
    heads, dim = word(args, VALUE_HEADS), word(args, VALUE_DIM)
    width = padded(dim)
    for t in range(num_tokens):
        target = word(args, OUT) + 4 * dim * ((token + t) * heads + head)
        out = outs + 8 * width * t
        for lane in range(0, width, 32):
            if lane + 32 <= dim:
                v.store_floats(target + 4 * lane, v.load_floats(out + 4 * lane))
            else:
                v.store_partial(target + 4 * lane, v.load_floats(out + 4 * lane), dim - lane)


def described(
    layer: I64Array, inputs: DeltaInputs, out: F32Array, first_position: int, scratch_bytes: int
) -> list[int]:
    """The fields of a call. Shapes: layer [NUM_LAYER_WORDS], the words of a state; out [T, heads,
    V]."""
    rows = address(inputs.mixed), address(inputs.alpha), address(inputs.beta)
    vectors = address(inputs.a), address(inputs.dt_bias)
    call = [inputs.num_tokens, first_position, double_bits(inputs.eps), 0, scratch_bytes]
    products = products_function().address
    return [*layer.tolist()[FIRST_FIELD:], *rows, *vectors, address(out), *call, products]


def work_of(inputs: DeltaInputs) -> int:
    """A product takes a quarter of the time of a value of a row."""
    shape = inputs.shape
    values = inputs.num_tokens * shape.num_value_heads * shape.value_dim
    return values * shape.key_dim // 2


# -- the task -------------------------------------------------------------------------------------


def scratch_bytes(key_dim: int, value_dim: int) -> int:
    """Scratch bytes of one thread; see `_delta_task`."""
    width = -(-value_dim // 32) * 32
    pairs = 2 * DELTA_BLOCK
    return 4 * (pairs * (key_dim + 32) + pairs * (32 + 32 + width) + 32 * key_dim + 3 * 32)


def _delta_task(args: int, counter: int, worker_idx: int) -> None:
    """Take items until none is left: a key head with its value heads.

    Scratch: units [64][Dk], dots [64][32], terms [64][32], products [64][V padded], factors
    [Dk][32], decays and shares [32].
    """
    key_heads = word(args, KEY_HEADS)
    group = word(args, VALUE_HEADS) // key_heads
    dim, value_dim = word(args, KEY_DIM), word(args, VALUE_DIM)
    width = padded(value_dim)
    end = word(args, FIRST_POSITION) + word(args, NUM_TOKENS)
    units = word(args, SCRATCH) + worker_idx * word(args, SCRATCH_BYTES)
    dots = units + 4 * 64 * padded(dim)
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
            prepare_key_head(args, key_head, token, size, first, units, dots)
            for member in range(group):
                head = value_head(args, key_head, member)
                rows = word(args, ROWS) + 128 * width * head
                gates(args, head, token, size, decays, shares)
                decayed_terms(args, head, size, first, decays, dots, terms)
                if has_matrix:
                    matrix, stride = word(args, MATRICES) + 4 * width * dim * head, 4 * width
                    clear(products, 2 * size * width)
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
                begin_rows(args, head, token, size, has_matrix, decays, products, row)
                function = word(args, PRODUCTS)
                finish_rows(function, size, first, width, terms, shares, rows, products)
                store_outs(args, head, token, size, products + 4 * width)
                if first + size == 32:
                    end_block(args, key_head, head, has_matrix, factors)
            position += size


def delta_call(
    layer: I64Array,
    inputs: DeltaInputs,
    out: F32Array,
    *,
    first_position: int,
    num_threads: int,
) -> Call:
    """Shapes: as `described`'s."""
    one_scratch = scratch_bytes(inputs.shape.key_dim, inputs.shape.value_dim)
    return task_call(
        delta_task(),
        work_of(inputs),
        described(layer, inputs, out, first_position, one_scratch),
        per_token=(NUM_TOKENS,),
        per_position=((FIRST_POSITION, 1),),
        scratch=((SCRATCH, num_threads * one_scratch),),
    )


@cache
def delta_task() -> RowFunction:
    return compile_task(_delta_task)
