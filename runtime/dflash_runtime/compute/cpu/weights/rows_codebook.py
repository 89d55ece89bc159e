"""Rows of codebook types: IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S and IQ1_M.

A quant is the index of a codebook entry of 8 or 4 small numbers. Like those in rows, each function
returns the 32 values of a group, here of a block of 256. A scale has few enough bits that its
products are exact. Codebooks are constants in the code that looks them up: they come from the gguf
package, imported only when such code is generated, not when it is cached.

Source: block layouts of ggml (checked against the gguf package by tests).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.cpu.compile.compiling import helper
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import (
    FLOAT,
    HALF,
    I8,
    I16,
    I32,
    I64,
    LANES,
    emit_load,
    emit_shuffle,
    f32,
    floats,
    i64,
    lanes_of,
    primitive,
    unsigned,
)
from dflash_runtime.compute.cpu.simd.untyped import ir


def _codebook(tensor_type: TensorType, *, entry_bytes: int) -> Callable[..., Any]:
    """Make a primitive that joins the entries of the given indices into 32 bytes, maybe signed.

    Sources: the grids of ggml, as the gguf package has them.
    """
    entry_type = ir.IntType(8 * entry_bytes)
    num_indices = LANES // entry_bytes

    @primitive(unsigned, *[i64] * num_indices)
    def entries(builder: Any, *indices: Any) -> Any:
        table = _table(builder.module, tensor_type, entry_bytes)
        joined = ir.Constant(lanes_of(entry_type, num_indices), ir.Undefined)
        for place, index in enumerate(indices):
            address = builder.add(table, builder.mul(index, I64(entry_bytes)))
            entry = emit_load(builder, address, entry_type)
            joined = builder.insert_element(joined, entry, I32(place))
        return builder.bitcast(joined, lanes_of(I8))

    return entries


def _table(module: Any, tensor_type: TensorType, entry_bytes: int) -> Any:
    """Address of a codebook, a constant of the module."""
    name = f"codebook_{tensor_type.name}"
    table = module.globals.get(name)
    if table is None:
        content = _content(tensor_type)
        array = ir.ArrayType(I8, len(content))
        table = ir.GlobalVariable(module, array, name)
        table.linkage, table.global_constant, table.align = "internal", True, entry_bytes
        table.initializer = ir.Constant(array, bytearray(content))
    return table.ptrtoint(I64)


@cache
def _content(tensor_type: TensorType) -> bytes:
    from gguf import quants

    kind: Any = getattr(quants, tensor_type.name)
    kind.init_grid()
    return bytes(kind.grid.astype("int8").tobytes())


@primitive(i64, i64)
def _with_parity(builder: Any, index: Any) -> Any:
    """Seven bits, and above them the bit that makes the number of ones even."""
    ones = builder.ctpop(index)
    return builder.or_(index, builder.shl(builder.and_(ones, I64(1)), I64(7)))


@primitive(f32, i64)
def _half_from_bits(builder: Any, bits: Any) -> Any:
    return builder.fpext(builder.bitcast(builder.trunc(bits, I16), HALF), FLOAT)


@primitive(floats, f32, f32, f32, f32)
def _splat_quarters(builder: Any, *values: Any) -> Any:
    """Each of four values in eight lanes."""
    four = ir.Constant(lanes_of(FLOAT, 4), ir.Undefined)
    for place, value in enumerate(values):
        four = builder.insert_element(four, value, I32(place))
    return emit_shuffle(builder, four, four, [lane // 8 for lane in range(LANES)])


_iq2_xxs = _codebook(TensorType.IQ2_XXS, entry_bytes=8)
_iq2_xs = _codebook(TensorType.IQ2_XS, entry_bytes=8)
_iq2_s = _codebook(TensorType.IQ2_S, entry_bytes=8)
_iq3_xxs = _codebook(TensorType.IQ3_XXS, entry_bytes=4)
_iq3_s = _codebook(TensorType.IQ3_S, entry_bytes=4)
_iq1 = _codebook(TensorType.IQ1_S, entry_bytes=8)

_HALF, _QUARTER, _EIGHTH = np.float32(0.5), np.float32(0.25), np.float32(0.125)


def iq2_xxs(block: int, group: int) -> Any:
    """d; for each 32: four indices[4]; a word of four 7-bit sign indices and a 4-bit scale."""
    scale = v.load_scale(block)
    place = block + 2 + 8 * group
    word = v.load_u32(place + 4)
    values = _iq2_xxs(
        v.load_byte(place),
        v.load_byte(place + 1),
        v.load_byte(place + 2),
        v.load_byte(place + 3),
    )
    group_scale = scale * (_HALF + v.as_float(word >> 28)) * _QUARTER
    return _signed(values, _four_signs(word), v.splat(group_scale))


def iq2_xs(block: int, group: int) -> Any:
    """d; words[32] of a 9-bit index and a 7-bit sign index; 4-bit scales[16]."""
    scale = v.load_scale(block)
    place = block + 2 + 8 * group
    first, second = v.load_u16(place), v.load_u16(place + 2)
    third, fourth = v.load_u16(place + 4), v.load_u16(place + 6)
    values = _iq2_xs(first & 511, second & 511, third & 511, fourth & 511)
    signs = _with_parity(first >> 9) | _with_parity(second >> 9) << 8
    signs |= _with_parity(third >> 9) << 16 | _with_parity(fourth >> 9) << 24
    return _signed(values, signs, _two_scales(scale, v.load_byte(block + 66 + group)))


def iq2_s(block: int, group: int) -> Any:
    """d; low bytes of indices[32]; signs[32]; two high bits of each index[8]; 4-bit scales[16]."""
    scale = v.load_scale(block)
    place, high = block + 2 + 4 * group, v.load_byte(block + 66 + group)
    values = _iq2_s(
        v.load_byte(place) | (high & 3) << 8,
        v.load_byte(place + 1) | (high >> 2 & 3) << 8,
        v.load_byte(place + 2) | (high >> 4 & 3) << 8,
        v.load_byte(place + 3) | (high >> 6) << 8,
    )
    scales = _two_scales(scale, v.load_byte(block + 74 + group))
    return _signed(values, v.load_u32(place + 32), scales)


def iq3_xxs(block: int, group: int) -> Any:
    """d; indices[64]; for each 32 a word of four 7-bit sign indices and a 4-bit scale."""
    scale = v.load_scale(block)
    place, word = block + 2 + 8 * group, v.load_u32(block + 66 + 4 * group)
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
    return _signed(values, _four_signs(word), v.splat(group_scale))


def iq3_s(block: int, group: int) -> Any:
    """d; low bytes of indices[64]; their high bits[8]; signs[32]; 4-bit scales[8]."""
    scale = v.load_scale(block)
    place, high = block + 2 + 8 * group, v.load_byte(block + 66 + group)
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
    bits = v.load_byte(block + 106 + group // 2) >> (group % 2 * 4) & 15
    group_scale = scale * v.as_float(1 + 2 * bits)
    return _signed(values, v.load_u32(block + 74 + 4 * group), v.splat(group_scale))


def iq1_s(block: int, group: int) -> Any:
    """d; low bytes of indices[32]; words[8]: four times 3 high bits, a scale, a shift."""
    scale = v.load_scale(block)
    place, word = block + 2 + 4 * group, v.load_u16(block + 34 + 2 * group)
    values = _iq1(
        v.load_byte(place) | (word & 7) << 8,
        v.load_byte(place + 1) | (word >> 3 & 7) << 8,
        v.load_byte(place + 2) | (word >> 6 & 7) << 8,
        v.load_byte(place + 3) | (word >> 9 & 7) << 8,
    )
    shifted = v.from_signed(values) + v.splat(_shift(word >> 15))
    group_scale = v.splat(scale * v.as_float(2 * (word >> 12 & 7) + 1))
    return shifted * group_scale


def iq1_m(block: int, group: int) -> Any:
    """Low bytes of indices[32]; nibbles[32]: three high bits and a shift's sign; words[4].

    A word has four 3-bit scales, each of 16 values, and above them a quarter of d.
    """
    bits = v.load_u16(block + 48) >> 12 | (v.load_u16(block + 50) >> 12) << 4
    bits |= (v.load_u16(block + 52) >> 12) << 8 | (v.load_u16(block + 54) >> 12) << 12
    scale = _half_from_bits(bits)
    place, high = block + 4 * group, v.load_u16(block + 32 + 2 * group)
    values = _iq1(
        v.load_byte(place) | (high & 7) << 8,
        v.load_byte(place + 1) | (high >> 4 & 7) << 8,
        v.load_byte(place + 2) | (high >> 8 & 7) << 8,
        v.load_byte(place + 3) | (high >> 12 & 7) << 8,
    )
    shifts = _splat_quarters(
        _shift(high >> 3 & 1),
        _shift(high >> 7 & 1),
        _shift(high >> 11 & 1),
        _shift(high >> 15),
    )
    scales = v.load_u16(block + 48 + group // 2 * 2) >> (group % 2 * 6)
    first = scale * v.as_float(2 * (scales & 7) + 1)
    second = scale * v.as_float(2 * (scales >> 3 & 7) + 1)
    shifted = v.from_signed(values) + shifts
    return shifted * v.splat_halves(first, second)


@helper
def _shift(sign: int) -> float:
    """What the IQ1 types add to all values of an entry."""
    shift: float = v.as_float(1 - 2 * sign) * _EIGHTH
    return shift


@helper
def _four_signs(word: int) -> int:
    """32 sign bits from four 7-bit indices."""
    low = _with_parity(word & 127) | _with_parity(word >> 7 & 127) << 8
    high = _with_parity(word >> 14 & 127) | _with_parity(word >> 21 & 127) << 8
    signs: int = low | high << 16
    return signs


@helper
def _two_scales(scale: float, packed: int) -> Any:
    """The two 4-bit scales of 16 values each of some IQ2 types."""
    first = scale * (_HALF + v.as_float(packed & 15)) * _QUARTER
    second = scale * (_HALF + v.as_float(packed >> 4)) * _QUARTER
    return v.splat_halves(first, second)


@helper
def _signed(values: Any, signs: int, scales: Any) -> Any:
    """Values times scales, negated where the sign bit is set."""
    factors = v.splat(v.as_float(1)) - v.from_unsigned(v.bit_lanes(signs) << 1)
    return v.from_signed(values) * scales * factors
