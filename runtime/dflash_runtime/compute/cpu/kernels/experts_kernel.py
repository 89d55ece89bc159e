"""The routed experts' FFN: gate and up, activation, down, in phases without Python in between.

Phases: quantise hidden rows to q8 blocks; regroup these by expert; gate, up and activation by runs
of rows; quantise the activations; down by runs of rows over all experts. No two threads write the
same element, so results do not depend on how work is shared.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dflash_protocol.ids import F32Array, F64Array, I32Array, I64Array
from dflash_runtime.compute.cpu.compile.compiling import (
    Kernel,
    RowFunction,
    compile_kernel,
    compile_task,
    helper,
    read_only,
)
from dflash_runtime.compute.cpu.kernels.products import (
    REPACKED_ROWS,
    TOTALS_BYTES,
    VECTORS_AT_ONCE,
    group_size,
    multiply_rows,
    panels_ahead,
    prefetch_first,
    runs_a_claim,
)
from dflash_runtime.compute.cpu.kernels.words import get
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.exponentials import exp_lanes
from dflash_runtime.compute.cpu.simd.types import (
    DOUBLE,
    FLOAT,
    emit_load,
    emit_splat,
    emit_store,
    f32,
    f64,
    i64,
    lanes_of,
    primitive,
    void,
)
from dflash_runtime.compute.cpu.simd.untyped import types
from dflash_runtime.compute.cpu.threads.parallel import claim, run_on, run_region
from dflash_runtime.compute.cpu.weights.matrix import NUM_FIELDS
from dflash_runtime.compute.cpu.weights.repacked.kernels import Q8_BLOCK_BYTES
from dflash_runtime.compute.cpu.weights.repacked.quantising import quantise, regroup
from dflash_runtime.compute.cpu.weights.rows import ROW_BYTES

# -- arguments of the phases ----------------------------------------------------------------------

# Addresses, except where the unit or the comment says otherwise.
(
    # A layer's experts.
    NUM_EXPERTS,
    FFN_SIZE,
    ADDRESSES,  # [E, 3] int64: matrices of gate, up, down
    LAYOUTS,  # [3, NUM_FIELDS] int64
    SCALES,  # [E, 3] float32, or 0
    BIASES,  # [E, 3] int64: addresses, or 0; or 0 for all
    ACTIVATION,  # [3] float32: limit, alpha, offset of up
    HIDDEN_Q8_BYTES,  # of a row of hidden as q8 blocks, or 0 if none are needed
    FFN_Q8_BYTES,  # of a row of activations as q8 blocks, or 0 if none are needed
    SCRATCH_BYTES,  # of one thread
    NUM_THREADS,
    QUANTISE,  # the function, and the phases
    QUANTISE_HIDDEN_TASK,
    REGROUP_TASK,
    GATE_UP_TASK,
    QUANTISE_ACTIVATIONS_TASK,
    DOWN_TASK,
    # A call and its scratch memory.
    HIDDEN,  # [T, H] float32
    NUM_TOKENS,
    HIDDEN_SIZE,
    NUM_GROUPS,
    EXPERT_IDS,  # [G] int32, local
    GROUP_STARTS,  # [G + 1] int32
    TOKEN_INDICES,  # [P] int32
    WEIGHTS,  # [P] float32
    OUT,  # [T, H] float64
    TOKEN_Q8,  # [T] rows of hidden as q8 blocks, or 0
    PAIR_Q8,  # [P] the same grouped by expert; unused for a single token
    ACTIVATIONS,  # [P, F] float32
    ACTIVATION_Q8,  # [P] rows of activations as q8 blocks, or 0
    SCRATCH,  # [threads, SCRATCH_BYTES]
) = range(31)

NUM_ARGUMENTS = 31
NUM_LAYER_WORDS = HIDDEN
SCRATCH_PARTS = TOKEN_Q8, PAIR_Q8, ACTIVATIONS, ACTIVATION_Q8, SCRATCH

GATE, UP, DOWN = range(3)


@helper
def pair_range(args: int, group: int) -> tuple[int, int]:
    starts = get(args, GROUP_STARTS) + 4 * group
    return v.load_i32(starts), v.load_i32(starts + 4)


RUN_ROWS = 32
"""Rows of an expert's gate and up in one item, or of all experts' down."""


@helper
def run_of(args: int, group: int, projection: int, run: int) -> tuple[int, int, int]:
    """Address of a run's first row, layout and bytes per row of an expert's matrix."""
    expert = v.load_i32(get(args, EXPERT_IDS) + 4 * group)
    layout = get(args, LAYOUTS) + 8 * NUM_FIELDS * projection
    address = v.load_i64(get(args, ADDRESSES) + 8 * (3 * expert + projection))
    row_bytes = v.load_i64(layout + 8 * ROW_BYTES)
    return address + run * RUN_ROWS * row_bytes, layout, row_bytes


# -- phases that write q8 blocks ------------------------------------------------------------------


def quantise_hidden(args: int, counter: int, worker_idx: int) -> None:
    """Items are tokens."""
    num_blocks = get(args, HIDDEN_SIZE) // 32
    token = claim(counter)
    while token < get(args, NUM_TOKENS):
        x = get(args, HIDDEN) + 4 * get(args, HIDDEN_SIZE) * token
        q8_block = get(args, TOKEN_Q8) + Q8_BLOCK_BYTES * num_blocks * token
        quantise(get(args, QUANTISE), x, num_blocks, q8_block, 0, 1)
        token = claim(counter)


def regroup_hidden(args: int, counter: int, worker_idx: int) -> None:
    """Items are groups of pairs: each copies its tokens' q8 blocks, interleaved as products reads
    them."""
    num_blocks, num_groups = get(args, HIDDEN_SIZE) // 32, get(args, NUM_GROUPS)
    token_bytes = Q8_BLOCK_BYTES * num_blocks
    group = claim(counter)
    while group < num_groups:
        pair, end = pair_range(args, group)
        while pair < end:
            size = group_size(0, end - pair)
            q8_blocks = get(args, PAIR_Q8) + token_bytes * pair
            for slot in range(size):
                token = v.load_i32(get(args, TOKEN_INDICES) + 4 * (pair + slot))
                q8_block = get(args, TOKEN_Q8) + token_bytes * token
                regroup(q8_block, num_blocks, q8_blocks, slot, size)
            pair += size
        group = claim(counter)


def quantise_activations(args: int, counter: int, worker_idx: int) -> None:
    """Items are groups of pairs."""
    ffn_size, num_groups = get(args, FFN_SIZE), get(args, NUM_GROUPS)
    num_blocks = ffn_size // 32
    group = claim(counter)
    while group < num_groups:
        pair, end = pair_range(args, group)
        while pair < end:
            size = group_size(0, end - pair)
            q8_blocks = get(args, ACTIVATION_Q8) + Q8_BLOCK_BYTES * num_blocks * pair
            for slot in range(size):
                x = get(args, ACTIVATIONS) + 4 * ffn_size * (pair + slot)
                quantise(get(args, QUANTISE), x, num_blocks, q8_blocks, slot, size)
            pair += size
        group = claim(counter)


# -- phases that multiply -------------------------------------------------------------------------


def gate_up(args: int, counter: int, worker_idx: int) -> None:
    """Items are runs of RUN_ROWS rows of one expert."""
    hidden_size, ffn_size = get(args, HIDDEN_SIZE), get(args, FFN_SIZE)
    num_runs = (ffn_size + RUN_ROWS - 1) // RUN_ROWS
    num_runs_total = num_runs * get(args, NUM_GROUPS)
    gates = get(args, SCRATCH) + worker_idx * get(args, SCRATCH_BYTES)
    ups, scratch = gates + TOTALS_BYTES, gates + 2 * TOTALS_BYTES
    num_blocks = hidden_size // 32
    run_bytes = RUN_ROWS * get(get(args, LAYOUTS), ROW_BYTES)
    size = runs_a_claim(num_runs_total, run_bytes, get(args, NUM_THREADS), get(args, NUM_TOKENS))
    item = size * claim(counter)
    claimed_end = item + size
    if item < num_runs_total:
        gate, gate_layout, _ = run_of(args, item // num_runs, GATE, item % num_runs)
        up, _, _ = run_of(args, item // num_runs, UP, item % num_runs)
        prefetch_first(gate_layout, gate, up)
    while item < num_runs_total:
        next_item = item + 1
        if next_item == claimed_end:
            next_item = size * claim(counter)
            claimed_end = next_item + size
        group, first_row = item // num_runs, item % num_runs * RUN_ROWS
        first_pair, end_pair = pair_range(args, group)
        num_items = end_pair - first_pair
        # A single token's q8 blocks need no regrouping: all groups share them.
        q8_blocks = get(args, TOKEN_Q8)
        if get(args, NUM_TOKENS) > 1:
            q8_blocks = get(args, PAIR_Q8) + Q8_BLOCK_BYTES * num_blocks * first_pair
        gate, gate_layout, gate_bytes = run_of(args, group, GATE, item % num_runs)
        up, up_layout, up_bytes = run_of(args, group, UP, item % num_runs)
        next_gate, next_up = gate, up
        if next_item < num_runs_total:
            next_group, next_run = next_item // num_runs, next_item % num_runs
            next_gate, _, _ = run_of(args, next_group, GATE, next_run)
            next_up, _, _ = run_of(args, next_group, UP, next_run)
        indices = get(args, TOKEN_INDICES) + 4 * first_pair
        vectors = (get(args, HIDDEN), 4 * hidden_size, indices, q8_blocks, num_items)
        end_row = min(first_row + RUN_ROWS, ffn_size)
        for row in range(first_row, end_row, REPACKED_ROWS):
            num_rows = min(REPACKED_ROWS, ffn_size - row)
            # Panels of gate and up alternate.
            gate_here = gate + (row - first_row) * gate_bytes
            up_here = up + (row - first_row) * up_bytes
            after_gate, after_up = next_gate, next_up
            if row + REPACKED_ROWS < end_row:
                after_gate = gate_here + REPACKED_ROWS * gate_bytes
                after_up = up_here + REPACKED_ROWS * up_bytes
            for first in range(0, num_items, VECTORS_AT_ONCE):
                end = min(first + VECTORS_AT_ONCE, num_items)
                multiply_rows(
                    gate_layout,
                    gate_here,
                    num_rows,
                    vectors,
                    first,
                    end,
                    (up_here, after_gate),
                    gates,
                    scratch,
                )
                multiply_rows(
                    up_layout,
                    up_here,
                    num_rows,
                    vectors,
                    first,
                    end,
                    (after_gate, after_up),
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
        swish = gate / (one + exp_lanes((v.zeros() - alpha) * gate))
        v.store_floats(gates + byte, swish * (up + up_offset))


@primitive(void, i64, i64, f32)
def _add_term(builder: Any, out: Any, totals: Any, weight: Any) -> None:
    """Add 16 terms in float64, each rounded to float32 first, as a remote owner's would be."""
    values = emit_load(builder, totals, lanes_of(FLOAT, 16))
    term = builder.fmul(values, emit_splat(builder, weight, 16))
    wide = builder.fpext(term, lanes_of(DOUBLE, 16))
    emit_store(builder, out, builder.fadd(emit_load(builder, out, wide.type), wide))


def down_phase(args: int, counter: int, worker_idx: int) -> None:
    """Items are runs of RUN_ROWS rows of all experts: each adds to its own columns."""
    hidden_size, ffn_size = get(args, HIDDEN_SIZE), get(args, FFN_SIZE)
    num_groups = get(args, NUM_GROUPS)
    num_runs = (hidden_size + RUN_ROWS - 1) // RUN_ROWS
    totals = get(args, SCRATCH) + worker_idx * get(args, SCRATCH_BYTES)
    scratch = totals + 2 * TOTALS_BYTES
    num_blocks = ffn_size // 32
    down_layout = get(args, LAYOUTS) + 8 * NUM_FIELDS * DOWN
    run_bytes = RUN_ROWS * v.load_i64(down_layout + 8 * ROW_BYTES)
    size = runs_a_claim(num_runs, run_bytes, get(args, NUM_THREADS), get(args, NUM_TOKENS))
    item = size * claim(counter)
    claimed_end = item + size
    if item < num_runs and num_groups > 0:
        down, layout, row_bytes = run_of(args, 0, DOWN, item)
        prefetch_first(layout, down, down + REPACKED_ROWS * row_bytes)
    while item < num_runs:
        next_item = item + 1
        if next_item == claimed_end:
            next_item = size * claim(counter)
            claimed_end = next_item + size
        first_row = item * RUN_ROWS
        end_row = min(first_row + RUN_ROWS, hidden_size)
        for group in range(num_groups):
            first_pair, end_pair = pair_range(args, group)
            num_items = end_pair - first_pair
            down, layout, row_bytes = run_of(args, group, DOWN, item)
            following = down
            if group + 1 < num_groups:
                following, _, _ = run_of(args, group + 1, DOWN, item)
            elif next_item < num_runs:
                following, _, _ = run_of(args, 0, DOWN, next_item)
            x = get(args, ACTIVATIONS) + 4 * ffn_size * first_pair
            q8_blocks = get(args, ACTIVATION_Q8) + Q8_BLOCK_BYTES * num_blocks * first_pair
            vectors = (x, 4 * ffn_size, 0, q8_blocks, num_items)
            for row in range(first_row, end_row, REPACKED_ROWS):
                num_rows = min(REPACKED_ROWS, hidden_size - row)
                in_run = row - first_row
                ahead = panels_ahead(
                    down, row_bytes, in_run, end_row - first_row, following, row_bytes
                )
                for first in range(0, num_items, VECTORS_AT_ONCE):
                    end = min(first + VECTORS_AT_ONCE, num_items)
                    multiply_rows(
                        layout,
                        down + in_run * row_bytes,
                        num_rows,
                        vectors,
                        first,
                        end,
                        ahead,
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


# -- the kernel -----------------------------------------------------------------------------------

FEW_TOKENS = 4
"""The caller quantises up to this many tokens alone: waking workers would take longer."""

FEW_PAIRS = 8
"""The caller quantises up to this many pairs' activations alone: waking workers would take
longer."""


@helper
def _is_sound(args: int) -> bool:
    """Whether expert ids, groups and tokens lie within the layer's experts and the rows."""
    num_groups, num_pairs = get(args, NUM_GROUPS), 0
    for group in range(num_groups):
        expert = v.load_i32(get(args, EXPERT_IDS) + 4 * group)
        start, end = pair_range(args, group)
        if expert < 0 or expert >= get(args, NUM_EXPERTS) or start != num_pairs or end < start:
            return False
        num_pairs = end
    for pair in range(num_pairs):
        token = v.load_i32(get(args, TOKEN_INDICES) + 4 * pair)
        if token < 0 or token >= get(args, NUM_TOKENS):
            return False
    return v.load_i32(get(args, GROUP_STARTS)) == 0  # type: ignore[no-any-return]


@helper
def run_experts(args: int, counter: int, pool: int) -> int:
    """Run all phases for the words at `args`, adding to OUT; 1, or 0 if the batch has expert ids,
    tokens or pairs out of range. For compiled callers, which write the words themselves and whose
    arrays are as long as NUM_GROUPS and the last of GROUP_STARTS say.

    `counter`: address of a word to count in, best on a cache line of its own; `pool`: of a pool of
    threads (threads/parallel).
    """
    # Cheap next to the products, and no bug of a caller makes a kernel read outside the mapping.
    if not _is_sound(args):
        return 0
    num_tokens = get(args, NUM_TOKENS)
    num_pairs = v.load_i32(get(args, GROUP_STARTS) + 4 * get(args, NUM_GROUPS))
    if get(args, HIDDEN_Q8_BYTES) != 0:
        few = num_tokens <= FEW_TOKENS
        run_on(0 if few else pool, get(args, QUANTISE_HIDDEN_TASK), args, counter)
        if num_tokens > 1:
            run_region(pool, get(args, REGROUP_TASK), args, counter)
    run_region(pool, get(args, GATE_UP_TASK), args, counter)
    if get(args, FFN_Q8_BYTES) != 0:
        few = num_pairs <= FEW_PAIRS
        run_on(0 if few else pool, get(args, QUANTISE_ACTIVATIONS_TASK), args, counter)
    run_region(pool, get(args, DOWN_TASK), args, counter)
    return 1


def _expert_ffn(
    hidden: F32Array,
    expert_ids: I32Array,
    group_starts: I32Array,
    token_indices: I32Array,
    weights: F32Array,
    out: F64Array,
    layer: I64Array,
    memory: tuple[int, ...],
    pool: int,
) -> bool:
    """Run all phases. False: the batch has expert ids, tokens or pairs out of range.

    Shapes: as the words above; layer [NUM_LAYER_WORDS]. Memory: NUM_ARGUMENTS words,
    TOKEN_Q8, PAIR_Q8, ACTIVATIONS, ACTIVATION_Q8, SCRATCH and the counter.
    """
    num_groups = expert_ids.shape[0]
    if group_starts.shape[0] != num_groups + 1 or weights.shape[0] != token_indices.shape[0]:
        return False
    if group_starts[num_groups] != token_indices.shape[0]:
        return False
    args, token_q8, pair_q8, activations, activation_q8, scratch, counter = memory
    v.copy_bytes(args, v.address_of(layer), 8 * NUM_LAYER_WORDS)
    v.store_i64(args + 8 * HIDDEN, v.address_of(hidden))
    v.store_i64(args + 8 * NUM_TOKENS, hidden.shape[0])
    v.store_i64(args + 8 * HIDDEN_SIZE, hidden.shape[1])
    v.store_i64(args + 8 * NUM_GROUPS, num_groups)
    v.store_i64(args + 8 * EXPERT_IDS, v.address_of(expert_ids))
    v.store_i64(args + 8 * GROUP_STARTS, v.address_of(group_starts))
    v.store_i64(args + 8 * TOKEN_INDICES, v.address_of(token_indices))
    v.store_i64(args + 8 * WEIGHTS, v.address_of(weights))
    v.store_i64(args + 8 * OUT, v.address_of(out))
    v.store_i64(args + 8 * TOKEN_Q8, token_q8 if layer[HIDDEN_Q8_BYTES] else 0)
    v.store_i64(args + 8 * PAIR_Q8, pair_q8)
    v.store_i64(args + 8 * ACTIVATIONS, activations)
    v.store_i64(args + 8 * ACTIVATION_Q8, activation_q8 if layer[FFN_Q8_BYTES] else 0)
    v.store_i64(args + 8 * SCRATCH, scratch)
    return run_experts(args, counter, pool) != 0  # type: ignore[no-any-return]


@cache
def expert_ffn_tasks() -> tuple[RowFunction, ...]:
    """The phases, in the order of their words, which hold their addresses."""
    phases = (quantise_hidden, regroup_hidden, gate_up, quantise_activations, down_phase)
    return tuple(compile_task(phase) for phase in phases)


@cache
def expert_ffn_kernel() -> Kernel:
    ids, memory = read_only(types.int32, 1), types.UniTuple(i64, 7)
    hidden, weights, out = read_only(f32, 2), read_only(f32, 1), f64[:, ::1]
    arrays = [hidden, ids, ids, ids, weights, out, read_only(i64, 1)]
    return compile_kernel(_expert_ffn, *arrays, memory, i64)
