"""Sixteen rows of any type times a set of vectors: the inner step of all kernels with weights.

A set's vectors are given both as float32 rows and as q8 blocks, and each type uses one of them. Q8
blocks come in interleaved groups (see repacked/kernels): as many groups of the tier's largest size,
8 or 16 vectors, as fit, then one of each power of two in the rest. Addresses and strides are in
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dflash_protocol.ids import I64Array
from dflash_runtime.compute.cpu.compile.compiling import helper
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import I64, emit_call, i64, primitive, void
from dflash_runtime.compute.cpu.simd.untyped import ir
from dflash_runtime.compute.cpu.threads.parallel import claim
from dflash_runtime.compute.cpu.weights import float_tile
from dflash_runtime.compute.cpu.weights.repacked.amx import begin_tiles, end_tiles
from dflash_runtime.compute.cpu.weights.repacked.kernels import (
    BLOCKS_AT_ONCE,
    Q8_BLOCK_BYTES,
    REPACKED_BYTES,
    group_sizes,
)
from dflash_runtime.compute.cpu.weights.repacked.step_kernels import STEP_BLOCK_BYTES
from dflash_runtime.compute.cpu.weights.rows import (
    COLUMNS,
    EXPAND_STEP,
    FLOAT_ROWS,
    MULTIPLY,
    MULTIPLY_ONE,
    MULTIPLY_STEP,
    ROW_BYTES,
    SUM_LANES,
    UNPACK,
)
from dflash_runtime.compute.cpu.weights.step_floats import LANES_BYTES, multiply_step_float

REPACKED_ROWS = 16

VECTORS_AT_ONCE = 256
"""Vectors multiplied by an unpacked tile before the next is unpacked: their results stay cached."""

TOTALS_BYTES = 4 * REPACKED_ROWS * VECTORS_AT_ONCE

LEAD_BYTES = 4096
"""What a core reads at 25 GB/s while a line comes from memory, some 160 ns under load.

The 16 rows of a panel are read side by side, but prefetched one after the other: memory answers
neighbouring requests most quickly. So of the next panel, the last row is read only one row's bytes
after it was prefetched. Where that is less, the panel after the next is prefetched; with longer
rows, three panels would take too much of L2.
"""


_CLAIM_BYTES = 1 << 18
_CLAIMS_A_THREAD = 16
_SMALLER_CLAIMS_A_THREAD = 3
_FEW_TOKENS = 8


def product_scratch_bytes(layouts: Iterable[I64Array]) -> int:
    """Scratch bytes that `multiply_rows` needs for rows of these layouts."""
    num_bytes = 64 + REPACKED_BYTES
    for layout in layouts:
        if layout[UNPACK]:
            num_bytes = max(num_bytes, 64 + REPACKED_BYTES + REPACKED_ROWS * int(layout[ROW_BYTES]))
        else:
            num_bytes = max(num_bytes, float_tile.scratch_bytes(int(layout[COLUMNS])))
    return -(-num_bytes // 64) * 64


@primitive(void, i64, i64, i64, i64, i64)
def _call_4(builder: Any, function: Any, *numbers: Any) -> None:
    emit_call(builder, ir.VoidType(), function, list(numbers))


@primitive(void, *[i64] * 8)
def call_7(builder: Any, function: Any, *numbers: Any) -> None:
    emit_call(builder, ir.VoidType(), function, list(numbers))


@primitive(void, *[i64] * 9)
def _call_8(builder: Any, function: Any, *numbers: Any) -> None:
    emit_call(builder, ir.VoidType(), function, list(numbers))


@primitive(void, *[i64] * 11)
def call_10(builder: Any, function: Any, *numbers: Any) -> None:
    emit_call(builder, ir.VoidType(), function, list(numbers))


@primitive(i64)
def largest_group(builder: Any) -> Any:
    """Size of the largest groups, in vectors."""
    del builder
    return I64(group_sizes()[0])


@helper
def group_size(item: int, num_items: int) -> int:
    """Size of the group that starts at `item` in a set of `num_items`."""
    size: int = largest_group()
    while size > num_items - item:
        size >>= 1
    return size


@helper
def panels_a_claim(
    num_panels: int, run_panels: int, panel_bytes: int, num_threads: int, num_tokens: int
) -> int:
    """The most neighbouring panels that a thread takes at a time: a run, or where there are many,
    several runs.

    Behind the last row, a core's hardware goes on to fetch what another core reads: two threads
    that take 14 KB at a time read half as much as with 100. With many tokens, rows are read rarely.
    """
    size, num_runs = run_panels, (num_panels + run_panels - 1) // run_panels
    if num_tokens <= _FEW_TOKENS:
        while (
            size * panel_bytes < _CLAIM_BYTES
            and run_panels * num_runs >= 2 * size * _CLAIMS_A_THREAD * num_threads
        ):
            size *= 2
    return size


@helper
def shares_of(num_panels: int, size: int, num_threads: int) -> tuple[int, int, int, int]:
    """How threads share panels, for `take`: claims of `size` panels, a power of two, while much is
    left, then some of each smaller power.

    All wait for the thread that ends last, which may hold two claims. With sixteen threads and four
    claims each this cost a fifth of the time, and half of that if the last claims are small. With
    two threads it is little next to what small claims cost.
    """
    num_smaller = _SMALLER_CLAIMS_A_THREAD * max(num_threads - 2, 0)
    num_shared = num_panels - (size - 1) * num_smaller
    num_largest = max(num_shared, 0) // size
    if num_smaller == 0:
        num_largest = (num_panels + size - 1) // size
    return num_panels, size, num_largest, num_smaller


@helper
def panels_of(index: int, shares: tuple[int, int, int, int]) -> tuple[int, int]:
    """First and end of the panels of a claim. There are none, and none in later claims, if the
    first is not a panel."""
    num_panels, size, num_claims, num_smaller = shares
    first = 0
    while size > 1 and index >= num_claims:
        first += size * num_claims
        index -= num_claims
        size, num_claims = size // 2, num_smaller
    first += size * index
    return first, min(first + size, num_panels)


@helper
def panels_ahead(panel: int, end: int, following: int, end_following: int) -> tuple[int, int]:
    """The two panels that a thread reads after `panel`, which is in a claim until `end`; what
    follows is another claim, if that has any panels. Where only one is known it is both; where none
    is, `panel`, which is in the cache.
    """
    if following >= end_following:
        following = end_following = panel
    if panel + 1 >= end:
        return following, max(following, min(following + 1, end_following - 1))
    return panel + 1, panel + 2 if panel + 2 < end else following


@helper
def take(counter: int, shares: tuple[int, int, int, int]) -> tuple[int, int]:
    """The panels of the next claim, as `panels_of`."""
    return panels_of(claim(counter), shares)  # type: ignore[no-any-return]


@helper
def prefetch_first(layout: int, first: int, second: int) -> None:
    """Prefetch the panels that a thread begins with, as far as `multiply_rows` does not."""
    row_bytes = v.load_i64(layout + 8 * ROW_BYTES)
    if v.load_i64(layout + 8 * UNPACK):
        _prefetch(first, first + REPACKED_ROWS * row_bytes)
        if row_bytes < LEAD_BYTES:
            _prefetch(second, second + REPACKED_ROWS * row_bytes)


@helper
def _prefetch(line: int, end: int) -> int:
    while line < end:
        v.prefetch(line)
        line += 64
    return line


@helper
def multiply_rows(
    layout: int,
    rows: int,
    num_rows: int,
    vectors: tuple[int, int, int, int, int],
    first: int,
    end: int,
    ahead: tuple[int, int],
    totals: int,
    scratch: int,
) -> None:
    """``totals[item - first][row] = rows[row] · x[item]`` for part of a set of vectors.

    `vectors`: x, x_stride, indices, q8_blocks and num_items. Float32 vectors are at ``x + x_stride
    * indices[item]``, or ``* item`` if `indices` is 0. `first` and `end` are group boundaries.
    `ahead`: addresses of the two panels to be multiplied next; of either, as many bytes as these
    rows have may be prefetched. Shapes: rows [num_rows <= 16]; totals [end - first, 16] float32,
    with memory for an even number of rows.
    """
    x, x_stride, indices, q8_blocks, num_items = vectors
    row_bytes = v.load_i64(layout + 8 * ROW_BYTES)
    columns = v.load_i64(layout + 8 * COLUMNS)
    unpack = v.load_i64(layout + 8 * UNPACK)
    num_used = end - first
    if unpack == 0:
        call_10(
            v.load_i64(layout + 8 * FLOAT_ROWS),
            layout,
            rows,
            num_rows,
            x if indices else x + x_stride * first,
            x_stride,
            indices + 4 * first if indices else 0,
            num_used,
            totals,
            4 * REPACKED_ROWS,
            scratch,
        )
        return
    for place in range(totals, totals + 4 * REPACKED_ROWS * num_used, 128):
        v.store_floats(place, v.zeros())
    rows = _whole_panel(rows, num_rows, row_bytes, scratch)
    num_blocks = columns // 32
    near, far = _near_and_far(rows, row_bytes, ahead)
    if num_items == 1:
        multiply_one = v.load_i64(layout + 8 * MULTIPLY_ONE)
        call_7(multiply_one, rows, row_bytes, num_blocks, q8_blocks, far, near, totals)
        return
    chunk_bytes = row_bytes * BLOCKS_AT_ONCE // num_blocks
    # Prefetch a few lines at a time: all at once they would wait for each other.
    num_parts, item = 1, first
    while item < end:
        num_parts += 1
        item += group_size(item, num_items)
    share = (REPACKED_ROWS * chunk_bytes // num_parts + 63) & -64
    begin_tiles(num_used)
    for first_block in range(0, num_blocks, BLOCKS_AT_ONCE):
        count = min(BLOCKS_AT_ONCE, num_blocks - first_block)
        chunk = first_block // BLOCKS_AT_ONCE
        line = far + REPACKED_ROWS * chunk_bytes * chunk
        end_line = line + REPACKED_ROWS * chunk_bytes
        line = _prefetch(line, min(line + share, end_line))
        _call_4(unpack, rows + chunk_bytes * chunk, row_bytes, count, scratch)
        item = first
        while item < end:
            size = group_size(item, num_items)
            line = _prefetch(line, min(line + share, end_line))
            multiply = v.load_i64(layout + 8 * (MULTIPLY + size))
            place = q8_blocks + Q8_BLOCK_BYTES * (num_blocks * item + first_block * size)
            _call_4(multiply, scratch, count, place, totals + 4 * REPACKED_ROWS * (item - first))
            item += size
    end_tiles(num_used)


@helper
def _near_and_far(rows: int, row_bytes: int, ahead: tuple[int, int]) -> tuple[int, int]:
    """The panels to be prefetched while `rows` are multiplied; see LEAD_BYTES."""
    return (rows, ahead[0]) if row_bytes >= LEAD_BYTES else ahead


@helper
def _whole_panel(rows: int, num_rows: int, row_bytes: int, scratch: int) -> int:
    """Address of the rows, with memory of 16. Kernels read as many: results of the rows beyond the
    copied ones are ignored."""
    if num_rows == REPACKED_ROWS:
        return rows
    copied = scratch + REPACKED_BYTES
    v.copy_bytes(copied, rows, num_rows * row_bytes)
    return copied


@helper
def multiply_step_rows(
    layout: int,
    rows: int,
    num_rows: int,
    vectors: tuple[int, int, int, int, int],
    first: int,
    end: int,
    ahead: tuple[int, int],
    totals: int,
    scratch: int,
) -> None:
    """``totals[item - first][row] = rows[row] · x[item]`` for vectors of a decode step, in step
    order.

    `vectors`: x, x_stride, indices, step_blocks and num_items; step blocks are found like the
    float32 vectors. All else as `multiply_rows`.
    """
    if v.load_i64(layout + 8 * UNPACK) == 0:
        _multiply_step_floats(layout, rows, num_rows, vectors, first, end, totals, scratch)
        return
    _, _, indices, step_blocks, _ = vectors
    row_bytes = v.load_i64(layout + 8 * ROW_BYTES)
    num_blocks = v.load_i64(layout + 8 * COLUMNS) // 32
    rows = _whole_panel(rows, num_rows, row_bytes, scratch)
    near, far = _near_and_far(rows, row_bytes, ahead)
    for item in range(first, end):
        index = v.load_i32(indices + 4 * item) if indices else item
        _call_8(
            v.load_i64(layout + 8 * MULTIPLY_STEP),
            rows,
            row_bytes,
            num_blocks,
            step_blocks + STEP_BLOCK_BYTES * num_blocks * index,
            v.load_i64(layout + 8 * SUM_LANES),
            far,
            near,
            totals + 4 * REPACKED_ROWS * (item - first),
        )
        near, far = rows, rows  # the next vector finds them in the cache


@helper
def _multiply_step_floats(
    layout: int,
    rows: int,
    num_rows: int,
    vectors: tuple[int, int, int, int, int],
    first: int,
    end: int,
    totals: int,
    scratch: int,
) -> None:
    """The same for rows that are multiplied as float32."""
    x, x_stride, indices, _, _ = vectors
    columns = v.load_i64(layout + 8 * COLUMNS)
    num_lanes = v.load_i64(layout + 8 * SUM_LANES)
    multiply, expand = v.load_i64(layout + 8 * MULTIPLY_STEP), v.load_i64(layout + 8 * EXPAND_STEP)
    lanes = (scratch + 63) & -64
    expanded = lanes + LANES_BYTES
    for row in range(num_rows):
        v.call_expand(expand, rows + v.load_i64(layout + 8 * ROW_BYTES) * row, columns, expanded)
        for item in range(first, end):
            index = v.load_i32(indices + 4 * item) if indices else item
            vector = x + x_stride * index
            product = multiply_step_float(multiply, expanded, vector, columns, num_lanes, lanes)
            v.store_float(totals + 4 * (REPACKED_ROWS * (item - first) + row), product)
