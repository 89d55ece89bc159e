"""How kernels read rows: the fields of a layout, and functions that expand rows to float32.

A row is expanded group by group of 32 values. For most types a function takes the address of a
block and the index of a group in it, and returns the group's values; `scales[16]` in its docstring
is a part of the block, 16 bytes long, and parts are listed in their order. A scale is a half, a
quant a few bits: their product is exact; where a minimum is subtracted, the difference is rounded
once. Addresses are in bytes.

Source: block layouts of ggml (checked against the gguf package by tests).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.cpu.compile.compiling import Kernel, RowFunction, helper, variant
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import (
    I8,
    I16,
    LANES,
    emit_constant,
    emit_join,
    emit_load,
    emit_shuffle,
    emit_splat,
    i64,
    lanes_of,
    primitive,
    unsigned,
)
from dflash_runtime.compute.cpu.weights import rows_codebook

(
    ROW_BYTES,
    COLUMNS,
    UNPACK,
    MULTIPLY_ONE,
    MULTIPLY_STEP,
    SUM_LANES,
    EXPAND_STEP,
    EXPAND,
    FLOAT_ROWS,
    MULTIPLY,
) = range(10)
"""Fields of a row layout, int64: all that kernels need to know of rows except their address.
Functions are addresses; MULTIPLY is followed by one for each group size. MULTIPLY_STEP, SUM_LANES
and EXPAND_STEP are 0 but for experts in step order."""


# -- plain numbers --------------------------------------------------------------------------------


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


# -- blocks of 32 ---------------------------------------------------------------------------------

_iq4_values = v.table_lookup(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
)
_e2m1_values = v.table_lookup((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
"""Twice the E2M1 numbers; the block's scale is halved to match."""


def q8_0(block: int, group: int) -> Any:
    return v.from_signed(v.load_bytes(block + 2)) * v.splat(v.load_scale(block))


def q4_0(block: int, group: int) -> Any:
    quants = v.from_unsigned(v.load_nibbles(block + 2)) - v.splat(v.as_float(8))
    return quants * v.splat(v.load_scale(block))


def q4_1(block: int, group: int) -> Any:
    quants = v.from_unsigned(v.load_nibbles(block + 4))
    scale = v.splat(v.load_scale(block))
    return quants * scale + v.splat(v.load_scale(block + 2))


def q5_0(block: int, group: int) -> Any:
    fifth_bits = v.bit_lanes(v.load_u32(block + 2)) << 4
    quants = v.from_unsigned(v.load_nibbles(block + 6) | fifth_bits) - v.splat(v.as_float(16))
    return quants * v.splat(v.load_scale(block))


def q5_1(block: int, group: int) -> Any:
    fifth_bits = v.bit_lanes(v.load_u32(block + 4)) << 4
    quants = v.from_unsigned(v.load_nibbles(block + 8) | fifth_bits)
    scale = v.splat(v.load_scale(block))
    return quants * scale + v.splat(v.load_scale(block + 2))


def iq4_nl(block: int, group: int) -> Any:
    values = v.from_signed(_iq4_values(v.load_nibbles(block + 2)))
    return values * v.splat(v.load_scale(block))


def mxfp4(block: int, group: int) -> Any:
    exponent = v.load_byte(block)
    # Half of 2^(exponent - 127); the two smallest are subnormal.
    bits = (exponent - 1) << 23 if exponent > 1 else 0x200000 << exponent
    values = v.from_signed(_e2m1_values(v.load_nibbles(block + 1)))
    return values * v.splat(v.float_from_bits(bits))


# -- blocks of 256 --------------------------------------------------------------------------------


def q2_k(block: int, group: int) -> Any:
    """scales[16], each 4 bits scale and 4 bits minimum; quants[64]; d; dmin."""
    scale, minimum = v.load_scale(block + 80), v.load_scale(block + 82)
    half, shift = group // 4, group % 4 * 2
    first = v.load_byte(block + 2 * group)
    second = v.load_byte(block + 2 * group + 1)
    scales = v.splat_halves(v.as_float(first & 15), v.as_float(second & 15))
    minima = v.splat_halves(v.as_float(first >> 4), v.as_float(second >> 4))
    quants = v.from_unsigned(v.load_bytes(block + 16 + 32 * half) >> shift & 3)
    return quants * (scales * v.splat(scale)) - minima * v.splat(minimum)


def q3_k(block: int, group: int) -> Any:
    """high bits[32]; quants[64]; scales[12]; d. A clear high bit subtracts 4 from the quant."""
    scale = v.load_scale(block + 108)
    half, shift = group // 4, group % 4 * 2
    low = v.load_bytes(block + 32 + 32 * half) >> shift & 3
    high = (v.load_bytes(block) >> group & 1) << 2
    quants = v.from_unsigned(low | high) - v.splat(v.as_float(4))
    first = v.as_float(_q3_k_scale(block + 96, 2 * group) - 32)
    second = v.as_float(_q3_k_scale(block + 96, 2 * group + 1) - 32)
    return quants * (v.splat_halves(first, second) * v.splat(scale))


@helper
def _q3_k_scale(scales: int, index: int) -> int:
    """Four bits from one of the first 8 bytes, two from one of the last 4."""
    low = v.load_byte(scales + index % 8) >> (index // 8 * 4) & 15
    high = v.load_byte(scales + 8 + index % 4) >> (index // 4 * 2) & 3
    scale: int = low | high << 4
    return scale


def q4_k(block: int, group: int) -> Any:
    """d; dmin; scales and minima[12]; quants[128]: each 32 bytes hold two groups of 32."""
    scale, minimum = v.load_scale(block), v.load_scale(block + 2)
    quants = v.load_bytes(block + 16 + group // 2 * 32) >> (group % 2 * 4) & 15
    group_scale = v.splat(scale * v.as_float(_k_scale(block + 4, group)))
    group_minimum = v.splat(minimum * v.as_float(_k_minimum(block + 4, group)))
    return v.from_unsigned(quants) * group_scale - group_minimum


def q5_k(block: int, group: int) -> Any:
    """d; dmin; scales and minima[12]; fifth bits[32]; quants[128] as in Q4_K."""
    scale, minimum = v.load_scale(block), v.load_scale(block + 2)
    low = v.load_bytes(block + 48 + group // 2 * 32) >> (group % 2 * 4) & 15
    high = (v.load_bytes(block + 16) >> group & 1) << 4
    group_scale = v.splat(scale * v.as_float(_k_scale(block + 4, group)))
    group_minimum = v.splat(minimum * v.as_float(_k_minimum(block + 4, group)))
    return v.from_unsigned(low | high) * group_scale - group_minimum


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


def q6_k(block: int, group: int) -> Any:
    """low bits[128]; high bits[64]; int8 scales[16]; d. Two halves of 128 values."""
    scale = v.load_scale(block + 208)
    half, part = group // 4, group % 4
    low = v.load_bytes(block + 64 * half + part % 2 * 32) >> (part // 2 * 4) & 15
    high = (v.load_bytes(block + 128 + 32 * half) >> (2 * part) & 3) << 4
    quants = v.from_unsigned(low | high) - v.splat(v.as_float(32))
    first = v.as_float(v.load_signed_byte(block + 192 + 2 * group))
    second = v.as_float(v.load_signed_byte(block + 193 + 2 * group))
    return quants * (v.splat_halves(first, second) * v.splat(scale))


def iq4_xs(block: int, group: int) -> Any:
    """d; two high bits of each scale (u16); four low bits of each[4]; quants[128]."""
    scale, high_bits = v.load_scale(block), v.load_u16(block + 2)
    low = v.load_byte(block + 4 + group // 2) >> (group % 2 * 4) & 15
    group_scale = (low | (high_bits >> (2 * group) & 3) << 4) - 32
    values = v.from_signed(_iq4_values(v.load_nibbles(block + 8 + 16 * group)))
    return values * v.splat(scale * v.as_float(group_scale))


# -- NVFP4, in blocks of 64 -----------------------------------------------------------------------
# The tensor's global scale, stored separately in the file, is applied by the caller.

_E4M3_BIAS = np.float32(2 ** (127 - 7 - 1))


def nvfp4(block: int, group: int) -> Any:
    """Scales[4]; for each group of 16 eight bytes: low halves first, then high halves."""
    quants = _by_group(_e2m1_values(v.load_nibbles(block + 4 + 16 * group)))
    first = _half_e4m3(v.load_byte(block + 2 * group))
    second = _half_e4m3(v.load_byte(block + 2 * group + 1))
    return v.from_signed(quants) * v.splat_halves(first, second)


@helper
def _half_e4m3(code: int) -> float:
    """Half of an unsigned E4M3 number (the quants are doubled); 0x7F counts as 0."""
    # As upper bits of a float32 its exponent is too small by the difference of the biases.
    bits = (code & 127) << 20
    scale: float = v.float_from_bits(0 if code == 0x7F else bits) * _E4M3_BIAS
    return scale


@primitive(unsigned, unsigned)
def _by_group(builder: Any, values: Any) -> Any:
    """Values of the low halves of 16 bytes, then of the high ones, by groups."""
    quarter = LANES // 4
    order = [lane + quarter * part for part in (0, 2, 1, 3) for lane in range(quarter)]
    return emit_shuffle(builder, values, values, order)


# -- ternary types, in blocks of 256 --------------------------------------------------------------
# A value is -1, 0 or 1 times the block's scale.


def expand_tq1_0(row: int, columns: int, out: int) -> None:
    """bytes[32] of five digits, bytes[16] of five, bytes[4] of four; d."""
    for _ in range(columns // 256):
        scale = v.load_scale(row + 52)
        power = 1
        for _ in range(5):
            _store_digits(out, _digits(v.load_bytes(row), power, power), scale)
            power *= 3
            out += 128
        sixteen = _load_twice_16(row + 32)
        _store_digits(out, _digits(sixteen, 1, 3), scale)
        _store_digits(out + 128, _digits(sixteen, 9, 27), scale)
        last = _digits(sixteen, 81, 81)
        v.store_partial(out + 256, _values(last, scale), 16)
        out += 320
        power = 1
        for _ in range(4):
            for place in range(row + 48, row + 52):
                digit = (v.load_byte(place) * power & 255) * 3 >> 8
                v.store_float(out, v.as_float(digit - 1) * scale)
                out += 4
            power *= 3
        row += 54


def tq2_0(block: int, group: int) -> Any:
    """quants[64]: each 32 bytes hold four groups of 32; d."""
    scale = v.load_scale(block + 64)
    quants = v.load_bytes(block + group // 4 * 32) >> (group % 4 * 2) & 3
    return _values(quants, scale)


@helper
def _values(digits: Any, scale: float) -> Any:
    return (v.from_unsigned(digits) - v.splat(v.as_float(1))) * v.splat(scale)


@helper
def _store_digits(out: int, digits: Any, scale: float) -> None:
    v.store_floats(out, _values(digits, scale))


@primitive(unsigned, i64)
def _load_twice_16(builder: Any, address: Any) -> Any:
    """16 bytes in lanes 0 … 15, and again in 16 … 31."""
    loaded = emit_load(builder, address, lanes_of(I8, LANES // 2))
    return emit_join(builder, loaded, loaded)


@primitive(unsigned, unsigned, i64, i64)
def _digits(builder: Any, packed: Any, low: Any, high: Any) -> Any:
    """The digit at a power of three, `low` in lanes 0 … 15 and `high` in 16 … 31.

    A byte is a fraction of 256 in base 3: multiplied by the power modulo 256, it has the digit in
    front.
    """
    halves = [emit_splat(builder, builder.trunc(power, I8), LANES // 2) for power in (low, high)]
    fraction = builder.mul(packed, emit_join(builder, *halves))
    words = lanes_of(I16)
    tripled = builder.mul(builder.zext(fraction, words), emit_constant(words, 3))
    return builder.trunc(builder.lshr(tripled, emit_constant(words, 8)), packed.type)


# -- all types ------------------------------------------------------------------------------------

_PLAIN: dict[TensorType, Kernel] = {
    TensorType.F32: expand_f32,
    TensorType.F64: expand_f64,
    TensorType.F16: expand_f16,
    TensorType.BF16: expand_bf16,
    TensorType.TQ1_0: expand_tq1_0,
}
"""``expand(row, columns, out)`` of types without groups of 32."""

_GROUPS: dict[TensorType, Kernel] = {
    TensorType.Q4_0: q4_0,
    TensorType.Q4_1: q4_1,
    TensorType.Q5_0: q5_0,
    TensorType.Q5_1: q5_1,
    TensorType.Q8_0: q8_0,
    TensorType.IQ4_NL: iq4_nl,
    TensorType.MXFP4: mxfp4,
    TensorType.Q2_K: q2_k,
    TensorType.Q3_K: q3_k,
    TensorType.Q4_K: q4_k,
    TensorType.Q5_K: q5_k,
    TensorType.Q6_K: q6_k,
    TensorType.IQ4_XS: iq4_xs,
    TensorType.NVFP4: nvfp4,
    TensorType.TQ2_0: tq2_0,
    TensorType.IQ2_XXS: rows_codebook.iq2_xxs,
    TensorType.IQ2_XS: rows_codebook.iq2_xs,
    TensorType.IQ2_S: rows_codebook.iq2_s,
    TensorType.IQ3_XXS: rows_codebook.iq3_xxs,
    TensorType.IQ3_S: rows_codebook.iq3_s,
    TensorType.IQ1_S: rows_codebook.iq1_s,
    TensorType.IQ1_M: rows_codebook.iq1_m,
}
"""``values(block, group)`` of all other types: a group's 32 values."""

EXPANDED_TYPES = (*_PLAIN, *_GROUPS)


@cache
def expand_function(tensor_type: TensorType) -> RowFunction:
    """``function(row, columns, out)``: expands a stored row to float32."""
    function = _PLAIN.get(tensor_type)
    if function is None:
        layout = tensor_type.layout
        function = variant(
            _expand_groups,
            f"expand_{tensor_type.name.lower()}",
            _values_of=helper(_GROUPS[tensor_type]),
            _NUM_GROUPS=layout.block_elements // 32,
            _BLOCK_BYTES=layout.block_bytes,
        )
    return RowFunction(function, i64, i64, i64)


_NUM_GROUPS, _BLOCK_BYTES, _values_of = 1, 34, q8_0  # `expand_function` substitutes those of a type


def _expand_groups(row: int, columns: int, out: int) -> None:
    for _ in range(columns // (32 * _NUM_GROUPS)):
        for group in range(_NUM_GROUPS):
            v.store_floats(out, _values_of(row, group))
            out += 128
        row += _BLOCK_BYTES
