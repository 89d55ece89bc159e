"""Dense products, a set of vectors times one or several matrices; and embedding lookup."""

from __future__ import annotations

from functools import cache

from dflash_runtime.compute.cpu.compile.compiling import RowFunction, compile_task, helper
from dflash_runtime.compute.cpu.kernels.products import (
    REPACKED_ROWS,
    TOTALS_BYTES,
    VECTORS_AT_ONCE,
    group_size,
    largest_group,
    multiply_rows,
    panels_a_claim,
    panels_ahead,
    prefetch_first,
    shares_of,
    take,
)
from dflash_runtime.compute.cpu.kernels.words import FIRST_FIELD, get
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.threads.parallel import claim, run_on
from dflash_runtime.compute.cpu.weights.repacked.kernels import Q8_BLOCK_BYTES
from dflash_runtime.compute.cpu.weights.repacked.quantising import quantise
from dflash_runtime.compute.cpu.weights.rows import ROW_BYTES

# Arguments of the tasks, one int64 each: addresses, except where the unit says otherwise.
(
    # A plan: what calls with the same matrices have in common.
    NUM_PANELS,  # of all matrices
    RUN_PANELS,  # neighbouring panels that a thread takes, or several times as many
    CLAIMS_AHEAD,  # whether threads claim an item while they compute another
    NUM_THREADS,
    SCRATCH_BYTES,  # of one thread
    Q8_BYTES,  # of a row of x as q8 blocks, or 0 if none are needed
    QUANTISE,  # the function, and the phases
    QUANTISE_TASK,
    MULTIPLY_TASK,
    # A call and its scratch memory.
    X,  # [T, columns] float32
    OUT,  # [OUT_ROOM, rows] float32 for each matrix, one after another
    ADDEND,  # added to OUT, same layout; or 0
    NUM_TOKENS,
    OUT_ROOM,  # tokens that OUT and ADDEND have room for
    COLUMNS,
    Q8_BLOCKS,  # [T] rows of x as q8 blocks
    MATRICES,  # [M, NUM_MATRIX_FIELDS]
    SCRATCH,  # [threads, SCRATCH_BYTES]
) = range(18)

# Fields of one matrix.
(
    LAYOUT,
    WEIGHTS,
    ROWS,
    ROWS_BEFORE,  # of the matrices before it
    PANELS_BEFORE,
    END_PANEL,
    NUM_MATRIX_FIELDS,
) = range(7)

_MOST_RUN_PANELS = 2
_WIDE_PANEL_BYTES = 1 << 16


def items_of(num_panels: int, row_bytes: int, num_threads: int) -> tuple[int, bool]:
    """Panels in a run, and whether threads claim the next one early, so that it can be prefetched.

    Matrices of few but wide rows, as a router's in float32, make so few items that threads would
    get none, or wait for one that holds two: their items are smaller, and not claimed early. Their
    rows are long enough to be read well without.
    """
    is_wide = REPACKED_ROWS * row_bytes >= _WIDE_PANEL_BYTES
    if not is_wide or num_panels >= 2 * _MOST_RUN_PANELS * num_threads:
        return _MOST_RUN_PANELS, True
    return 1, num_panels >= 2 * num_threads


FEW_TOKENS = 4
"""The caller quantises up to this many tokens alone: waking workers would take longer."""


def _quantise_x(args: int, counter: int, worker_idx: int) -> None:
    """Items are groups of tokens of the largest size; the last may be several smaller groups."""
    num_tokens, columns = get(args, NUM_TOKENS), get(args, COLUMNS)
    num_blocks = columns // 32
    first = largest_group() * claim(counter)
    while first < num_tokens:
        token = first
        while token < min(first + largest_group(), num_tokens):
            size = group_size(token, num_tokens)
            q8_blocks = get(args, Q8_BLOCKS) + Q8_BLOCK_BYTES * num_blocks * token
            for slot in range(size):
                x = get(args, X) + 4 * columns * (token + slot)
                quantise(get(args, QUANTISE), x, num_blocks, q8_blocks, slot, size)
            token += size
        first = largest_group() * claim(counter)


@helper
def _find_matrix(matrix: int, panel: int) -> int:
    """Address of the fields of a panel's matrix, which is `matrix` or comes later."""
    while panel >= get(matrix, END_PANEL):
        matrix += 8 * NUM_MATRIX_FIELDS
    return matrix


@helper
def _address(matrix: int, panel: int) -> int:
    """Address of a panel of this matrix or a later one."""
    matrix = _find_matrix(matrix, panel)
    row = REPACKED_ROWS * (panel - get(matrix, PANELS_BEFORE))
    address: int = get(matrix, WEIGHTS) + row * get(get(matrix, LAYOUT), ROW_BYTES)
    return address


def _multiply(args: int, counter: int, worker_idx: int) -> None:
    """Items are panels, of one matrix each."""
    num_tokens, num_panels = get(args, NUM_TOKENS), get(args, NUM_PANELS)
    room = get(args, OUT_ROOM)
    claims_ahead = get(args, CLAIMS_AHEAD) != 0
    num_threads = get(args, NUM_THREADS)
    totals = get(args, SCRATCH) + worker_idx * get(args, SCRATCH_BYTES)
    scratch = totals + TOTALS_BYTES
    matrix = get(args, MATRICES)
    panel_bytes = REPACKED_ROWS * get(get(matrix, LAYOUT), ROW_BYTES)
    size = panels_a_claim(num_panels, get(args, RUN_PANELS), panel_bytes, num_threads, num_tokens)
    shares = shares_of(num_panels, size, num_threads)
    panel, end = take(counter, shares)
    next_panel = next_end = num_panels
    if panel < num_panels:
        matrix = _find_matrix(matrix, panel)
        layout, second = get(matrix, LAYOUT), min(panel + 1, end - 1)
        prefetch_first(layout, _address(matrix, panel), _address(matrix, second))
    while panel < num_panels:
        # As late as it can be: what a thread has claimed is no other thread's.
        if claims_ahead and next_panel >= num_panels and panel + 2 >= end:
            next_panel, next_end = take(counter, shares)
        matrix = _find_matrix(matrix, panel)
        layout, rows = get(matrix, LAYOUT), get(matrix, ROWS)
        row = REPACKED_ROWS * (panel - get(matrix, PANELS_BEFORE))
        num_rows = min(REPACKED_ROWS, rows - row)
        near, far = panels_ahead(panel, end, next_panel, next_end)
        here, ahead = _address(matrix, panel), (_address(matrix, near), _address(matrix, far))
        for first in range(0, num_tokens, VECTORS_AT_ONCE):
            last = min(first + VECTORS_AT_ONCE, num_tokens)
            vectors = (get(args, X), 4 * get(args, COLUMNS), 0, get(args, Q8_BLOCKS), num_tokens)
            multiply_rows(layout, here, num_rows, vectors, first, last, ahead, totals, scratch)
            for token in range(first, last):
                source = totals + 4 * REPACKED_ROWS * (token - first)
                place = 4 * (room * get(matrix, ROWS_BEFORE) + rows * token + row)
                if get(args, ADDEND):
                    _add(source, get(args, ADDEND) + place, num_rows)
                v.copy_bytes(get(args, OUT) + place, source, 4 * num_rows)
        panel += 1
        if panel == end:
            if not claims_ahead:
                next_panel, next_end = take(counter, shares)
            panel, end = next_panel, next_end
            next_panel = next_end = num_panels


@helper
def _add(place: int, addend: int, count: int) -> None:
    for index in range(0, 4 * count, 4):
        v.store_float(place + index, v.load_float(addend + index) + v.load_float(place + index))


def _run_linear(args: int, counter: int, pool: int) -> None:
    if get(args, Q8_BYTES):
        is_few = get(args, NUM_TOKENS) <= FEW_TOKENS
        run_on(0 if is_few else pool, get(args, QUANTISE_TASK), args, counter)
    run_on(
        pool if get(args, NUM_PANELS) > get(args, RUN_PANELS) else 0,
        get(args, MULTIPLY_TASK),
        args,
        counter,
    )


# Words of a call that looks up rows.
(
    TOKEN_IDS,  # [T] int32, each a row
    TABLE,
    EXPAND,
    TABLE_ROW_BYTES,
    TABLE_COLUMNS,
    ROWS_OUT,  # [T, columns] float32
    NUM_IDS,
) = range(FIRST_FIELD, FIRST_FIELD + 7)


def _embed(args: int, counter: int, worker_idx: int) -> None:
    """Items are tokens."""
    columns = get(args, TABLE_COLUMNS)
    token = claim(counter)
    while token < get(args, NUM_IDS):
        row = v.load_i32(get(args, TOKEN_IDS) + 4 * token)
        place = get(args, ROWS_OUT) + 4 * token * columns
        source = get(args, TABLE) + row * get(args, TABLE_ROW_BYTES)
        v.call_expand(get(args, EXPAND), source, columns, place)
        token = claim(counter)


@cache
def linear_tasks() -> tuple[RowFunction, ...]:
    """The phases, in the order of their words, which hold their addresses."""
    phases = (_quantise_x, _multiply)
    return tuple(compile_task(phase) for phase in phases)


@cache
def run_linear() -> RowFunction:
    """The function of calls with a plan."""
    return compile_task(_run_linear)


@cache
def embed_task() -> RowFunction:
    return compile_task(_embed)
