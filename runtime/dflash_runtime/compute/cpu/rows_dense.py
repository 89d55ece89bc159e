"""Rows of plain numbers, F32, F16 and BF16, and the dot product that every type ends in.

The order of a dot product is fixed by its columns alone: column c goes to lane ``c % 32``, missing
columns of the last 32 count as zero, and the lanes are folded in one order. Every function that
multiplies a row follows it, so a product has the same bits whichever of them computes it.
"""

from __future__ import annotations

from dflash_runtime.compute.cpu import vector as v


def dot_f32(row: int, columns: int, x: int) -> float:
    """A row times a vector. Shapes: row, x [columns] float32."""
    total = v.zeros()
    offset = 0
    for _ in range(columns // 32):
        total = v.fma(v.load_floats(row + offset), v.load_floats(x + offset), total)
        offset += 128
    rest = columns % 32
    if rest:
        last = v.load_padded(row + offset, rest)
        total = v.fma(last, v.load_padded(x + offset, rest), total)
    product: float = v.sum_of(total)
    return product


def dot_f32_by_4(
    row: int, columns: int, x0: int, x1: int, x2: int, x3: int, out: int, out_stride: int
) -> None:
    """Four times dot_f32, reading the row once. The results lie `out_stride` bytes apart."""
    total0 = v.zeros()
    total1 = v.zeros()
    total2 = v.zeros()
    total3 = v.zeros()
    offset = 0
    for _ in range(columns // 32):
        part = v.load_floats(row + offset)
        total0 = v.fma(part, v.load_floats(x0 + offset), total0)
        total1 = v.fma(part, v.load_floats(x1 + offset), total1)
        total2 = v.fma(part, v.load_floats(x2 + offset), total2)
        total3 = v.fma(part, v.load_floats(x3 + offset), total3)
        offset += 128
    rest = columns % 32
    if rest:
        part = v.load_padded(row + offset, rest)
        total0 = v.fma(part, v.load_padded(x0 + offset, rest), total0)
        total1 = v.fma(part, v.load_padded(x1 + offset, rest), total1)
        total2 = v.fma(part, v.load_padded(x2 + offset, rest), total2)
        total3 = v.fma(part, v.load_padded(x3 + offset, rest), total3)
    v.store_sums(out, out_stride, total0, total1, total2, total3)


def expand_f32(row: int, columns: int, out: int) -> None:
    for _ in range(columns // 32):
        v.store_floats(out, v.load_floats(row))
        row += 128
        out += 128
    for _ in range(columns % 32):
        v.store_float(out, v.load_float(row))
        row += 4
        out += 4


def expand_f16(row: int, columns: int, out: int) -> None:
    for _ in range(columns // 32):
        v.store_floats(out, v.load_halves(row))
        row += 64
        out += 128
    for _ in range(columns % 32):
        v.store_float(out, v.load_half(row))
        row += 2
        out += 4


def expand_bf16(row: int, columns: int, out: int) -> None:
    for _ in range(columns // 32):
        v.store_floats(out, v.load_bfloats(row))
        row += 64
        out += 128
    for _ in range(columns % 32):
        v.store_float(out, v.load_bfloat(row))
        row += 2
        out += 4
