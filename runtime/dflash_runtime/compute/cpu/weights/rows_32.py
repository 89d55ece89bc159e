"""Rows of 32-value blocks: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL and MXFP4.

Each function expands a row of whole blocks into float32, exactly: a scale is a half, a quant a few
bits, and their product fits a float32. Addresses are in bytes.

Source: block layouts of ggml (checked against the gguf package by tests).
"""

from __future__ import annotations

from dflash_runtime.compute.cpu.simd import vectors as v

iq4_values = v.table_lookup(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
)
mxfp4_values = v.table_lookup((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
"""Twice the E2M1 numbers; the block's scale is halved to match."""


def expand_q8_0(row: int, columns: int, out: int) -> None:
    for _ in range(columns // 32):
        v.store_floats(out, v.from_signed(v.load_bytes(row + 2)) * v.splat(v.load_half(row)))
        row += 34
        out += 128


def expand_q4_0(row: int, columns: int, out: int) -> None:
    for _ in range(columns // 32):
        quants = v.from_unsigned(v.load_nibbles(row + 2)) - v.splat(v.as_float(8))
        v.store_floats(out, quants * v.splat(v.load_half(row)))
        row += 18
        out += 128


def expand_q4_1(row: int, columns: int, out: int) -> None:
    for _ in range(columns // 32):
        quants = v.from_unsigned(v.load_nibbles(row + 4))
        scale = v.splat(v.load_half(row))
        v.store_floats(out, quants * scale + v.splat(v.load_half(row + 2)))
        row += 20
        out += 128


def expand_q5_0(row: int, columns: int, out: int) -> None:
    for _ in range(columns // 32):
        fifth_bits = v.bit_lanes(v.load_u32(row + 2)) << 4
        quants = v.from_unsigned(v.load_nibbles(row + 6) | fifth_bits) - v.splat(v.as_float(16))
        v.store_floats(out, quants * v.splat(v.load_half(row)))
        row += 22
        out += 128


def expand_q5_1(row: int, columns: int, out: int) -> None:
    for _ in range(columns // 32):
        fifth_bits = v.bit_lanes(v.load_u32(row + 4)) << 4
        quants = v.from_unsigned(v.load_nibbles(row + 8) | fifth_bits)
        scale = v.splat(v.load_half(row))
        v.store_floats(out, quants * scale + v.splat(v.load_half(row + 2)))
        row += 24
        out += 128


def expand_iq4_nl(row: int, columns: int, out: int) -> None:
    for _ in range(columns // 32):
        values = v.from_signed(iq4_values(v.load_nibbles(row + 2)))
        v.store_floats(out, values * v.splat(v.load_half(row)))
        row += 18
        out += 128


def expand_mxfp4(row: int, columns: int, out: int) -> None:
    for _ in range(columns // 32):
        exponent = v.load_byte(row)
        # Half of 2^(exponent - 127); the two smallest are subnormal.
        bits = (exponent - 1) << 23 if exponent > 1 else 0x200000 << exponent
        values = v.from_signed(mxfp4_values(v.load_nibbles(row + 1)))
        v.store_floats(out, values * v.splat(v.float_from_bits(bits)))
        row += 17
        out += 128
