"""Rows of 256-value super-blocks: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K and IQ4_XS.

Each function expands a row of whole super-blocks into float32, 32 values at a time. Products of
scale and quant are exact; where a minimum is subtracted, the difference is rounded once. Addresses
are in bytes.

Source: block layouts of ggml (checked against the gguf package by tests).
"""

from __future__ import annotations

from dflash_runtime.compute.cpu.compile.compiling import helper
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.weights.rows_32 import iq4_values


def expand_q2_k(row: int, columns: int, out: int) -> None:
    """scales[16], each 4 bits scale and 4 bits minimum; quants[64]; d; dmin."""
    for _ in range(columns // 256):
        scale, minimum = v.load_half(row + 80), v.load_half(row + 82)
        for group in range(8):
            half, shift = group // 4, group % 4 * 2
            first = v.load_byte(row + 2 * group)
            second = v.load_byte(row + 2 * group + 1)
            scales = v.splat_halves(v.as_float(first & 15), v.as_float(second & 15))
            minima = v.splat_halves(v.as_float(first >> 4), v.as_float(second >> 4))
            quants = v.from_unsigned(v.load_bytes(row + 16 + 32 * half) >> shift & 3)
            v.store_floats(out, quants * (scales * v.splat(scale)) - minima * v.splat(minimum))
            out += 128
        row += 84


def expand_q3_k(row: int, columns: int, out: int) -> None:
    """high bits[32]; quants[64]; scales[12]; d. A clear high bit subtracts 4 from the quant."""
    for _ in range(columns // 256):
        scale = v.load_half(row + 108)
        for group in range(8):
            half, shift = group // 4, group % 4 * 2
            low = v.load_bytes(row + 32 + 32 * half) >> shift & 3
            high = (v.load_bytes(row) >> group & 1) << 2
            quants = v.from_unsigned(low | high) - v.splat(v.as_float(4))
            first = v.as_float(_q3_k_scale(row + 96, 2 * group) - 32)
            second = v.as_float(_q3_k_scale(row + 96, 2 * group + 1) - 32)
            v.store_floats(out, quants * (v.splat_halves(first, second) * v.splat(scale)))
            out += 128
        row += 110


@helper
def _q3_k_scale(scales: int, index: int) -> int:
    """Four bits from one of the first 8 bytes, two from one of the last 4."""
    low = v.load_byte(scales + index % 8) >> (index // 8 * 4) & 15
    high = v.load_byte(scales + 8 + index % 4) >> (index // 4 * 2) & 3
    scale: int = low | high << 4
    return scale


def expand_q4_k(row: int, columns: int, out: int) -> None:
    """d; dmin; scales and minima[12]; quants[128]: each 32 bytes hold two groups of 32."""
    for _ in range(columns // 256):
        scale, minimum = v.load_half(row), v.load_half(row + 2)
        for group in range(8):
            quants = v.load_bytes(row + 16 + group // 2 * 32) >> (group % 2 * 4) & 15
            group_scale = v.splat(scale * v.as_float(_k_scale(row + 4, group)))
            group_minimum = v.splat(minimum * v.as_float(_k_minimum(row + 4, group)))
            v.store_floats(out, v.from_unsigned(quants) * group_scale - group_minimum)
            out += 128
        row += 144


def expand_q5_k(row: int, columns: int, out: int) -> None:
    """d; dmin; scales and minima[12]; fifth bits[32]; quants[128] as in Q4_K."""
    for _ in range(columns // 256):
        scale, minimum = v.load_half(row), v.load_half(row + 2)
        for group in range(8):
            low = v.load_bytes(row + 48 + group // 2 * 32) >> (group % 2 * 4) & 15
            high = (v.load_bytes(row + 16) >> group & 1) << 4
            group_scale = v.splat(scale * v.as_float(_k_scale(row + 4, group)))
            group_minimum = v.splat(minimum * v.as_float(_k_minimum(row + 4, group)))
            v.store_floats(out, v.from_unsigned(low | high) * group_scale - group_minimum)
            out += 128
        row += 176


@helper
def _k_scale(packed: int, group: int) -> int:
    """The 6-bit scale of a group of Q4_K and Q5_K."""
    if group < 4:
        scale: int = v.load_byte(packed + group) & 63
    else:
        low = v.load_byte(packed + group + 4) & 15
        scale = low | v.load_byte(packed + group - 4) >> 6 << 4
    return scale


@helper
def _k_minimum(packed: int, group: int) -> int:
    """The 6-bit minimum of a group of Q4_K and Q5_K."""
    if group < 4:
        minimum: int = v.load_byte(packed + group + 4) & 63
    else:
        low = v.load_byte(packed + group + 4) >> 4
        minimum = low | v.load_byte(packed + group) >> 6 << 4
    return minimum


def expand_q6_k(row: int, columns: int, out: int) -> None:
    """low bits[128]; high bits[64]; int8 scales[16]; d. Two halves of 128 values."""
    for _ in range(columns // 256):
        scale = v.load_half(row + 208)
        for group in range(8):
            half, part = group // 4, group % 4
            low = v.load_bytes(row + 64 * half + part % 2 * 32) >> (part // 2 * 4) & 15
            high = (v.load_bytes(row + 128 + 32 * half) >> (2 * part) & 3) << 4
            quants = v.from_unsigned(low | high) - v.splat(v.as_float(32))
            first = v.as_float(v.load_signed_byte(row + 192 + 2 * group))
            second = v.as_float(v.load_signed_byte(row + 193 + 2 * group))
            v.store_floats(out, quants * (v.splat_halves(first, second) * v.splat(scale)))
            out += 128
        row += 210


def expand_iq4_xs(row: int, columns: int, out: int) -> None:
    """d; two high bits of each scale (u16); four low bits of each[4]; quants[128]."""
    for _ in range(columns // 256):
        scale, high_bits = v.load_half(row), v.load_u16(row + 2)
        for group in range(8):
            low = v.load_byte(row + 4 + group // 2) >> (group % 2 * 4) & 15
            group_scale = (low | (high_bits >> (2 * group) & 3) << 4) - 32
            values = v.from_signed(iq4_values(v.load_nibbles(row + 8 + 16 * group)))
            v.store_floats(out, values * v.splat(scale * v.as_float(group_scale)))
            out += 128
        row += 136
