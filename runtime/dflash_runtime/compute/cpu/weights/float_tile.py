"""Rows times vectors in float32: plain numbers as stored, rows of other types expanded.

A product's bits depend on its row and vector alone. Column c goes to lane ``c % 16`` of the
product's own accumulator, each lane takes its columns in order, missing columns of the last 16
count as zero, and the lanes are folded by halves. How many products are computed at once, and
whether rows and vectors are read in place or from a copy, changes no bit.

Callers split the rows among threads. Addresses and strides are in bytes.
"""

from __future__ import annotations

from functools import cache

from dflash_runtime.compute.cpu.compile.compiling import (
    RowFunction,
    helper,
    variant,
)
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import i64
from dflash_runtime.compute.cpu.weights import rows
from dflash_runtime.compute.cpu.weights.float_tile_code import (
    BF16,
    F16,
    F32,
    LANES,
    LINE,
    block_products,
    tile_rows,
    tile_shape,
    tile_vectors,
)
from dflash_runtime.compute.cpu.weights.rows import COLUMNS, EXPAND, ROW_BYTES

__all__ = ["BF16", "F16", "F32", "float_rows", "scratch_bytes"]

_ROWS_BYTES = 256 * 1024  # of expanded rows: with the vectors they meet, they stay in the L2 cache
_COPIES_BYTES = 256 * 1024  # of copied vectors, for the same reason
_TABLE_BYTES = 128  # has room for the addresses of the vectors that a tile multiplies


def scratch_bytes(columns: int) -> int:
    """Scratch bytes of one thread, for any type and number of vectors."""
    stride = _copy_stride(columns)
    rows, vectors = tile_shape()
    copies = max(_ROWS_BYTES, rows * stride) + max(_COPIES_BYTES, vectors * stride)
    return LINE + _TABLE_BYTES + copies


def _copy_stride(columns: int) -> int:
    """An odd number of cache lines: rows a power of two apart would share cache sets."""
    lines = (columns + LANES - 1) // LANES
    return (lines | 1) * LINE


_copy_stride_of = helper(_copy_stride)
_multiply_block = block_products((F32,))  # `float_rows` substitutes that of other kinds


def _multiply_rows_f32(
    layout: int,
    row: int,
    num_rows: int,
    x: int,
    x_stride: int,
    indices: int,
    num_vectors: int,
    out: int,
    out_stride: int,
    scratch: int,
) -> None:
    """``out[v][r] = row[r] · x[v]``, or ``· x[indices[v]]`` unless `indices` is 0.

    `layout`: see weights/rows, where ``EXPAND`` is F32, F16, BF16 or the address of an expand
    function. Many vectors are fastest if x and its stride are multiples of 64.
    Shapes: row [R, row bytes]; x [?, columns] float32; indices [V] int32; out [V] rows of R
    float32, `out_stride` bytes apart; scratch [scratch_bytes].
    """
    row_bytes, columns = v.load_i64(layout + 8 * ROW_BYTES), v.load_i64(layout + 8 * COLUMNS)
    expand = v.load_i64(layout + 8 * EXPAND)
    table = (scratch + LINE - 1) & -LINE
    if expand <= BF16 and num_vectors <= tile_vectors():
        _fill_table(table, x, x_stride, indices, 0, num_vectors)
        _multiply_block(
            expand, num_vectors, row, row_bytes, num_rows, columns, table, out, out_stride
        )
        return
    stride = _copy_stride_of(columns)
    rows_at_once = max(_ROWS_BYTES // stride // tile_rows(), 1) * tile_rows()
    vectors_at_once = max(_COPIES_BYTES // stride // tile_vectors(), 1) * tile_vectors()
    expanded = table + _TABLE_BYTES
    copies = expanded + rows_at_once * stride
    # Converting once for each share of vectors pays while memory latency hides it.
    is_stored = expand == F32 or (expand <= BF16 and num_vectors <= 2 * tile_vectors())
    # Loads that cross lines cost double, and a tile loads more from vectors than from rows.
    is_aligned = (x | x_stride) % LINE == 0
    if is_aligned:
        vectors_at_once = max(num_vectors, 1)
    for first_row in range(0, num_rows, rows_at_once):
        count = min(rows_at_once, num_rows - first_row)
        kind, rows, rows_stride = expand, row + first_row * row_bytes, row_bytes
        if not is_stored:
            for r in range(count):
                _expand(expand, rows + r * row_bytes, columns, expanded + r * stride)
            kind, rows, rows_stride = F32, expanded, stride
        for first in range(0, num_vectors, vectors_at_once):
            end = min(first + vectors_at_once, num_vectors)
            if not is_aligned and (first_row == 0 or num_vectors > vectors_at_once):
                for i in range(first, end):
                    source = x + x_stride * _index(indices, i)
                    _expand_f32(source, columns, copies + (i - first) * stride)
            while first < end:
                # The remainder in even shares: small tiles are bound by loads.
                shares = (end - first + tile_vectors() - 1) // tile_vectors()
                share = (end - first + shares - 1) // shares
                if is_aligned:
                    _fill_table(table, x, x_stride, indices, first, share)
                else:
                    _fill_table(table, copies, stride, 0, first % vectors_at_once, share)
                place = out + 4 * first_row + first * out_stride
                _multiply_block(
                    kind, share, rows, rows_stride, count, columns, table, place, out_stride
                )
                first += share


@cache
def float_rows(kind: int | None) -> RowFunction:
    """The address of `_multiply_rows_f32` for rows of a kind, or of expanded types (None).

    Half of the compile time would go into tiles of kinds that the file may not have.
    """
    kinds = (F32,) if kind is None or kind == F32 else (F32, kind)
    name = f"multiply_rows_{''.join(map(str, kinds))}"
    function = variant(_multiply_rows_f32, name, _multiply_block=block_products(kinds))
    return RowFunction(function, *[i64] * 10)


@helper
def _index(indices: int, i: int) -> int:
    index: int = v.load_i32(indices + 4 * i) if indices else i
    return index


@helper
def _fill_table(table: int, x: int, x_stride: int, indices: int, first: int, count: int) -> None:
    for i in range(count):
        v.store_i64(table + 8 * i, x + x_stride * _index(indices, first + i))


_expand_f32 = helper(rows.expand_f32)
_expand_f16 = helper(rows.expand_f16)
_expand_bf16 = helper(rows.expand_bf16)


@helper
def _expand(expand: int, row: int, columns: int, out: int) -> None:
    if expand == F16:
        _expand_f16(row, columns, out)
    elif expand == BF16:
        _expand_bf16(row, columns, out)
    else:
        v.call_expand(expand, row, columns, out)
