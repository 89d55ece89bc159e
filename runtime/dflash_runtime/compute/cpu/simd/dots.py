"""Dot products of bytes for several rows side by side, with the instructions of a tier.

All sums are exact integers, so every tier has the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_runtime.compute.cpu.simd.emitting import NUM_ROWS, Vec, constant, join
from dflash_runtime.compute.cpu.simd.instruction_sets import Tier
from dflash_runtime.compute.cpu.simd.types import I8, I16, I32, emit_named, lanes_of
from dflash_runtime.compute.cpu.simd.untyped import ir, llvm

LARGEST_X = 127
"""Largest magnitude of the signed bytes that quants are multiplied by: -128 does not occur."""

VPDPBUSD_512 = "llvm.x86.avx512.vpdpbusd.512"
VPDPBUSD_256 = "llvm.x86.avx512.vpdpbusd.256"
SDOT = "llvm.aarch64.neon.sdot.v4i32.v16i8"

_VPDPBUSD_TAKES_BYTES_SINCE = 21  # LLVM's major version; earlier ones take the same bits as words

_FULL_BYTE_BITS = 8


@dataclass(frozen=True, slots=True)
class Quants:
    """The range of the bytes on the left, which decides how they can be multiplied."""

    bits: int
    """Unsigned and below ``2 ** bits``."""

    def is_signed(self, tier: Tier) -> bool:
        """Whether full bytes are stored signed, as ``quant - 128``: the tier multiplies only
        those."""
        return self.bits == _FULL_BYTE_BITS and not tier.has_vpdpbusd

    def representative(self, tier: Tier) -> Quants:
        """One representative of all quants that a tier multiplies in the same way."""
        if tier.has_vpdpbusd:
            return Quants(_FULL_BYTE_BITS)
        if tier is Tier.NEON_DOT:
            return Quants(max(self.bits, _FULL_BYTE_BITS - 1))
        return self

    @property
    def pairs_in_a_short(self) -> int:
        """How many sums of two products fit a signed 16-bit integer."""
        largest = 128 if self.bits == _FULL_BYTE_BITS else (1 << self.bits) - 1
        return (1 << 15) // (2 * LARGEST_X * largest)


class Dots:
    """``sums[row] += sum over i < 4 of weights[4 row + i] * x[4 row + i]``, step by step."""

    def __init__(self, builder: Any, tier: Tier, quants: Quants, num_rows: int = NUM_ROWS) -> None:
        self._tier = tier
        self._signed = quants.is_signed(tier)
        self._sums = constant(builder, lanes_of(I32, num_rows), 0)
        self._shorts: Vec | None = None
        self._num_in_shorts = 0
        self._most_in_shorts = quants.pairs_in_a_short

    def add(self, weights: Vec, x: Vec) -> None:
        """Add one step of k. Shapes: weights, x: four bytes of each row."""
        if self._tier.has_wide_registers:
            self._sums = _by_parts(16, _vpdpbusd_512, self._sums, weights, x)
        elif self._tier is Tier.AVX_VNNI:
            self._sums = _by_parts(8, _vpdpbusd_256, self._sums, weights, x)
        elif self._tier is Tier.NEON_DOT:
            self._sums = _by_parts(4, _sdot, self._sums, weights, x)
        else:
            self._add_pairs(weights, x)

    def total(self) -> Vec:
        """The sums, one word a row."""
        self._empty_shorts()
        return self._sums

    def _add_pairs(self, weights: Vec, x: Vec) -> None:
        """Sums of two products have 16 bits: as many are added as are sure not to overflow."""
        if self._tier is Tier.AVX2:
            multiply = _signed_pairs_avx2 if self._signed else _pairs_avx2
            pairs = _by_parts(8, multiply, weights, x)
        else:
            pairs = _pairs(weights, x, signed=self._signed)
        self._shorts = pairs if self._shorts is None else self._shorts + pairs
        self._num_in_shorts += 1
        if self._num_in_shorts == self._most_in_shorts:
            self._empty_shorts()

    def _empty_shorts(self) -> None:
        if self._shorts is not None:
            is_avx2 = self._tier is Tier.AVX2
            words = _by_parts(8, _widened_avx2, self._shorts) if is_avx2 else _widened(self._shorts)
            self._sums = self._sums + words
        self._shorts, self._num_in_shorts = None, 0


def _by_parts(num_rows: int, function: Callable[..., Vec], *vectors: Vec) -> Vec:
    """Apply the function to `num_rows` rows at a time: as many as the CPU's vectors hold."""
    num_parts = _bits(vectors[0]) // (32 * num_rows)
    results = [
        function(*(_part(each, at, num_parts) for each in vectors)) for at in range(num_parts)
    ]
    while len(results) > 1:
        results = [join(a, b) for a, b in zip(results[::2], results[1::2], strict=True)]
    return results[0]


def _bits(vector: Vec) -> int:
    kind = vector.value.type
    return int(kind.count * kind.element.width)


def _part(vector: Vec, index: int, num_parts: int) -> Vec:
    size = vector.value.type.count // num_parts
    return vector.take(list(range(size * index, size * (index + 1)))) if num_parts > 1 else vector


def _vpdpbusd_512(sums: Vec, weights: Vec, x: Vec) -> Vec:
    return _vpdpbusd(VPDPBUSD_512, sums, weights, x)


def _vpdpbusd_256(sums: Vec, weights: Vec, x: Vec) -> Vec:
    return _vpdpbusd(VPDPBUSD_256, sums, weights, x)


def _vpdpbusd(name: str, sums: Vec, weights: Vec, x: Vec) -> Vec:
    if llvm.llvm_version_info[0] < _VPDPBUSD_TAKES_BYTES_SINCE:
        weights, x = (each.as_type(sums.value.type) for each in (weights, x))
    return _call(name, sums.value.type, sums, weights, x)


def _sdot(sums: Vec, weights: Vec, x: Vec) -> Vec:
    return _call(SDOT, sums.value.type, sums, weights, x)


def _call(name: str, result: Any, *arguments: Vec) -> Vec:
    builder = arguments[0].builder
    return Vec(builder, emit_named(builder, name, result, *(each.value for each in arguments)))


def _pairs_avx2(weights: Vec, x: Vec) -> Vec:
    """Sums of neighbouring products."""
    return _call("llvm.x86.avx2.pmadd.ub.sw", lanes_of(I16, 16), weights, x)


def _signed_pairs_avx2(weights: Vec, x: Vec) -> Vec:
    """The instruction multiplies unsigned by signed bytes: the sign is moved to one side."""
    builder, bytes_ = weights.builder, lanes_of(I8, 32)
    magnitudes = emit_named(builder, "llvm.abs.v32i8", bytes_, weights.value, ir.IntType(1)(0))
    signed_x = _call("llvm.x86.avx2.psign.b", bytes_, x, weights)
    return _pairs_avx2(Vec(builder, magnitudes), signed_x)


def _widened_avx2(shorts: Vec) -> Vec:
    """Sums of neighbours, widened to 32 bits."""
    ones = constant(shorts.builder, lanes_of(I16, 16), 1)
    return _call("llvm.x86.avx2.pmadd.wd", lanes_of(I32, 8), shorts, ones)


def _pairs(weights: Vec, x: Vec, *, signed: bool) -> Vec:
    """Sums of the products of even bytes and their odd neighbours, in plain IR."""
    kind = lanes_of(I16, weights.value.type.count // 2)
    a, b = (each.as_type(kind) for each in (weights, x))
    even = (a << 8).arithmetic_shift(8) if signed else a & 255
    odd = a.arithmetic_shift(8) if signed else a >> 8
    return even * (b << 8).arithmetic_shift(8) + odd * b.arithmetic_shift(8)


def _widened(shorts: Vec) -> Vec:
    words = shorts.as_type(lanes_of(I32, shorts.value.type.count // 2))
    return (words << 16).arithmetic_shift(16) + words.arithmetic_shift(16)
