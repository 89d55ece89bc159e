"""Rows of plain numbers, F32, F64, F16 and BF16, as float32."""

from __future__ import annotations

import numpy as np

from dflash_runtime.compute.cpu.simd import vectors as v


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


def expand_f64(row: int, columns: int, out: int) -> None:
    for column in range(columns):
        v.store_float(out + 4 * column, np.float32(v.load_double(row + 8 * column)))
