"""Rows of codebook types: IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S and IQ1_M.

A quant is the index of a codebook entry of 8 or 4 small numbers. Each function expands a row of
whole super-blocks of 256 values into float32, 32 values at a time. A scale has few enough bits that
its products are exact. Addresses are in bytes.

Source: block layouts of ggml (checked against the gguf package by tests).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.cpu.compile.compiling import helper
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.weights.codebooks import (
    codebook,
    half_from_bits,
    splat_quarters,
    with_parity,
)

_iq2_xxs = codebook(TensorType.IQ2_XXS, entry_bytes=8)
_iq2_xs = codebook(TensorType.IQ2_XS, entry_bytes=8)
_iq2_s = codebook(TensorType.IQ2_S, entry_bytes=8)
_iq3_xxs = codebook(TensorType.IQ3_XXS, entry_bytes=4)
_iq3_s = codebook(TensorType.IQ3_S, entry_bytes=4)
_iq1 = codebook(TensorType.IQ1_S, entry_bytes=8)

_HALF, _QUARTER, _EIGHTH = np.float32(0.5), np.float32(0.25), np.float32(0.125)


def expand_iq2_xxs(row: int, columns: int, out: int) -> None:
    """d; for each 32: four indices[4]; a word of four 7-bit sign indices and a 4-bit scale."""
    for _ in range(columns // 256):
        scale = v.load_half(row)
        for group in range(8):
            place = row + 2 + 8 * group
            word = v.load_u32(place + 4)
            values = _iq2_xxs(
                v.load_byte(place),
                v.load_byte(place + 1),
                v.load_byte(place + 2),
                v.load_byte(place + 3),
            )
            group_scale = scale * (_HALF + v.as_float(word >> 28)) * _QUARTER
            _store_signed(out, values, _four_signs(word), v.splat(group_scale))
            out += 128
        row += 66


def expand_iq2_xs(row: int, columns: int, out: int) -> None:
    """d; words[32] of a 9-bit index and a 7-bit sign index; 4-bit scales[16]."""
    for _ in range(columns // 256):
        scale = v.load_half(row)
        for group in range(8):
            place = row + 2 + 8 * group
            first, second = v.load_u16(place), v.load_u16(place + 2)
            third, fourth = v.load_u16(place + 4), v.load_u16(place + 6)
            values = _iq2_xs(first & 511, second & 511, third & 511, fourth & 511)
            signs = with_parity(first >> 9) | with_parity(second >> 9) << 8
            signs |= with_parity(third >> 9) << 16 | with_parity(fourth >> 9) << 24
            _store_signed(out, values, signs, _two_scales(scale, v.load_byte(row + 66 + group)))
            out += 128
        row += 74


def expand_iq2_s(row: int, columns: int, out: int) -> None:
    """d; low bytes of indices[32]; signs[32]; two high bits of each index[8]; 4-bit scales[16]."""
    for _ in range(columns // 256):
        scale = v.load_half(row)
        for group in range(8):
            place, high = row + 2 + 4 * group, v.load_byte(row + 66 + group)
            values = _iq2_s(
                v.load_byte(place) | (high & 3) << 8,
                v.load_byte(place + 1) | (high >> 2 & 3) << 8,
                v.load_byte(place + 2) | (high >> 4 & 3) << 8,
                v.load_byte(place + 3) | (high >> 6) << 8,
            )
            scales = _two_scales(scale, v.load_byte(row + 74 + group))
            _store_signed(out, values, v.load_u32(place + 32), scales)
            out += 128
        row += 82


def expand_iq3_xxs(row: int, columns: int, out: int) -> None:
    """d; indices[64]; for each 32 a word of four 7-bit sign indices and a 4-bit scale."""
    for _ in range(columns // 256):
        scale = v.load_half(row)
        for group in range(8):
            place, word = row + 2 + 8 * group, v.load_u32(row + 66 + 4 * group)
            values = _iq3_xxs(
                v.load_byte(place),
                v.load_byte(place + 1),
                v.load_byte(place + 2),
                v.load_byte(place + 3),
                v.load_byte(place + 4),
                v.load_byte(place + 5),
                v.load_byte(place + 6),
                v.load_byte(place + 7),
            )
            group_scale = scale * (_HALF + v.as_float(word >> 28)) * _HALF
            _store_signed(out, values, _four_signs(word), v.splat(group_scale))
            out += 128
        row += 98


def expand_iq3_s(row: int, columns: int, out: int) -> None:
    """d; low bytes of indices[64]; their high bits[8]; signs[32]; 4-bit scales[8]."""
    for _ in range(columns // 256):
        scale = v.load_half(row)
        for group in range(8):
            place, high = row + 2 + 8 * group, v.load_byte(row + 66 + group)
            values = _iq3_s(
                v.load_byte(place) | (high & 1) << 8,
                v.load_byte(place + 1) | (high >> 1 & 1) << 8,
                v.load_byte(place + 2) | (high >> 2 & 1) << 8,
                v.load_byte(place + 3) | (high >> 3 & 1) << 8,
                v.load_byte(place + 4) | (high >> 4 & 1) << 8,
                v.load_byte(place + 5) | (high >> 5 & 1) << 8,
                v.load_byte(place + 6) | (high >> 6 & 1) << 8,
                v.load_byte(place + 7) | (high >> 7) << 8,
            )
            bits = v.load_byte(row + 106 + group // 2) >> (group % 2 * 4) & 15
            group_scale = scale * v.as_float(1 + 2 * bits)
            _store_signed(out, values, v.load_u32(row + 74 + 4 * group), v.splat(group_scale))
            out += 128
        row += 110


def expand_iq1_s(row: int, columns: int, out: int) -> None:
    """d; low bytes of indices[32]; words[8]: four times 3 high bits, a scale, a shift."""
    for _ in range(columns // 256):
        scale = v.load_half(row)
        for group in range(8):
            place, word = row + 2 + 4 * group, v.load_u16(row + 34 + 2 * group)
            values = _iq1(
                v.load_byte(place) | (word & 7) << 8,
                v.load_byte(place + 1) | (word >> 3 & 7) << 8,
                v.load_byte(place + 2) | (word >> 6 & 7) << 8,
                v.load_byte(place + 3) | (word >> 9 & 7) << 8,
            )
            shifted = v.from_signed(values) + v.splat(_shift(word >> 15))
            group_scale = v.splat(scale * v.as_float(2 * (word >> 12 & 7) + 1))
            v.store_floats(out, shifted * group_scale)
            out += 128
        row += 50


def expand_iq1_m(row: int, columns: int, out: int) -> None:
    """Low bytes of indices[32]; nibbles[32]: three high bits and a shift's sign; words[4].

    A word has four 3-bit scales, each of 16 values, and above them a quarter of d.
    """
    for _ in range(columns // 256):
        bits = v.load_u16(row + 48) >> 12 | (v.load_u16(row + 50) >> 12) << 4
        bits |= (v.load_u16(row + 52) >> 12) << 8 | (v.load_u16(row + 54) >> 12) << 12
        scale = half_from_bits(bits)
        for group in range(8):
            place, high = row + 4 * group, v.load_u16(row + 32 + 2 * group)
            values = _iq1(
                v.load_byte(place) | (high & 7) << 8,
                v.load_byte(place + 1) | (high >> 4 & 7) << 8,
                v.load_byte(place + 2) | (high >> 8 & 7) << 8,
                v.load_byte(place + 3) | (high >> 12 & 7) << 8,
            )
            shifts = splat_quarters(
                _shift(high >> 3 & 1),
                _shift(high >> 7 & 1),
                _shift(high >> 11 & 1),
                _shift(high >> 15),
            )
            scales = v.load_u16(row + 48 + group // 2 * 2) >> (group % 2 * 6)
            first = scale * v.as_float(2 * (scales & 7) + 1)
            second = scale * v.as_float(2 * (scales >> 3 & 7) + 1)
            shifted = v.from_signed(values) + shifts
            v.store_floats(out, shifted * v.splat_halves(first, second))
            out += 128
        row += 56


@helper
def _shift(sign: int) -> float:
    """What the IQ1 types add to all values of an entry."""
    shift: float = v.as_float(1 - 2 * sign) * _EIGHTH
    return shift


@helper
def _four_signs(word: int) -> int:
    """32 sign bits from four 7-bit indices."""
    low = with_parity(word & 127) | with_parity(word >> 7 & 127) << 8
    high = with_parity(word >> 14 & 127) | with_parity(word >> 21 & 127) << 8
    signs: int = low | high << 16
    return signs


@helper
def _two_scales(scale: float, packed: int) -> Any:
    """The two 4-bit scales of 16 values each of some IQ2 types."""
    first = scale * (_HALF + v.as_float(packed & 15)) * _QUARTER
    second = scale * (_HALF + v.as_float(packed >> 4)) * _QUARTER
    return v.splat_halves(first, second)


@helper
def _store_signed(out: int, values: Any, signs: int, scales: Any) -> None:
    """Store values, negated where the sign bit is set."""
    factors = v.splat(v.as_float(1)) - v.from_unsigned(v.bit_lanes(signs) << 1)
    v.store_floats(out, v.from_signed(values) * scales * factors)
