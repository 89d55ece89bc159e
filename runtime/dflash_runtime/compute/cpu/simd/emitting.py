"""LLVM vectors with Python's operators, for code that is unrolled while compiling.

A `Vec` wraps an LLVM value of one builder: ``(packed >> 4) & 15`` emits the two instructions.
Numbers are broadcast to all lanes.
"""

from __future__ import annotations

from typing import Any

from dflash_runtime.compute.cpu.simd.instruction_sets import Tier
from dflash_runtime.compute.cpu.simd.types import (
    FLOAT,
    HALF,
    I8,
    I16,
    I32,
    emit_constant,
    emit_fma,
    emit_load,
    emit_named,
    emit_prefetch,
    emit_shuffle,
    emit_splat,
    emit_store,
    lanes_of,
)
from dflash_runtime.compute.cpu.simd.untyped import ir

NUM_ROWS = 16
"""Rows multiplied side by side: those of a repacked tile."""


class Vec:
    """A vector or scalar of one builder."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder = builder
        self.value = value

    def _other(self, other: Vec | float | list[int]) -> Any:
        if isinstance(other, Vec):
            return other.value
        kind = self.value.type
        if isinstance(other, list):
            return ir.Constant(kind, other)
        return emit_constant(kind, other)

    def _apply(self, method: str, other: Vec | float | list[int]) -> Vec:
        return Vec(self.builder, getattr(self.builder, method)(self.value, self._other(other)))

    @property
    def _is_float(self) -> bool:
        kind = self.value.type
        return bool((kind.element if isinstance(kind, ir.VectorType) else kind) == FLOAT)

    def __add__(self, other: Vec | float) -> Vec:
        return self._apply("fadd" if self._is_float else "add", other)

    def __sub__(self, other: Vec | float) -> Vec:
        return self._apply("fsub" if self._is_float else "sub", other)

    def __mul__(self, other: Vec | float) -> Vec:
        return self._apply("fmul" if self._is_float else "mul", other)

    def __and__(self, other: Vec | int | list[int]) -> Vec:
        return self._apply("and_", other)

    def __or__(self, other: Vec | int) -> Vec:
        return self._apply("or_", other)

    def __xor__(self, other: Vec | int) -> Vec:
        return self._apply("xor", other)

    def __rshift__(self, other: Vec | int) -> Vec:
        """Logical: elements are unsigned."""
        return self._apply("lshr", other)

    def __lshift__(self, other: Vec | int) -> Vec:
        return self._apply("shl", other)

    def arithmetic_shift(self, bits: int) -> Vec:
        """Shift right, keeping the sign."""
        return self._apply("ashr", bits)

    def maximum(self, other: Vec) -> Vec:
        """Maximum of signed integers."""
        is_greater = self.builder.icmp_signed(">", self.value, other.value)
        return Vec(self.builder, self.builder.select(is_greater, self.value, other.value))

    def times_plus(self, factor: Vec, summand: Vec) -> Vec:
        """``self * factor + summand``, rounded once."""
        return Vec(self.builder, emit_fma(self.builder, self.value, factor.value, summand.value))

    def to_float(self) -> Vec:
        """Signed integers as float32; also right for unsigned ones below 2^31."""
        return Vec(self.builder, self.builder.sitofp(self.value, self._like(FLOAT)))

    def half_to_float(self) -> Vec:
        """The low 16 bits of each element, read as a half."""
        bits = self.value
        if bits.type != self._like(I16):
            bits = self.builder.trunc(bits, self._like(I16))
        halves = self.builder.bitcast(bits, self._like(HALF))
        return Vec(self.builder, self.builder.fpext(halves, self._like(FLOAT)))

    def bits_to_float(self) -> Vec:
        """Reinterpret 32 bits as float32."""
        return Vec(self.builder, self.builder.bitcast(self.value, self._like(FLOAT)))

    def splat(self, count: int) -> Vec:
        """Broadcast a scalar to `count` lanes."""
        return Vec(self.builder, emit_splat(self.builder, self.value, count))

    def take(self, order: list[int]) -> Vec:
        """Shuffle: lanes by index."""
        return Vec(self.builder, emit_shuffle(self.builder, self.value, self.value, order))

    def as_type(self, kind: Any) -> Vec:
        """Bitcast."""
        return Vec(self.builder, self.builder.bitcast(self.value, kind))

    def store(self, address: Vec) -> None:
        """Store to memory of any alignment."""
        emit_store(self.builder, address.value, self.value)

    def _like(self, element: Any) -> Any:
        kind = self.value.type
        return lanes_of(element, kind.count) if isinstance(kind, ir.VectorType) else element


def load(address: Vec, kind: Any) -> Vec:
    """Load from memory of any alignment."""
    return Vec(address.builder, emit_load(address.builder, address.value, kind))


def constant(builder: Any, kind: Any, value: float) -> Vec:
    """The same number in all lanes."""
    return Vec(builder, emit_constant(kind, value))


def join(a: Vec, b: Vec) -> Vec:
    """Concatenate two vectors."""
    order = list(range(2 * a.value.type.count))
    return Vec(a.builder, emit_shuffle(a.builder, a.value, b.value, order))


def shuffle(a: Vec, b: Vec, order: list[int]) -> Vec:
    """Lanes by index into `a` followed by `b`."""
    return Vec(a.builder, emit_shuffle(a.builder, a.value, b.value, order))


def where(test: Vec, then: Vec, otherwise: Vec) -> Vec:
    """Lanes of `then` where those of `test` are nonzero, else of `otherwise`."""
    builder = test.builder
    zero = ir.Constant(test.value.type, None)
    is_set = builder.icmp_unsigned("!=", test.value, zero)
    return Vec(builder, builder.select(is_set, then.value, otherwise.value))


def look_up(indices: Vec, table: list[int], tier: Tier) -> Vec:
    """Replace each byte, 0 … 15, by that entry of a table of bytes."""
    name, width = _byte_shuffle(tier)
    if not name:
        return _look_up_one_by_one(indices, table)
    builder, kind = indices.builder, lanes_of(I8, width)
    entries = ir.Constant(kind, table * (width // 16))
    parts = []
    for first in range(0, indices.value.type.count, width):
        part = indices.take(list(range(first, first + width))).value
        parts.append(Vec(builder, emit_named(builder, name, kind, entries, part)))
    while len(parts) > 1:
        parts = [join(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _byte_shuffle(tier: Tier) -> tuple[str, int]:
    """The intrinsic that shuffles bytes within 16, and how many bytes it takes."""
    if tier.has_wide_registers:
        return "llvm.x86.avx512.pshuf.b.512", 64
    if tier in (Tier.AVX_VNNI, Tier.AVX2):
        return "llvm.x86.avx2.pshuf.b", 32
    return ("llvm.aarch64.neon.tbl1.v16i8", 16) if tier is Tier.NEON_DOT else ("", 0)


def _look_up_one_by_one(indices: Vec, table: list[int]) -> Vec:
    """Works on any CPU; LLVM makes a byte shuffle of it where it can."""
    builder, count = indices.builder, indices.value.type.count
    entries = ir.Constant(lanes_of(I8, 16), table)
    found = ir.Constant(indices.value.type, ir.Undefined)
    for lane in range(count):
        index = builder.extract_element(indices.value, I32(lane))
        entry = builder.extract_element(entries, index)
        found = builder.insert_element(found, entry, I32(lane))
    return Vec(builder, found)


def prefetch(address: Vec) -> None:
    """Prefetch one cache line; any address is allowed."""
    emit_prefetch(address.builder, address.value)


def keep_order(builder: Any) -> None:
    """A compiler barrier: reads and prefetches are not moved across it."""
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
