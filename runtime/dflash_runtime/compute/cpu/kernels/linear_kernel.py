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
    panels_ahead,
    prefetch_first,
    runs_a_claim,
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
    NUM_MATRICES,
    NUM_RUNS,  # of all matrices
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
    RUNS_BEFORE,
    RUN_ROWS,  # rows in one item
    NUM_MATRIX_FIELDS,
) = range(7)

_MOST_RUN_ROWS = 32
_WIDE_RUN_BYTES = 1 << 16


def items_of(num_rows: int, row_bytes: int, num_threads: int) -> tuple[int, bool]:
    """Rows in an item, and whether threads claim the next one early, so that it can be prefetched.

    Matrices of few but wide rows, as a router's in float32, make so few items that threads would
    get none, or wait for one that holds two: their items are smaller, and not claimed early. Their
    rows are long enough to be read well without.
    """
    is_wide = REPACKED_ROWS * row_bytes >= _WIDE_RUN_BYTES
    if not is_wide or num_rows >= 2 * _MOST_RUN_ROWS * num_threads:
        return _MOST_RUN_ROWS, True
    return REPACKED_ROWS, num_rows >= 2 * REPACKED_ROWS * num_threads


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
def _find_matrix(args: int, run: int) -> int:
    """Address of the fields of a run's matrix."""
    matrix: int = get(args, MATRICES)
    for _ in range(1, get(args, NUM_MATRICES)):
        following = matrix + 8 * NUM_MATRIX_FIELDS
        if run < get(following, RUNS_BEFORE):
            break
        matrix = following
    return matrix


@helper
def _first_row(matrix: int, run: int) -> int:
    """Address of a run's first row."""
    row = (run - get(matrix, RUNS_BEFORE)) * get(matrix, RUN_ROWS)
    address: int = get(matrix, WEIGHTS) + row * get(get(matrix, LAYOUT), ROW_BYTES)
    return address


def _multiply(args: int, counter: int, worker_idx: int) -> None:
    """Items are runs of rows of one matrix."""
    num_tokens, num_runs = get(args, NUM_TOKENS), get(args, NUM_RUNS)
    room = get(args, OUT_ROOM)
    claims_ahead = get(args, CLAIMS_AHEAD) != 0
    totals = get(args, SCRATCH) + worker_idx * get(args, SCRATCH_BYTES)
    scratch = totals + TOTALS_BYTES
    first_bytes = get(get(get(args, MATRICES), LAYOUT), ROW_BYTES)
    run_bytes = first_bytes * get(get(args, MATRICES), RUN_ROWS)
    size = runs_a_claim(num_runs, run_bytes, get(args, NUM_THREADS), num_tokens)
    run = size * claim(counter)
    claimed_end = run + size
    if run < num_runs:
        matrix = _find_matrix(args, run)
        layout, start = get(matrix, LAYOUT), _first_row(matrix, run)
        prefetch_first(layout, start, start + REPACKED_ROWS * get(layout, ROW_BYTES))
    while run < num_runs:
        next_run = run + 1
        if next_run == claimed_end:
            next_run = size * claim(counter) if claims_ahead else num_runs
            claimed_end = next_run + size
        matrix = _find_matrix(args, run)
        layout, rows = get(matrix, LAYOUT), get(matrix, ROWS)
        row_bytes = get(layout, ROW_BYTES)
        first_row = (run - get(matrix, RUNS_BEFORE)) * get(matrix, RUN_ROWS)
        end_row = min(first_row + get(matrix, RUN_ROWS), rows)
        start = following = _first_row(matrix, run)
        following_bytes = row_bytes
        if next_run < num_runs:
            next_matrix = _find_matrix(args, next_run)
            following = _first_row(next_matrix, next_run)
            following_bytes = get(get(next_matrix, LAYOUT), ROW_BYTES)
        for row in range(first_row, end_row, REPACKED_ROWS):
            num_rows = min(REPACKED_ROWS, rows - row)
            in_run = row - first_row
            here = start + in_run * row_bytes
            ahead = panels_ahead(
                start, row_bytes, in_run, end_row - first_row, following, following_bytes
            )
            for first in range(0, num_tokens, VECTORS_AT_ONCE):
                end = min(first + VECTORS_AT_ONCE, num_tokens)
                vectors = (
                    get(args, X),
                    4 * get(args, COLUMNS),
                    0,
                    get(args, Q8_BLOCKS),
                    num_tokens,
                )
                multiply_rows(layout, here, num_rows, vectors, first, end, ahead, totals, scratch)
                for token in range(first, end):
                    source = totals + 4 * REPACKED_ROWS * (token - first)
                    place = 4 * (room * get(matrix, ROWS_BEFORE) + rows * token + row)
                    if get(args, ADDEND):
                        _add(source, get(args, ADDEND) + place, num_rows)
                    v.copy_bytes(get(args, OUT) + place, source, 4 * num_rows)
        run = next_run if claims_ahead else claim(counter)
        claimed_end = claimed_end if claims_ahead else run + 1


@helper
def _add(place: int, addend: int, count: int) -> None:
    for index in range(0, 4 * count, 4):
        v.store_float(place + index, v.load_float(addend + index) + v.load_float(place + index))


def _run_linear(args: int, counter: int, pool: int) -> None:
    if get(args, Q8_BYTES):
        is_few = get(args, NUM_TOKENS) <= FEW_TOKENS
        run_on(0 if is_few else pool, get(args, QUANTISE_TASK), args, counter)
    run_on(pool if get(args, NUM_RUNS) > 1 else 0, get(args, MULTIPLY_TASK), args, counter)


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
