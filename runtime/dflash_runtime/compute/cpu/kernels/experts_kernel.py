"""The routed experts' FFN: gate and up, activation, down, in phases without Python in between.

Phases: quantise hidden rows to q8 blocks; regroup these by expert; gate, up and activation by
panels; quantise the activations, few within the phase before; down by panels over all experts. No
two threads write the same element, so results do not depend on how work is shared.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dflash_runtime.compute.cpu.compile.compiling import RowFunction, compile_task, helper
from dflash_runtime.compute.cpu.kernels.products import (
    REPACKED_ROWS,
    TOTALS_BYTES,
    VECTORS_AT_ONCE,
    group_size,
    multiply_rows,
    multiply_step_rows,
    panels_a_claim,
    prefetch_first,
    shares_of,
    take,
)
from dflash_runtime.compute.cpu.kernels.words import get
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.atomics import atomic_add
from dflash_runtime.compute.cpu.simd.exponentials import exp_lanes
from dflash_runtime.compute.cpu.simd.types import (
    DOUBLE,
    FLOAT,
    I64,
    emit_call,
    emit_load,
    emit_splat,
    emit_store,
    f32,
    i64,
    lanes_of,
    primitive,
    void,
)
from dflash_runtime.compute.cpu.threads.parallel import call_task, claim, run_on, run_region
from dflash_runtime.compute.cpu.weights.matrix import NUM_FIELDS
from dflash_runtime.compute.cpu.weights.repacked.kernels import Q8_BLOCK_BYTES
from dflash_runtime.compute.cpu.weights.repacked.quantising import quantise, regroup
from dflash_runtime.compute.cpu.weights.repacked.step_kernels import STEP_BLOCK_BYTES
from dflash_runtime.compute.cpu.weights.repacked.step_quantising import quantise_step
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
    ARENA,  # words of arena_tasks that say where experts come from, or 0: they are in memory
    ENTER_ARENA,  # the functions to call before experts are used, and after, if there is an arena
    LEAVE_ARENA,
    QUANTISE_STEP,  # the function, if decode steps are in step order (step_order), or 0
    QUANTISE,  # the function, and the phases
    QUANTISE_HIDDEN_TASK,
    REGROUP_TASK,
    GATE_UP_TASK,
    QUANTISE_ACTIVATIONS_TASK,
    DOWN_TASK,
    RUN,  # the function that runs the phases
    # A call and its scratch memory.
    HIDDEN,  # [T, H] float32
    NUM_TOKENS,
    HIDDEN_SIZE,
    IS_STEP,  # not 0: a decode step
    NUM_GROUPS,
    EXPERT_IDS,  # [G] int32, local
    GROUP_STARTS,  # [G + 1] int32
    TOKEN_INDICES,  # [P] int32
    WEIGHTS,  # [P] float32
    OUT,  # [T, H] float64
    TOKEN_Q8,  # [T] rows of hidden as q8 blocks, or as step blocks; 0: none are needed
    PAIR_Q8,  # [P] the same grouped by expert; unused for a single token, and in steps
    ACTIVATIONS,  # [P, F] float32
    ACTIVATION_Q8,  # [P] rows of activations as q8 or step blocks, or 0; then, if few, halves
    SCRATCH,  # [threads, SCRATCH_BYTES]
    COLUMNS_DONE,  # a function (these words, first, end) to call for columns of OUT once they are
    # complete, by the thread that has computed them; or 0
) = range(38)

NUM_ARGUMENTS = 38
NUM_LAYER_WORDS = HIDDEN
FEW_PAIRS = 64
"""Up to this many pairs' activations are quantised by the threads, three or more, that compute
them: block by block, which takes three times the instructions but no phase of its own."""

SCRATCH_PARTS = TOKEN_Q8, PAIR_Q8, ACTIVATIONS, ACTIVATION_Q8, SCRATCH

GATE, UP, DOWN = range(3)


@helper
def in_step_order(args: int) -> bool:
    """Whether this is a decode step, of a layer whose steps are in step order."""
    is_step: bool = get(args, IS_STEP) != 0 and get(args, QUANTISE_STEP) != 0
    return is_step


@helper
def pair_range(args: int, group: int) -> tuple[int, int]:
    starts = get(args, GROUP_STARTS) + 4 * group
    return v.load_i32(starts), v.load_i32(starts + 4)


_RUN_PANELS = 2  # neighbouring panels that a thread takes, or several times as many


@helper
def panel_of(args: int, group: int, projection: int, panel: int) -> tuple[int, int, int]:
    """Address of a panel's first row, layout and bytes per row of an expert's matrix."""
    expert = v.load_i32(get(args, EXPERT_IDS) + 4 * group)
    layout = get(args, LAYOUTS) + 8 * NUM_FIELDS * projection
    address = v.load_i64(get(args, ADDRESSES) + 8 * (3 * expert + projection))
    row_bytes = v.load_i64(layout + 8 * ROW_BYTES)
    return address + panel * REPACKED_ROWS * row_bytes, layout, row_bytes


@helper
def _shares(args: int, num_panels: int, panel_bytes: int) -> tuple[int, int, int, int]:
    """For `take`."""
    num_threads, num_tokens = get(args, NUM_THREADS), get(args, NUM_TOKENS)
    size = panels_a_claim(num_panels, _RUN_PANELS, panel_bytes, num_threads, num_tokens)
    return shares_of(num_panels, size, num_threads)  # type: ignore[no-any-return]


# -- phases that write q8 blocks ------------------------------------------------------------------


def quantise_hidden(args: int, counter: int, worker_idx: int) -> None:
    """Items are tokens."""
    num_blocks = get(args, HIDDEN_SIZE) // 32
    token = claim(counter)
    while token < get(args, NUM_TOKENS):
        x = get(args, HIDDEN) + 4 * get(args, HIDDEN_SIZE) * token
        if in_step_order(args):
            step_block = get(args, TOKEN_Q8) + STEP_BLOCK_BYTES * num_blocks * token
            quantise_step(get(args, QUANTISE_STEP), x, num_blocks, step_block)
        else:
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


@helper
def _quantise_blocks(args: int, group: int, first: int, num_blocks: int) -> None:
    """Quantise some blocks of all activations of a group, from block `first` on."""
    ffn_size = get(args, FFN_SIZE)
    pair, end = pair_range(args, group)
    while pair < end and in_step_order(args):
        block = ffn_size // 32 * pair + first
        out = get(args, ACTIVATION_Q8) + STEP_BLOCK_BYTES * block
        x = get(args, ACTIVATIONS) + 128 * block
        quantise_step(get(args, QUANTISE_STEP), x, num_blocks, out)
        pair += 1
    while pair < end:
        size = group_size(0, end - pair)
        q8_blocks = get(args, ACTIVATION_Q8) + Q8_BLOCK_BYTES * (
            ffn_size // 32 * pair + first * size
        )
        for slot in range(size):
            x = get(args, ACTIVATIONS) + 4 * (ffn_size * (pair + slot) + 32 * first)
            quantise(get(args, QUANTISE), x, num_blocks, q8_blocks, slot, size)
        pair += size


def quantise_activations(args: int, counter: int, worker_idx: int) -> None:
    """Items are groups of pairs."""
    group = claim(counter)
    while group < get(args, NUM_GROUPS):
        _quantise_blocks(args, group, 0, get(args, FFN_SIZE) // 32)
        group = claim(counter)


@helper
def _quantises_at_once(args: int) -> bool:
    """Whether `gate_up` quantises the activations."""
    num_pairs = v.load_i32(get(args, GROUP_STARTS) + 4 * get(args, NUM_GROUPS))
    is_few: bool = num_pairs <= FEW_PAIRS and get(args, NUM_THREADS) > 2
    return is_few and get(args, FFN_Q8_BYTES) != 0


@helper
def _halves(args: int, group: int, block: int) -> int:
    """Address of how many halves of a block have been computed, if two threads compute it."""
    num_pairs = v.load_i32(get(args, GROUP_STARTS) + 4 * get(args, NUM_GROUPS))
    halves = get(args, ACTIVATION_Q8) + get(args, FFN_Q8_BYTES) * num_pairs
    return halves + 8 * (get(args, FFN_SIZE) // 32 * group + block)  # type: ignore[no-any-return]


# -- phases that multiply -------------------------------------------------------------------------


def gate_up(args: int, counter: int, worker_idx: int) -> None:
    """Items are panels of gate and up of one expert. A q8 block is quantised by the thread that
    computes the second of its two panels."""
    hidden_size, ffn_size = get(args, HIDDEN_SIZE), get(args, FFN_SIZE)
    group_panels = (ffn_size + REPACKED_ROWS - 1) // REPACKED_ROWS
    num_panels = group_panels * get(args, NUM_GROUPS)
    gates = get(args, SCRATCH) + worker_idx * get(args, SCRATCH_BYTES)
    ups, scratch = gates + TOTALS_BYTES, gates + 2 * TOTALS_BYTES
    num_blocks = hidden_size // 32
    shares = _shares(args, num_panels, REPACKED_ROWS * get(get(args, LAYOUTS), ROW_BYTES))
    quantises, is_step = _quantises_at_once(args), in_step_order(args)
    before = -1
    panel, end = take(counter, shares)
    if panel < num_panels:
        gate, gate_layout, _ = panel_of(args, panel // group_panels, GATE, panel % group_panels)
        up, _, _ = panel_of(args, panel // group_panels, UP, panel % group_panels)
        prefetch_first(gate_layout, gate, up)
    while panel < num_panels:
        following = panel + 1
        if following == end:
            following, end = take(counter, shares)
        group, row = panel // group_panels, panel % group_panels * REPACKED_ROWS
        num_rows = min(REPACKED_ROWS, ffn_size - row)
        first_pair, end_pair = pair_range(args, group)
        num_items = end_pair - first_pair
        # A single token's q8 blocks need no regrouping: all groups share them.
        q8_blocks = get(args, TOKEN_Q8)
        if get(args, NUM_TOKENS) > 1 and not is_step:
            q8_blocks = get(args, PAIR_Q8) + Q8_BLOCK_BYTES * num_blocks * first_pair
        # Panels of gate and up alternate.
        gate, gate_layout, _ = panel_of(args, group, GATE, panel % group_panels)
        up, up_layout, _ = panel_of(args, group, UP, panel % group_panels)
        next_gate, next_up = gate, up
        if following < num_panels:
            next_group, next_panel = following // group_panels, following % group_panels
            next_gate, _, _ = panel_of(args, next_group, GATE, next_panel)
            next_up, _, _ = panel_of(args, next_group, UP, next_panel)
        indices = get(args, TOKEN_INDICES) + 4 * first_pair
        vectors = (get(args, HIDDEN), 4 * hidden_size, indices, q8_blocks, num_items)
        for first in range(0, num_items, VECTORS_AT_ONCE):
            last = min(first + VECTORS_AT_ONCE, num_items)
            part = first, last
            ahead = up, next_gate
            _multiply(args, gate_layout, (gate, num_rows), vectors, part, ahead, gates, scratch)
            ahead = next_gate, next_up
            _multiply(args, up_layout, (up, num_rows), vectors, part, ahead, ups, scratch)
            _finish(args, group, GATE, row, num_rows, last - first, gates)
            _finish(args, group, UP, row, num_rows, last - first, ups)
            _activate(get(args, ACTIVATION), gates, ups, last - first)
            place = get(args, ACTIVATIONS) + 4 * (ffn_size * (first_pair + first) + row)
            for index in range(last - first):
                v.copy_bytes(place + 4 * ffn_size * index, gates + 64 * index, 4 * num_rows)
        if quantises:
            block, is_second = row // 32, row % 32 != 0
            does_both = before == panel - 1 if is_second else following == panel + 1
            does_last = is_second
            if not does_both:
                does_last = atomic_add(_halves(args, group, block), 1) == 1
            if does_last:
                _quantise_blocks(args, group, block, 1)
        before, panel = panel, following


@helper
def _multiply(
    args: int,
    layout: int,
    panel: tuple[int, int],
    vectors: tuple[int, int, int, int, int],
    part: tuple[int, int],
    ahead: tuple[int, int],
    totals: int,
    scratch: int,
) -> None:
    """A panel's rows and number of rows times part of a set of vectors, from first to end: see
    products."""
    rows, num_rows = panel
    first, end = part
    if in_step_order(args):
        multiply_step_rows(layout, rows, num_rows, vectors, first, end, ahead, totals, scratch)
    else:
        multiply_rows(layout, rows, num_rows, vectors, first, end, ahead, totals, scratch)


@helper
def _finish(
    args: int, group: int, projection: int, row: int, num_rows: int, num_items: int, totals: int
) -> None:
    """Apply the expert's scale and bias, if any."""
    expert = v.load_i32(get(args, EXPERT_IDS) + 4 * group)
    scale = v.as_float(1)
    if get(args, SCALES):
        scale = v.load_float(get(args, SCALES) + 4 * (3 * expert + projection))
    biases = get(args, BIASES)
    bias = v.load_i64(biases + 8 * (3 * expert + projection)) if biases else 0
    if bias:
        for index in range(num_items):
            for r in range(num_rows):
                place = totals + 64 * index + 4 * r
                of_row = v.load_float(bias + 4 * (row + r))
                v.store_float(place, v.fma_scalar(v.load_float(place), scale, of_row))
    elif get(args, SCALES):
        for place in range(totals, totals + 64 * num_items, 128):
            v.store_floats(place, v.load_floats(place) * v.splat(scale))


@helper
def _activate(activation: int, gates: int, ups: int, num_items: int) -> None:
    """Apply the activation (see spec.Activation); the result replaces the gates."""
    limit, alpha = v.splat(v.load_float(activation)), v.splat(v.load_float(activation + 4))
    up_offset, one = v.splat(v.load_float(activation + 8)), v.splat(v.as_float(1))
    for byte in range(0, 64 * num_items, 128):
        gate = v.minimum(v.load_floats(gates + byte), limit)
        up = v.maximum(v.zeros() - limit, v.minimum(v.load_floats(ups + byte), limit))
        swish = gate * (one / (one + exp_lanes((v.zeros() - alpha) * gate)))
        v.store_floats(gates + byte, swish * (up + up_offset))


@primitive(void, i64, i64, f32)
def _add_term(builder: Any, out: Any, totals: Any, weight: Any) -> None:
    """Add 16 terms in float64, each rounded to float32 first, as a remote owner's would be."""
    values = emit_load(builder, totals, lanes_of(FLOAT, 16))
    term = builder.fmul(values, emit_splat(builder, weight, 16))
    wide = builder.fpext(term, lanes_of(DOUBLE, 16))
    emit_store(builder, out, builder.fadd(emit_load(builder, out, wide.type), wide))


@helper
def _down_ahead(args: int, group: int, item: int, next_item: int) -> int:
    """Address of the panels of down at `item` of a group, or behind the last group, of the next
    item's first ones. Where `next_item` is `item`, none is known, and the last group's are read."""
    num_groups = get(args, NUM_GROUPS)
    if group >= num_groups:
        group = min(group - num_groups, num_groups - 1) if next_item != item else num_groups - 1
        item = next_item
    address, _, _ = panel_of(args, group, DOWN, item)
    return address  # type: ignore[no-any-return]


def down_phase(args: int, counter: int, worker_idx: int) -> None:
    """Items are up to _RUN_PANELS panels of all experts: each adds to its own columns."""
    hidden_size, ffn_size = get(args, HIDDEN_SIZE), get(args, FFN_SIZE)
    num_groups = get(args, NUM_GROUPS)
    if num_groups == 0:
        return
    num_panels = (hidden_size + REPACKED_ROWS - 1) // REPACKED_ROWS
    totals = get(args, SCRATCH) + worker_idx * get(args, SCRATCH_BYTES)
    scratch = totals + 2 * TOTALS_BYTES
    num_blocks = ffn_size // 32
    layout = get(args, LAYOUTS) + 8 * NUM_FIELDS * DOWN
    panel_bytes = REPACKED_ROWS * get(layout, ROW_BYTES)
    shares = _shares(args, num_panels, panel_bytes)
    item, end = take(counter, shares)
    if item < num_panels:
        down = _down_ahead(args, 0, item, item)
        prefetch_first(layout, down, down + panel_bytes)
    while item < num_panels:
        end_item = min(item + _RUN_PANELS, end)
        next_item, next_end = end_item, end
        has_next = end_item < end
        for group in range(num_groups):
            # As late as its panels can be prefetched: what a thread has claimed it must compute.
            if not has_next and group + 2 >= num_groups:
                next_item, next_end = take(counter, shares)
                has_next = True
            known = next_item if next_item < num_panels else item
            following = _down_ahead(args, group + 1, item, known)
            after = _down_ahead(args, group + 2, item, known)
            if group + 1 < num_groups:
                num_following = end_item - item
            else:
                num_following = min(next_item + _RUN_PANELS, next_end) - next_item
            if num_following > 1:
                after = following + panel_bytes
            first_pair, end_pair = pair_range(args, group)
            num_items = end_pair - first_pair
            x = get(args, ACTIVATIONS) + 4 * ffn_size * first_pair
            block_bytes = STEP_BLOCK_BYTES if in_step_order(args) else Q8_BLOCK_BYTES
            q8_blocks = get(args, ACTIVATION_Q8) + block_bytes * num_blocks * first_pair
            vectors = (x, 4 * ffn_size, 0, q8_blocks, num_items)
            down = _down_ahead(args, group, item, item)
            for panel in range(item, end_item):
                row = panel * REPACKED_ROWS
                num_rows = min(REPACKED_ROWS, hidden_size - row)
                ahead = (following, after)
                if panel + 1 < end_item:
                    ahead = (down + panel_bytes, following)
                for first in range(0, num_items, VECTORS_AT_ONCE):
                    last = min(first + VECTORS_AT_ONCE, num_items)
                    rows, part = (down, num_rows), (first, last)
                    _multiply(args, layout, rows, vectors, part, ahead, totals, scratch)
                    _finish(args, group, DOWN, row, num_rows, last - first, totals)
                    for index in range(first, last):
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
                down += panel_bytes
        if get(args, COLUMNS_DONE) != 0:
            end_column = min(end_item * REPACKED_ROWS, hidden_size)
            call_task(get(args, COLUMNS_DONE), args, item * REPACKED_ROWS, end_column)
        item, end = next_item, next_end


# -- the kernel -----------------------------------------------------------------------------------

FEW_TOKENS, VERY_FEW_PAIRS = 4, 8
"""The caller quantises up to this many tokens or pairs alone: waking workers would take longer."""


@helper
def _is_sound(args: int) -> bool:
    """Whether expert ids, groups and tokens lie within the layer's experts and the rows."""
    num_groups, num_pairs = get(args, NUM_GROUPS), 0
    for group in range(num_groups):
        expert = v.load_i32(get(args, EXPERT_IDS) + 4 * group)
        start, end = pair_range(args, group)
        if expert < 0 or expert >= get(args, NUM_EXPERTS) or start != num_pairs or end <= start:
            return False
        num_pairs = end
    for pair in range(num_pairs):
        token = v.load_i32(get(args, TOKEN_INDICES) + 4 * pair)
        if token < 0 or token >= get(args, NUM_TOKENS):
            return False
    return v.load_i32(get(args, GROUP_STARTS)) == 0  # type: ignore[no-any-return]


def _run_experts(args: int, counter: int, pool: int) -> int:
    # Cheap next to the products, and no bug of a caller makes a kernel read outside the mapping.
    if not _is_sound(args):
        return 0
    if get(args, ARENA) != 0:
        call_task(get(args, ENTER_ARENA), args, counter, pool)
    num_tokens = get(args, NUM_TOKENS)
    if get(args, HIDDEN_Q8_BYTES) != 0:
        few = num_tokens <= FEW_TOKENS
        run_on(0 if few else pool, get(args, QUANTISE_HIDDEN_TASK), args, counter)
        if num_tokens > 1 and not in_step_order(args):
            run_region(pool, get(args, REGROUP_TASK), args, counter)
    if _quantises_at_once(args):
        for place in range(_halves(args, 0, 0), _halves(args, get(args, NUM_GROUPS), 0), 8):
            v.store_i64(place, 0)
    run_region(pool, get(args, GATE_UP_TASK), args, counter)
    if get(args, FFN_Q8_BYTES) != 0 and not _quantises_at_once(args):
        few = v.load_i32(get(args, GROUP_STARTS) + 4 * get(args, NUM_GROUPS)) <= VERY_FEW_PAIRS
        run_on(0 if few else pool, get(args, QUANTISE_ACTIVATIONS_TASK), args, counter)
    run_region(pool, get(args, DOWN_TASK), args, counter)
    if get(args, ARENA) != 0:
        call_task(get(args, LEAVE_ARENA), args, counter, pool)
    return 1


@primitive(i64, i64, i64, i64, i64)
def _call_run(builder: Any, function: Any, *numbers: Any) -> Any:
    return emit_call(builder, I64, function, list(numbers))


@helper
def run_experts(args: int, counter: int, pool: int) -> int:
    """Run all phases for the words at `args`, adding to OUT; 1, or 0 if the batch has expert ids,
    tokens or pairs out of range. The arrays are as long as NUM_GROUPS and the last of GROUP_STARTS
    say.

    `counter`: address of a word to count in, best on a cache line of its own; `pool`: of a pool of
    threads (threads/parallel).
    """
    return _call_run(get(args, RUN), args, counter, pool)  # type: ignore[no-any-return]


def _run_batch(args: int, counter: int, pool: int) -> None:
    """`run_experts`, whose result replaces NUM_GROUPS."""
    v.store_i64(args + 8 * NUM_GROUPS, run_experts(args, counter, pool))


@cache
def expert_functions() -> tuple[RowFunction, ...]:
    """The phases and what runs them, in the order of their words, which hold their addresses."""
    phases = (quantise_hidden, regroup_hidden, gate_up, quantise_activations, down_phase)
    tasks = (compile_task(phase) for phase in phases)
    return *tasks, RowFunction(_run_experts, i64, i64, i64, result=i64)


@cache
def run_batch() -> RowFunction:
    """The function of a call for one batch."""
    return compile_task(_run_batch)
