"""What a captured step computes besides the kernels of layers: rows, routed pairs, the next token.

On the host these are a few lines of numpy, with the same bits.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from dflash_protocol.ids import F32Array, F64Array, I32Array, I64Array
from dflash_runtime.compute.backend import NOT_FINITE
from dflash_runtime.compute.cpu.compile.compiling import RowFunction, compile_task, helper
from dflash_runtime.compute.cpu.kernels import experts_kernel as experts
from dflash_runtime.compute.cpu.kernels.words import (
    FIRST_FIELD,
    Call,
    address,
    get,
    task_call,
)
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.threads.parallel import claim, run_on

# -- rows -----------------------------------------------------------------------------------------

(
    X,
    OTHER,  # what is added, or the factors, or where columns are copied
    ROWS,
    COLUMNS,
    STRIDE,  # bytes from a row's other to the next one's
    FIRST_BYTE,  # of the columns in a row
) = range(FIRST_FIELD, FIRST_FIELD + 6)


def _add_task(args: int, counter: int, worker_idx: int) -> None:
    """Items are rows."""
    columns = get(args, COLUMNS)
    row = claim(counter)
    while row < get(args, ROWS):
        x, y = get(args, X) + 4 * columns * row, get(args, OTHER) + get(args, STRIDE) * row
        for column in range(0, columns - 31, 32):
            place = x + 4 * column
            v.store_floats(place, v.load_floats(place) + v.load_floats(y + 4 * column))
        for column in range(columns // 32 * 32, columns):
            place = x + 4 * column
            v.store_float(place, v.load_float(place) + v.load_float(y + 4 * column))
        row = claim(counter)


def add_call(x: F32Array, y: F32Array) -> Call:
    """``x += y``. Shapes: x [T, C]; y [T, C] or [C]."""
    columns = x.shape[1]
    if y.shape not in (x.shape, x.shape[1:]):
        raise ValueError(f"cannot add {y.shape} to {x.shape}")
    stride = 4 * columns if y.ndim == 2 else 0
    fields = [address(x), address(y), x.shape[0], columns, stride, 0]
    return task_call(add_task(), x.size, fields, per_token=(ROWS,))


def _multiply_task(args: int, counter: int, worker_idx: int) -> None:
    """Items are rows."""
    columns = get(args, COLUMNS)
    row = claim(counter)
    while row < get(args, ROWS):
        x = get(args, X) + 4 * columns * row
        factor = v.load_float(get(args, OTHER) + get(args, STRIDE) * row)
        for column in range(0, columns - 31, 32):
            place = x + 4 * column
            v.store_floats(place, v.load_floats(place) * v.splat(factor))
        for column in range(columns // 32 * 32, columns):
            v.store_float(x + 4 * column, v.load_float(x + 4 * column) * factor)
        row = claim(counter)


def multiply_call(x: F32Array, factors: F32Array, *, is_by_position: bool = False) -> Call:
    """``x *= factors``, one for each row. Shapes: x [T, …]; factors [T, 1], [1, 1] for all rows, or
    with `is_by_position` [N], one for each position."""
    num_tokens = x.shape[0]
    if not is_by_position and factors.shape not in ((num_tokens, 1), (1, 1)):
        raise ValueError(f"factors are {factors.shape} for {num_tokens} rows")
    stride = 4 if factors.size > 1 else 0
    fields = [address(x), address(factors), num_tokens, x.size // num_tokens, stride, 0]
    positions = ((OTHER, 4),) if is_by_position else ()
    return task_call(multiply_task(), x.size, fields, per_token=(ROWS,), per_position=positions)


def _columns_task(args: int, counter: int, worker_idx: int) -> None:
    """Items are rows."""
    num_bytes = 4 * get(args, COLUMNS)
    row = claim(counter)
    while row < get(args, ROWS):
        source = get(args, X) + get(args, STRIDE) * row + get(args, FIRST_BYTE)
        v.copy_bytes(get(args, OTHER) + num_bytes * row, source, num_bytes)
        row = claim(counter)


def columns_call(x: F32Array, first: int, out: F32Array) -> Call:
    """Copy some columns of rows. Shapes: x [..., C]; out [..., c]."""
    num_rows, columns = x.size // x.shape[-1], out.shape[-1]
    fields = [address(x), address(out), num_rows, columns, 4 * x.shape[-1], 4 * first]
    return task_call(columns_task(), out.size, fields, per_token=(ROWS,))


# -- routed experts -------------------------------------------------------------------------------

# Words that follow those of experts_kernel.
(
    TOPK_IDS,  # [T, K] int32, global
    TOPK_WEIGHTS,  # [T, K] float32
    NUM_USED,
    LOCAL_IDS,  # [E] int32, by global id
    SELECTIONS,  # [E] int64, by global id: incremented
    ROUNDED,  # [T, H] float32: the sums
    NUM_ROUTED_WORDS,
) = range(experts.NUM_ARGUMENTS, experts.NUM_ARGUMENTS + 7)


def set_routing(
    words: list[int],
    hidden: F32Array,
    routing: tuple[I32Array, F32Array],
    *,
    local_ids: I32Array,
    selections: I64Array,
    sums: F64Array,
    out: F32Array | None,
) -> None:
    """Fill in what is routed, and where the sums go, which are rounded to `out` if it is given.

    Shapes: hidden, sums, out [T, H]; routing [T, K] global ids and weights; local_ids, selections
    [E], by global id.
    """
    topk_ids, topk_weights = routing
    words[experts.HIDDEN], words[experts.OUT] = address(hidden), address(sums, np.float64)
    words[experts.NUM_TOKENS], words[experts.HIDDEN_SIZE] = hidden.shape
    words[TOPK_IDS], words[TOPK_WEIGHTS] = address(topk_ids, np.int32), address(topk_weights)
    words[NUM_USED], words[ROUNDED] = topk_ids.shape[1], 0 if out is None else address(out)
    words[LOCAL_IDS] = address(local_ids, np.int32)
    words[SELECTIONS] = address(selections, np.int64)


@helper
def fill_sums(args: int, value: float) -> None:
    for index in range(get(args, experts.NUM_TOKENS) * get(args, experts.HIDDEN_SIZE)):
        v.store_double(get(args, experts.OUT) + 8 * index, value)


@helper
def round_sums(args: int) -> None:
    sums, rounded = get(args, experts.OUT), get(args, ROUNDED)
    for index in range(get(args, experts.NUM_TOKENS) * get(args, experts.HIDDEN_SIZE)):
        v.store_float(rounded + 4 * index, np.float32(v.load_double(sums + 8 * index)))


@helper
def _group(args: int) -> None:
    """Group pairs by local expert id, in the order of a stable sort."""
    num_used, num_tokens = get(args, NUM_USED), get(args, experts.NUM_TOKENS)
    ids, starts = get(args, experts.EXPERT_IDS), get(args, experts.GROUP_STARTS)
    tokens, weights = get(args, experts.TOKEN_INDICES), get(args, experts.WEIGHTS)
    num_pairs = num_tokens * num_used
    for pair in range(num_pairs):
        chosen = v.load_i32(get(args, TOPK_IDS) + 4 * pair)
        counted = get(args, SELECTIONS) + 8 * chosen
        v.store_i64(counted, v.load_i64(counted) + 1)
        expert = v.load_i32(get(args, LOCAL_IDS) + 4 * chosen)
        weight, place = v.load_float(get(args, TOPK_WEIGHTS) + 4 * pair), pair
        # An insertion sort, of few pairs; `starts` holds each pair's expert meanwhile.
        while place > 0 and v.load_i32(starts + 4 * (place - 1)) > expert:
            v.store_i32(starts + 4 * place, v.load_i32(starts + 4 * (place - 1)))
            v.store_i32(tokens + 4 * place, v.load_i32(tokens + 4 * (place - 1)))
            v.store_float(weights + 4 * place, v.load_float(weights + 4 * (place - 1)))
            place -= 1
        v.store_i32(starts + 4 * place, expert)
        v.store_i32(tokens + 4 * place, pair // num_used)
        v.store_float(weights + 4 * place, weight)
    num_groups, last = 0, -1
    for pair in range(num_pairs):
        expert = v.load_i32(starts + 4 * pair)
        if expert != last:
            v.store_i32(ids + 4 * num_groups, expert)
            v.store_i32(starts + 4 * num_groups, pair)
            num_groups += 1
            last = expert
    v.store_i32(starts + 4 * num_groups, num_pairs)
    v.store_i64(args + 8 * experts.NUM_GROUPS, num_groups)


def _run_routed(args: int, counter: int, pool: int) -> None:
    _group(args)
    fill_sums(args, 0.0)
    if experts.run_experts(args, counter, pool) == 0:
        fill_sums(args, np.nan)  # a bug of a caller shows in the logits
    round_sums(args)


# -- the next token -------------------------------------------------------------------------------

(
    LOGITS,  # [T, VOCABULARY] float32
    VOCABULARY,
    NUM_ROWS,
    NEXT_IDS,  # [T] int32: the argmax of each row, or NOT_FINITE
    NUM_PARTS,  # of a row
    PARTS,  # scratch: an id and a value for each part, in 16 bytes
    PART_TASK,
) = range(7)

PART_COLUMNS = 1 << 13
"""Logits in one item."""


def _argmax_part(args: int, counter: int, worker_idx: int) -> None:
    """Items are parts of rows."""
    vocabulary, parts = get(args, VOCABULARY), get(args, NUM_PARTS)
    item = claim(counter)
    while item < get(args, NUM_ROWS) * parts:
        row, begin = item // parts, item % parts * PART_COLUMNS
        end = min(begin + PART_COLUMNS, vocabulary)
        logits = get(args, LOGITS) + 4 * vocabulary * row
        whole = begin + (end - begin) // 32 * 32
        best, zeros = v.splat(np.float32(-np.inf)), v.zeros()
        for column in range(begin, whole, 32):
            lanes = v.load_floats(logits + 4 * column)
            best, zeros = v.maximum(best, lanes), zeros + lanes * v.splat(np.float32(0))
        highest, zero = v.largest_of(best), v.sum_of(zeros)
        for column in range(whole, end):
            value = v.load_float(logits + 4 * column)
            highest, zero = max(highest, value), zero + value * np.float32(0)
        found = begin
        if zero != np.float32(0):  # a NaN: infinite logits times 0 are NaN too
            found = NOT_FINITE
        else:
            while v.load_float(logits + 4 * found) != highest:
                found += 1
        place = get(args, PARTS) + 16 * item
        v.store_i64(place, found)
        v.store_float(place + 8, highest)
        item = claim(counter)


def _run_argmax(args: int, counter: int, pool: int) -> None:
    parts = get(args, NUM_PARTS)
    run_on(pool if parts > 1 else 0, get(args, PART_TASK), args, counter)
    for row in range(get(args, NUM_ROWS)):
        place = get(args, PARTS) + 16 * parts * row
        best, highest = v.load_i64(place), v.load_float(place + 8)
        for part in range(1, parts):
            found, value = v.load_i64(place + 16 * part), v.load_float(place + 16 * part + 8)
            if best != NOT_FINITE and (found == NOT_FINITE or value > highest):
                best, highest = found, value
        v.store_i32(get(args, NEXT_IDS) + 4 * row, best)


def argmax_call(logits: F32Array, next_ids: I32Array) -> Call:
    """The first of the highest logits. Shapes: logits [T, V]; next_ids [T]."""
    num_rows, vocabulary = logits.shape
    num_parts = -(-vocabulary // PART_COLUMNS)
    words = [address(logits), vocabulary, num_rows, address(next_ids, np.int32), num_parts, 0]
    return Call(
        run_argmax().address,
        [*words, argmax_part().address],
        per_token=(NUM_ROWS,),
        scratch=((PARTS, 16 * num_rows * num_parts),),
    )


# -- a step's position ----------------------------------------------------------------------------

POSITION, NUM_PLACES, PLACES = range(3)
"""The first position; words that depend on it [N, 3]: address, value at position 0, growth."""


def _place(args: int, counter: int, pool: int) -> None:
    place, position = get(args, PLACES), get(args, POSITION)
    for _ in range(get(args, NUM_PLACES)):
        v.store_i64(get(place, 0), get(place, 1) + get(place, 2) * position)
        place += 24


# -- compiled -------------------------------------------------------------------------------------


@cache
def add_task() -> RowFunction:
    return compile_task(_add_task)


@cache
def multiply_task() -> RowFunction:
    return compile_task(_multiply_task)


@cache
def columns_task() -> RowFunction:
    return compile_task(_columns_task)


@cache
def run_routed() -> RowFunction:
    """The function of calls that compute routed experts."""
    return compile_task(_run_routed)


@cache
def argmax_part() -> RowFunction:
    return compile_task(_argmax_part)


@cache
def run_argmax() -> RowFunction:
    """The function of calls that choose the next token."""
    return compile_task(_run_argmax)


@cache
def run_place() -> RowFunction:
    """The function of the first call of a step."""
    return compile_task(_place)


def compile_all() -> None:
    """Compile what every model needs, but for `run_routed`, which takes longest."""
    for compiled in (add_task, argmax_part, run_argmax, run_place):
        compiled()
