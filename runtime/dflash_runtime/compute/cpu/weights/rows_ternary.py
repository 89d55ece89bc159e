"""Rows of ternary types: TQ1_0 and TQ2_0.

A value is -1, 0 or 1 times the scale of its super-block of 256. Each function expands a row of
whole super-blocks into float32, exactly. Addresses are in bytes.

Source: block layouts of ggml (checked against the gguf package by tests).
"""

from __future__ import annotations

from typing import Any

from dflash_runtime.compute.cpu.compile.compiling import helper
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import (
    I8,
    I16,
    LANES,
    emit_constant,
    emit_join,
    emit_load,
    emit_splat,
    i64,
    lanes_of,
    primitive,
    unsigned,
)


def expand_tq1_0(row: int, columns: int, out: int) -> None:
    """bytes[32] of five digits, bytes[16] of five, bytes[4] of four; d."""
    for _ in range(columns // 256):
        scale = v.load_half(row + 52)
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


def expand_tq2_0(row: int, columns: int, out: int) -> None:
    """quants[64]: each 32 bytes hold four groups of 32; d."""
    for _ in range(columns // 256):
        scale = v.load_half(row + 64)
        for group in range(8):
            quants = v.load_bytes(row + group // 4 * 32) >> (group % 4 * 2) & 3
            _store_digits(out, quants, scale)
            out += 128
        row += 66


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
