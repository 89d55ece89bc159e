"""The routed experts' FFN: gate and up, activation, down, in phases without Python between.

Phases: records of the hidden rows; gate, up and activation by runs of rows; records of the
activations; down by runs of rows over all experts. No two threads write the
same element, so nothing depends on who computes what.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dflash_protocol.ids import F32Array, F64Array, I32Array, I64Array
from dflash_runtime.compute.cpu import vector as v
from dflash_runtime.compute.cpu.arguments import get
from dflash_runtime.compute.cpu.compiling import (
    Kernel,
    RowFunction,
    compile_kernel,
    compile_row_function,
    helper,
)
from dflash_runtime.compute.cpu.matrix import NUM_FIELDS, ROW_BYTES
from dflash_runtime.compute.cpu.panels.kernels import RECORD_BYTES
from dflash_runtime.compute.cpu.panels.quantising import quantise, regroup
from dflash_runtime.compute.cpu.parallel import claim, run_on, run_region
from dflash_runtime.compute.cpu.products import (
    PANEL_ROWS,
    TOTALS_BYTES,
    VECTORS_AT_ONCE,
    group_size,
    multiply_panel,
)
from dflash_runtime.compute.cpu.untyped import types
from dflash_runtime.compute.cpu.vector.memory import emit_load, emit_store
from dflash_runtime.compute.cpu.vector.types import (
    DOUBLE,
    FLOAT,
    emit_splat,
    f32,
    i64,
    lanes_of,
    primitive,
    void,
)

# What a call is about: one int64 each.
(
    HIDDEN,  # [T, H] float32
    NUM_TOKENS,
    HIDDEN_SIZE,
    FFN_SIZE,
    NUM_GROUPS,
    EXPERT_IDS,  # [G] int32, local
    GROUP_STARTS,  # [G + 1] int32
    TOKEN_INDICES,  # [P] int32
    WEIGHTS,  # [P] float32
    OUT,  # [T, H] float64
    ADDRESSES,  # [E, 3] int64: matrices of gate, up, down
    LAYOUTS,  # [3, NUM_FIELDS] int64
    SCALES,  # [E, 3] float32
    BIASES,  # [E, 3] int64: addresses, or 0
    ACTIVATION,  # [3] float32: limit, alpha, offset of up
    TOKEN_RECORDS,  # [T] records of hidden, or 0
    PAIR_RECORDS,  # [P] the same by expert; unused if there is one token
    ACTIVATIONS,  # [P, F] float32
    ACTIVATION_RECORDS,  # [P] records of the activations, or 0
    SCRATCH,  # [threads, SCRATCH_BYTES]
    SCRATCH_BYTES,
    QUANTISE,  # address of the function
    NUM_ARGS,
) = range(23)

GATE, UP, DOWN = range(3)

GATE_UP_ROWS = 32
"""Rows of gate and of up that a thread takes at once."""
DOWN_ROWS = 32
"""Rows of down, of all experts, that a thread takes at once."""

FEW_TOKENS = 4
"""Tokens that the caller quantises alone: waking others would take longer."""

FEW_PAIRS = 8
"""Pairs whose activations the caller quantises alone: waking others would take longer."""


@helper
def _pair_range(args: int, group: int) -> tuple[int, int]:
    starts = get(args, GROUP_STARTS) + 4 * group
    return v.load_i32(starts), v.load_i32(starts + 4)


@helper
def _matrix(args: int, group: int, projection: int) -> tuple[int, int, int]:
    """Address of an expert's matrix, its layout, its row bytes."""
    expert = v.load_i32(get(args, EXPERT_IDS) + 4 * group)
    layout = get(args, LAYOUTS) + 8 * NUM_FIELDS * projection
    address = v.load_i64(get(args, ADDRESSES) + 8 * (3 * expert + projection))
    return address, layout, v.load_i64(layout + 8 * ROW_BYTES)


def _quantise_hidden(args: int, counter: int, worker_idx: int) -> None:
    """Items are tokens."""
    num_blocks = get(args, HIDDEN_SIZE) // 32
    token = claim(counter)
    while token < get(args, NUM_TOKENS):
        x = get(args, HIDDEN) + 4 * get(args, HIDDEN_SIZE) * token
        record = get(args, TOKEN_RECORDS) + RECORD_BYTES * num_blocks * token
        quantise(get(args, QUANTISE), x, num_blocks, record, 0, 1)
        token = claim(counter)


def _regroup_hidden(args: int, counter: int, worker_idx: int) -> None:
    """Items are groups of pairs: each gets its tokens' records, as sets have them (products)."""
    num_blocks, num_groups = get(args, HIDDEN_SIZE) // 32, get(args, NUM_GROUPS)
    token_bytes = RECORD_BYTES * num_blocks
    group = claim(counter)
    while group < num_groups:
        pair, end = _pair_range(args, group)
        while pair < end:
            size = group_size(0, end - pair)
            records = get(args, PAIR_RECORDS) + token_bytes * pair
            for slot in range(size):
                token = v.load_i32(get(args, TOKEN_INDICES) + 4 * (pair + slot))
                record = get(args, TOKEN_RECORDS) + token_bytes * token
                regroup(record, num_blocks, records, slot, size)
            pair += size
        group = claim(counter)


def _quantise_activations(args: int, counter: int, worker_idx: int) -> None:
    """Items are groups of pairs."""
    ffn_size, num_groups = get(args, FFN_SIZE), get(args, NUM_GROUPS)
    num_blocks = ffn_size // 32
    group = claim(counter)
    while group < num_groups:
        pair, end = _pair_range(args, group)
        while pair < end:
            size = group_size(0, end - pair)
            records = get(args, ACTIVATION_RECORDS) + RECORD_BYTES * num_blocks * pair
            for slot in range(size):
                x = get(args, ACTIVATIONS) + 4 * ffn_size * (pair + slot)
                quantise(get(args, QUANTISE), x, num_blocks, records, slot, size)
            pair += size
        group = claim(counter)


def _gate_up(args: int, counter: int, worker_idx: int) -> None:
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
        first_pair, end_pair = _pair_range(args, group)
        num_items = end_pair - first_pair
        # One token needs no copies of its records: every group has the same.
        records = get(args, TOKEN_RECORDS)
        if get(args, NUM_TOKENS) > 1:
            records = get(args, PAIR_RECORDS) + RECORD_BYTES * num_blocks * first_pair
        gate, gate_layout, gate_bytes = _matrix(args, group, GATE)
        up, up_layout, up_bytes = _matrix(args, group, UP)
        next_gate = gate
        if next_item < num_runs_total:
            next_gate, _, _ = _matrix(args, next_item // num_runs, GATE)
            next_gate += next_item % num_runs * GATE_UP_ROWS * gate_bytes
        end_row = min(first_row + GATE_UP_ROWS, ffn_size)
        for row in range(first_row, end_row, PANEL_ROWS):
            num_rows = min(PANEL_ROWS, ffn_size - row)
            after = row + PANEL_ROWS
            for first in range(0, num_items, VECTORS_AT_ONCE):
                end = min(first + VECTORS_AT_ONCE, num_items)
                multiply_panel(
                    gate_layout,
                    gate + row * gate_bytes,
                    num_rows,
                    get(args, HIDDEN),
                    4 * hidden_size,
                    get(args, TOKEN_INDICES) + 4 * first_pair,
                    records,
                    num_items,
                    first,
                    end,
                    up + row * up_bytes,
                    gates,
                    scratch,
                )
                multiply_panel(
                    up_layout,
                    up + row * up_bytes,
                    num_rows,
                    get(args, HIDDEN),
                    4 * hidden_size,
                    get(args, TOKEN_INDICES) + 4 * first_pair,
                    records,
                    num_items,
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
    """The expert's scale and bias, where it has them."""
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
    """See moe_spec.Activation; the result takes the place of the gates."""
    limit, alpha = v.splat(v.load_float(activation)), v.splat(v.load_float(activation + 4))
    up_offset, one = v.splat(v.load_float(activation + 8)), v.splat(v.as_float(1))
    for byte in range(0, 64 * num_items, 128):
        gate = v.minimum(v.load_floats(gates + byte), limit)
        up = v.maximum(v.zeros() - limit, v.minimum(v.load_floats(ups + byte), limit))
        swish = gate / (one + v.exp_lanes((v.zeros() - alpha) * gate))
        v.store_floats(gates + byte, swish * (up + up_offset))


@primitive(void, i64, i64, f32)
def _add_term(builder: Any, out: Any, totals: Any, weight: Any) -> None:
    """16 terms, rounded to float32 as a remote owner's would be, added in float64."""
    values = emit_load(builder, totals, lanes_of(FLOAT, 16))
    term = builder.fmul(values, emit_splat(builder, weight, 16))
    wide = builder.fpext(term, lanes_of(DOUBLE, 16))
    emit_store(builder, out, builder.fadd(emit_load(builder, out, wide.type), wide))


def _down(args: int, counter: int, worker_idx: int) -> None:
    """Items are runs of DOWN_ROWS rows, of all experts: each adds to columns of its own."""
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
            first_pair, end_pair = _pair_range(args, group)
            num_items = end_pair - first_pair
            down, layout, row_bytes = _matrix(args, group, DOWN)
            if group + 1 < num_groups:
                following, _, _ = _matrix(args, group + 1, DOWN)
                following += first_row * row_bytes
            else:
                following, _, _ = _matrix(args, 0, DOWN)
                following += min(next_item, num_runs - 1) * DOWN_ROWS * row_bytes
            x = get(args, ACTIVATIONS) + 4 * ffn_size * first_pair
            records = get(args, ACTIVATION_RECORDS) + RECORD_BYTES * num_blocks * first_pair
            for row in range(first_row, end_row, PANEL_ROWS):
                num_rows = min(PANEL_ROWS, hidden_size - row)
                after = row + PANEL_ROWS
                for first in range(0, num_items, VECTORS_AT_ONCE):
                    end = min(first + VECTORS_AT_ONCE, num_items)
                    multiply_panel(
                        layout,
                        down + row * row_bytes,
                        num_rows,
                        x,
                        4 * ffn_size,
                        0,
                        records,
                        num_items,
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
                        if num_rows == PANEL_ROWS:
                            _add_term(place, terms, weight)
                        else:
                            for r in range(num_rows):
                                term = v.widen(weight * v.load_float(terms + 4 * r))
                                v.store_double(place + 8 * r, v.load_double(place + 8 * r) + term)
        item = next_item


def _expert_ffn(
    hidden: F32Array,
    expert_ids: I32Array,
    group_starts: I32Array,
    token_indices: I32Array,
    weights: F32Array,
    out: F64Array,
    addresses: I64Array,
    layouts: I64Array,
    scales: F32Array,
    biases: I64Array,
    activation: F32Array,
    ffn_size: int,
    thread_bytes: int,
    args: int,
    token_records: int,
    pair_records: int,
    activations: int,
    activation_records: int,
    scratch: int,
    counter: int,
    pool: int,
    functions: I64Array,
) -> bool:
    """All phases. False: the batch names experts, tokens or pairs that do not exist.

    Addresses from `args` on; `scales` and `biases` may be empty, `token_records` and
    `activation_records` 0. Shapes: as the fields above; functions [6]: the phases' addresses and
    that of quantising.
    """
    num_groups, num_pairs = expert_ids.shape[0], token_indices.shape[0]
    # Cheap beside the products, and a bug elsewhere cannot make us read outside the mapping.
    if group_starts.shape[0] != num_groups + 1 or weights.shape[0] != num_pairs:
        return False
    if group_starts[0] != 0 or group_starts[num_groups] != num_pairs:
        return False
    for group in range(num_groups):
        if expert_ids[group] < 0 or expert_ids[group] >= addresses.shape[0]:
            return False
        if group_starts[group] > group_starts[group + 1]:
            return False
    for pair in range(num_pairs):
        if token_indices[pair] < 0 or token_indices[pair] >= hidden.shape[0]:
            return False
    v.store_i64(args + 8 * HIDDEN, v.address_of(hidden))
    v.store_i64(args + 8 * NUM_TOKENS, hidden.shape[0])
    v.store_i64(args + 8 * HIDDEN_SIZE, hidden.shape[1])
    v.store_i64(args + 8 * FFN_SIZE, ffn_size)
    v.store_i64(args + 8 * NUM_GROUPS, num_groups)
    v.store_i64(args + 8 * EXPERT_IDS, v.address_of(expert_ids))
    v.store_i64(args + 8 * GROUP_STARTS, v.address_of(group_starts))
    v.store_i64(args + 8 * TOKEN_INDICES, v.address_of(token_indices))
    v.store_i64(args + 8 * WEIGHTS, v.address_of(weights))
    v.store_i64(args + 8 * OUT, v.address_of(out))
    v.store_i64(args + 8 * ADDRESSES, v.address_of(addresses))
    v.store_i64(args + 8 * LAYOUTS, v.address_of(layouts))
    v.store_i64(args + 8 * SCALES, v.address_of(scales) if scales.size else 0)
    v.store_i64(args + 8 * BIASES, v.address_of(biases) if biases.size else 0)
    v.store_i64(args + 8 * ACTIVATION, v.address_of(activation))
    v.store_i64(args + 8 * TOKEN_RECORDS, token_records)
    v.store_i64(args + 8 * PAIR_RECORDS, pair_records)
    v.store_i64(args + 8 * ACTIVATIONS, activations)
    v.store_i64(args + 8 * ACTIVATION_RECORDS, activation_records)
    v.store_i64(args + 8 * SCRATCH, scratch)
    v.store_i64(args + 8 * SCRATCH_BYTES, thread_bytes)
    v.store_i64(args + 8 * QUANTISE, functions[5])
    if token_records:
        run_on(pool if hidden.shape[0] > FEW_TOKENS else 0, functions[0], args, counter)
        if hidden.shape[0] > 1:
            run_region(pool, functions[1], args, counter)
    run_region(pool, functions[2], args, counter)
    if activation_records:
        run_on(pool if num_pairs > FEW_PAIRS else 0, functions[3], args, counter)
    run_region(pool, functions[4], args, counter)
    return True


@cache
def expert_ffn_tasks() -> tuple[RowFunction, ...]:
    """The phases, to be passed to the kernel by address."""
    phases = (_quantise_hidden, _regroup_hidden, _gate_up, _quantise_activations, _down)
    return tuple(compile_row_function(phase, void, *[i64] * 3) for phase in phases)


@cache
def expert_ffn_kernel() -> Kernel:
    def given(element: Any, num_dimensions: int) -> Any:
        return types.Array(element, num_dimensions, "C", readonly=True)

    ids = given(types.int32, 1)
    return compile_kernel(
        _expert_ffn,
        given(v.f32, 2),
        ids,
        ids,
        ids,
        given(v.f32, 1),
        v.f64[:, ::1],
        given(v.i64, 2),
        given(v.i64, 2),
        given(v.f32, 2),
        given(v.i64, 2),
        given(v.f32, 1),
        *[v.i64] * 10,
        given(v.i64, 1),
    )
