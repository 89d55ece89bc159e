"""Dense products, a set of vectors times one or several matrices; and embedding lookup."""

from __future__ import annotations

from functools import cache

from dflash_protocol.ids import F32Array, I32Array, I64Array
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
    largest_group,
    multiply_rows,
    panels_ahead,
    prefetch_first,
)
from dflash_runtime.compute.cpu.kernels.words import get
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import f32, i64
from dflash_runtime.compute.cpu.simd.untyped import types
from dflash_runtime.compute.cpu.threads.parallel import claim, run_on
from dflash_runtime.compute.cpu.weights.repacked.kernels import Q8_BLOCK_BYTES
from dflash_runtime.compute.cpu.weights.repacked.quantising import quantise
from dflash_runtime.compute.cpu.weights.rows import ROW_BYTES

# Arguments of the tasks, one int64 each: addresses, except where the unit says otherwise.
(
    # A plan: what calls with the same matrices have in common.
    NUM_MATRICES,
    NUM_RUNS,  # of all matrices
    SCRATCH_BYTES,  # of one thread
    Q8_BYTES,  # of a row of x as q8 blocks, or 0 if none are needed
    QUANTISE,  # the function, and the phases
    QUANTISE_TASK,
    MULTIPLY_TASK,
    # A call and its scratch memory.
    X,  # [T, columns] float32
    OUT,  # [T, rows] float32 for each matrix, one after another
    ADDEND,  # added to OUT, same layout; or 0
    NUM_TOKENS,
    COLUMNS,
    Q8_BLOCKS,  # [T] rows of x as q8 blocks, or 0
    MATRICES,  # [M, NUM_MATRIX_FIELDS]
    SCRATCH,  # [threads, SCRATCH_BYTES]
) = range(15)

NUM_ARGUMENTS = 15
NUM_PLAN_WORDS = X
"""Words of a plan, which those of its matrices follow."""

# Fields of one matrix.
(
    LAYOUT,
    WEIGHTS,
    ROWS,
    ROWS_BEFORE,  # of the matrices before it
    RUNS_BEFORE,
    NUM_MATRIX_FIELDS,
) = range(6)

RUN_ROWS = 32
"""Rows in one item."""

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
    row = (run - get(matrix, RUNS_BEFORE)) * RUN_ROWS
    address: int = get(matrix, WEIGHTS) + row * get(get(matrix, LAYOUT), ROW_BYTES)
    return address


def _multiply(args: int, counter: int, worker_idx: int) -> None:
    """Items are runs of RUN_ROWS rows of one matrix."""
    num_tokens, num_runs = get(args, NUM_TOKENS), get(args, NUM_RUNS)
    totals = get(args, SCRATCH) + worker_idx * get(args, SCRATCH_BYTES)
    scratch = totals + TOTALS_BYTES
    run = claim(counter)
    if run < num_runs:
        matrix = _find_matrix(args, run)
        layout, start = get(matrix, LAYOUT), _first_row(matrix, run)
        prefetch_first(layout, start, start + REPACKED_ROWS * get(layout, ROW_BYTES))
    while run < num_runs:
        next_run = claim(counter)
        matrix = _find_matrix(args, run)
        layout, rows = get(matrix, LAYOUT), get(matrix, ROWS)
        row_bytes = get(layout, ROW_BYTES)
        first_row = (run - get(matrix, RUNS_BEFORE)) * RUN_ROWS
        end_row = min(first_row + RUN_ROWS, rows)
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
                    place = 4 * (num_tokens * get(matrix, ROWS_BEFORE) + rows * token + row)
                    if get(args, ADDEND):
                        _add(source, get(args, ADDEND) + place, num_rows)
                    v.copy_bytes(get(args, OUT) + place, source, 4 * num_rows)
        run = next_run


@helper
def _add(place: int, addend: int, count: int) -> None:
    for index in range(0, 4 * count, 4):
        v.store_float(place + index, v.load_float(addend + index) + v.load_float(place + index))


def _linear(
    x: F32Array,
    out: F32Array,
    addend: F32Array,
    plan: I64Array,
    memory: tuple[int, ...],
    pool: int,
) -> None:
    """Run all phases. `addend` may be empty.

    Shapes: x [T, columns]; out, addend [T * sum of rows]; plan [NUM_PLAN_WORDS + M *
    NUM_MATRIX_FIELDS]. Memory: NUM_ARGUMENTS words, Q8_BLOCKS, SCRATCH and the counter.
    """
    num_tokens = x.shape[0]
    args, q8_blocks, scratch, counter = memory
    v.copy_bytes(args, v.address_of(plan), 8 * NUM_PLAN_WORDS)
    v.store_i64(args + 8 * X, v.address_of(x))
    v.store_i64(args + 8 * OUT, v.address_of(out))
    v.store_i64(args + 8 * ADDEND, v.address_of(addend) if addend.size else 0)
    v.store_i64(args + 8 * NUM_TOKENS, num_tokens)
    v.store_i64(args + 8 * COLUMNS, x.shape[1])
    v.store_i64(args + 8 * Q8_BLOCKS, q8_blocks if plan[Q8_BYTES] else 0)
    v.store_i64(args + 8 * MATRICES, v.address_of(plan) + 8 * NUM_PLAN_WORDS)
    v.store_i64(args + 8 * SCRATCH, scratch)
    if plan[Q8_BYTES]:
        run_on(pool if num_tokens > FEW_TOKENS else 0, plan[QUANTISE_TASK], args, counter)
    run_on(pool if plan[NUM_RUNS] > 1 else 0, plan[MULTIPLY_TASK], args, counter)


def _embed(
    token_ids: I32Array, weights: int, expand: int, row_bytes: int, rows: int, out: F32Array
) -> int:
    """Look up rows; returns the index of the first invalid id, or -1.

    Shapes: token_ids [T]; out [T, columns].
    """
    columns = out.shape[1]
    for token in range(token_ids.shape[0]):
        row = token_ids[token]
        if row < 0 or row >= rows:
            return token
        place = v.address_of(out) + 4 * token * columns
        v.call_expand(expand, weights + row * row_bytes, columns, place)
    return -1


@cache
def linear_tasks() -> tuple[RowFunction, ...]:
    """The phases, in the order of their words, which hold their addresses."""
    phases = (_quantise_x, _multiply)
    return tuple(compile_task(phase) for phase in phases)


@cache
def linear_kernel() -> Kernel:
    memory = types.UniTuple(i64, 4)
    arrays = [read_only(f32, 2), f32[::1], read_only(f32, 1), read_only(i64, 1)]
    return compile_kernel(_linear, *arrays, memory, i64)


@cache
def embed_kernel() -> Kernel:
    return compile_kernel(_embed, read_only(types.int32, 1), i64, i64, i64, i64, f32[:, ::1])
