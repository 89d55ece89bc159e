"""Phases of the expert FFN that multiply: gate and up with the activation, then down.

No two threads write the same element, so results do not depend on how work is shared.
"""

from __future__ import annotations

from typing import Any

from dflash_runtime.compute.cpu.compile.compiling import helper
from dflash_runtime.compute.cpu.kernels.experts_arguments import (
    ACTIVATION,
    ACTIVATION_Q8,
    ACTIVATIONS,
    BIASES,
    DOWN,
    EXPERT_IDS,
    FFN_SIZE,
    GATE,
    HIDDEN,
    HIDDEN_SIZE,
    NUM_GROUPS,
    NUM_TOKENS,
    OUT,
    PAIR_Q8,
    SCALES,
    SCRATCH,
    SCRATCH_BYTES,
    TOKEN_INDICES,
    TOKEN_Q8,
    UP,
    WEIGHTS,
    matrix_of,
    pair_range,
)
from dflash_runtime.compute.cpu.kernels.products import (
    REPACKED_ROWS,
    TOTALS_BYTES,
    VECTORS_AT_ONCE,
    multiply_rows,
)
from dflash_runtime.compute.cpu.kernels.words import get
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import (
    DOUBLE,
    FLOAT,
    emit_load,
    emit_splat,
    emit_store,
    f32,
    i64,
    lanes_of,
    primitive,
    void,
)
from dflash_runtime.compute.cpu.threads.parallel import claim
from dflash_runtime.compute.cpu.weights.repacked.kernels import Q8_BLOCK_BYTES

GATE_UP_ROWS = 32
"""Rows of gate, and of up, in one item."""
DOWN_ROWS = 32
"""Rows of down, of all experts, in one item."""


def gate_up(args: int, counter: int, worker_idx: int) -> None:
    """Items are runs of GATE_UP_ROWS rows of one expert."""
    hidden_size, ffn_size = get(args, HIDDEN_SIZE), get(args, FFN_SIZE)
    num_runs = (ffn_size + GATE_UP_ROWS - 1) // GATE_UP_ROWS
    num_runs_total = num_runs * get(args, NUM_GROUPS)
    gates = get(args, SCRATCH) + worker_idx * get(args, SCRATCH_BYTES)
    ups, scratch = gates + TOTALS_BYTES, gates + 2 * TOTALS_BYTES
    num_blocks = hidden_size // 32
    item = claim(counter)
    while item < num_runs_total:
        next_item = claim(counter)
        group, first_row = item // num_runs, item % num_runs * GATE_UP_ROWS
        first_pair, end_pair = pair_range(args, group)
        num_items = end_pair - first_pair
        # A single token's q8 blocks need no regrouping: all groups share them.
        q8_blocks = get(args, TOKEN_Q8)
        if get(args, NUM_TOKENS) > 1:
            q8_blocks = get(args, PAIR_Q8) + Q8_BLOCK_BYTES * num_blocks * first_pair
        gate, gate_layout, gate_bytes = matrix_of(args, group, GATE)
        up, up_layout, up_bytes = matrix_of(args, group, UP)
        next_gate = gate
        if next_item < num_runs_total:
            next_gate, _, _ = matrix_of(args, next_item // num_runs, GATE)
            next_gate += next_item % num_runs * GATE_UP_ROWS * gate_bytes
        indices = get(args, TOKEN_INDICES) + 4 * first_pair
        vectors = (get(args, HIDDEN), 4 * hidden_size, indices, q8_blocks, num_items)
        end_row = min(first_row + GATE_UP_ROWS, ffn_size)
        for row in range(first_row, end_row, REPACKED_ROWS):
            num_rows = min(REPACKED_ROWS, ffn_size - row)
            after = row + REPACKED_ROWS
            for first in range(0, num_items, VECTORS_AT_ONCE):
                end = min(first + VECTORS_AT_ONCE, num_items)
                multiply_rows(
                    gate_layout,
                    gate + row * gate_bytes,
                    num_rows,
                    vectors,
                    first,
                    end,
                    up + row * up_bytes,
                    gates,
                    scratch,
                )
                multiply_rows(
                    up_layout,
                    up + row * up_bytes,
                    num_rows,
                    vectors,
                    first,
                    end,
                    gate + after * gate_bytes if after < end_row else next_gate,
                    ups,
                    scratch,
                )
                _finish(args, group, GATE, row, num_rows, end - first, gates)
                _finish(args, group, UP, row, num_rows, end - first, ups)
                _activate(get(args, ACTIVATION), gates, ups, end - first)
                place = get(args, ACTIVATIONS) + 4 * (ffn_size * (first_pair + first) + row)
                for index in range(end - first):
                    v.copy_bytes(place + 4 * ffn_size * index, gates + 64 * index, 4 * num_rows)
        item = next_item


@helper
def _finish(
    args: int, group: int, projection: int, row: int, num_rows: int, num_items: int, totals: int
) -> None:
    """Apply the expert's scale and bias, if any."""
    expert = v.load_i32(get(args, EXPERT_IDS) + 4 * group)
    if get(args, SCALES):
        scale = v.splat(v.load_float(get(args, SCALES) + 4 * (3 * expert + projection)))
        for place in range(totals, totals + 64 * num_items, 128):
            v.store_floats(place, v.load_floats(place) * scale)
    biases = get(args, BIASES)
    bias = v.load_i64(biases + 8 * (3 * expert + projection)) if biases else 0
    if bias:
        for index in range(num_items):
            for r in range(num_rows):
                place = totals + 64 * index + 4 * r
                v.store_float(place, v.load_float(place) + v.load_float(bias + 4 * (row + r)))


@helper
def _activate(activation: int, gates: int, ups: int, num_items: int) -> None:
    """Apply the activation (see spec.Activation); the result replaces the gates."""
    limit, alpha = v.splat(v.load_float(activation)), v.splat(v.load_float(activation + 4))
    up_offset, one = v.splat(v.load_float(activation + 8)), v.splat(v.as_float(1))
    for byte in range(0, 64 * num_items, 128):
        gate = v.minimum(v.load_floats(gates + byte), limit)
        up = v.maximum(v.zeros() - limit, v.minimum(v.load_floats(ups + byte), limit))
        swish = gate / (one + v.exp_lanes((v.zeros() - alpha) * gate))
        v.store_floats(gates + byte, swish * (up + up_offset))


@primitive(void, i64, i64, f32)
def _add_term(builder: Any, out: Any, totals: Any, weight: Any) -> None:
    """Add 16 terms in float64, each rounded to float32 first, as a remote owner's would be."""
    values = emit_load(builder, totals, lanes_of(FLOAT, 16))
    term = builder.fmul(values, emit_splat(builder, weight, 16))
    wide = builder.fpext(term, lanes_of(DOUBLE, 16))
    emit_store(builder, out, builder.fadd(emit_load(builder, out, wide.type), wide))


def down_phase(args: int, counter: int, worker_idx: int) -> None:
    """Items are runs of DOWN_ROWS rows of all experts: each adds to its own columns."""
    hidden_size, ffn_size = get(args, HIDDEN_SIZE), get(args, FFN_SIZE)
    num_groups = get(args, NUM_GROUPS)
    num_runs = (hidden_size + DOWN_ROWS - 1) // DOWN_ROWS
    totals = get(args, SCRATCH) + worker_idx * get(args, SCRATCH_BYTES)
    scratch = totals + 2 * TOTALS_BYTES
    num_blocks = ffn_size // 32
    item = claim(counter)
    while item < num_runs:
        next_item = claim(counter)
        first_row = item * DOWN_ROWS
        end_row = min(first_row + DOWN_ROWS, hidden_size)
        for group in range(num_groups):
            first_pair, end_pair = pair_range(args, group)
            num_items = end_pair - first_pair
            down, layout, row_bytes = matrix_of(args, group, DOWN)
            if group + 1 < num_groups:
                following, _, _ = matrix_of(args, group + 1, DOWN)
                following += first_row * row_bytes
            else:
                following, _, _ = matrix_of(args, 0, DOWN)
                following += min(next_item, num_runs - 1) * DOWN_ROWS * row_bytes
            x = get(args, ACTIVATIONS) + 4 * ffn_size * first_pair
            q8_blocks = get(args, ACTIVATION_Q8) + Q8_BLOCK_BYTES * num_blocks * first_pair
            vectors = (x, 4 * ffn_size, 0, q8_blocks, num_items)
            for row in range(first_row, end_row, REPACKED_ROWS):
                num_rows = min(REPACKED_ROWS, hidden_size - row)
                after = row + REPACKED_ROWS
                for first in range(0, num_items, VECTORS_AT_ONCE):
                    end = min(first + VECTORS_AT_ONCE, num_items)
                    multiply_rows(
                        layout,
                        down + row * row_bytes,
                        num_rows,
                        vectors,
                        first,
                        end,
                        down + after * row_bytes if after < end_row else following,
                        totals,
                        scratch,
                    )
                    _finish(args, group, DOWN, row, num_rows, end - first, totals)
                    for index in range(first, end):
                        pair = first_pair + index
                        token = v.load_i32(get(args, TOKEN_INDICES) + 4 * pair)
                        weight = v.load_float(get(args, WEIGHTS) + 4 * pair)
                        place = get(args, OUT) + 8 * (hidden_size * token + row)
                        terms = totals + 64 * (index - first)
                        if num_rows == REPACKED_ROWS:
                            _add_term(place, terms, weight)
                        else:
                            for r in range(num_rows):
                                term = v.widen(weight * v.load_float(terms + 4 * r))
                                v.store_double(place + 8 * r, v.load_double(place + 8 * r) + term)
        item = next_item
