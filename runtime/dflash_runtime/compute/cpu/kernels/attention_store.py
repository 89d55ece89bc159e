"""Writes new keys and values into a cache, in the layout that attention_tiles reads."""

from __future__ import annotations

from typing import Any

from dflash_runtime.compute.cpu.compile.compiling import helper
from dflash_runtime.compute.cpu.kernels.attention_tiles import ELEMENTS
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import (
    FLOAT,
    HALF,
    I8,
    I16,
    I64,
    LANES,
    emit_named,
    emit_shuffle,
    emit_splat,
    emit_store,
    floats,
    i64,
    lanes_of,
    void,
)
from dflash_runtime.compute.cpu.simd.untyped import cgutils, intrinsic, ir
from dflash_runtime.compute.kv_cache import KvType

_HALVES, _BYTES = ELEMENTS[KvType.F16], ELEMENTS[KvType.Q8_0]


def _as_half_bits(builder: Any, value: Any) -> Any:
    """Round float32, one number or a vector, to half precision, nearest even; returns the bits."""
    many = isinstance(value.type, ir.VectorType)
    halves = builder.fptrunc(value, lanes_of(HALF) if many else HALF)
    return builder.bitcast(halves, lanes_of(I16) if many else I16)


def _quantise(builder: Any, lanes: Any) -> tuple[Any, Any]:
    """The scale as bits of a half, and signed bytes: lanes / scale rounded to nearest even.

    Source: ggml, block_q8_0: scale = largest magnitude / 127, rounded after it has been used.
    """
    size = emit_named(builder, "llvm.fabs.v32f32", lanes.type, lanes)
    width = LANES
    while width > 1:
        width //= 2
        low = emit_shuffle(builder, size, size, list(range(width)))
        high = emit_shuffle(builder, size, size, list(range(width, 2 * width)))
        size = builder.select(builder.fcmp_ordered(">", low, high), low, high)
    largest = builder.extract_element(size, I64(0))
    scale = builder.fdiv(largest, ir.Constant(FLOAT, 127.0))
    bits = _as_half_bits(builder, scale)
    # With a stored scale of 0 the bytes do not matter, and dividing by the scale might overflow.
    is_zero = builder.icmp_unsigned("==", bits, I16(0))
    inverse = builder.fdiv(ir.Constant(FLOAT, 1.0), scale)
    inverse = builder.select(is_zero, ir.Constant(FLOAT, 0.0), inverse)
    scaled = builder.fmul(lanes, emit_splat(builder, inverse))
    nearest = emit_named(builder, "llvm.rint.v32f32", lanes.type, scaled)
    return bits, builder.fptosi(nearest, lanes_of(I8))


@intrinsic  # type: ignore[untyped-decorator]
def _store_value_block(typing_context: Any, element: Any, address: Any, lanes: Any) -> Any:
    """32 elements of a row of values."""
    del typing_context, address, lanes

    def emit(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        del sig
        _, address, lanes = arguments
        if element == _BYTES:
            scale, lanes = _quantise(builder, lanes)
            emit_store(builder, address, scale)
            address = builder.add(address, I64(2))
        elif element == _HALVES:
            lanes = _as_half_bits(builder, lanes)
        emit_store(builder, address, lanes)
        return context.get_dummy_value()

    return void(element, i64, floats), emit


@intrinsic  # type: ignore[untyped-decorator]
def _store_key_block(
    typing_context: Any,
    element: Any,
    keys: Any,
    dim: Any,
    position: Any,
    first_d: Any,
    lanes: Any,
    count: Any,
) -> Any:
    """`count` elements, from `first_d` (a multiple of 32) on, of one of a block's 32 keys."""
    del typing_context, keys, dim, position, first_d, lanes, count

    def emit(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        del sig
        _, keys, dim, position, first_d, lanes, count = arguments
        size = 4
        if element == _BYTES:
            size = 1
            scale, lanes = _quantise(builder, lanes)
            steps = builder.lshr(builder.add(dim, I64(LANES - 1)), I64(5))
            scales = builder.add(keys, builder.mul(steps, I64(LANES * LANES)))
            place = builder.add(scales, builder.mul(first_d, I64(2)))
            emit_store(builder, builder.add(place, builder.mul(position, I64(2))), scale)
        elif element == _HALVES:
            size = 2
            lanes = _as_half_bits(builder, lanes)
        buffer = cgutils.alloca_once(builder, lanes.type)
        builder.store(lanes, buffer)
        first = builder.bitcast(buffer, lanes.type.element.as_pointer())
        column = builder.add(keys, builder.mul(position, I64(size)))
        with cgutils.for_range(builder, count) as loop:
            value = builder.load(builder.gep(first, [loop.index]))
            d = builder.add(first_d, loop.index)
            emit_store(builder, builder.add(column, builder.mul(d, I64(size * LANES))), value)
        return context.get_dummy_value()

    return void(element, i64, i64, i64, i64, floats, i64), emit


@helper
def _load(address: int, count: int) -> Any:
    if count >= 32:
        return v.load_floats(address)
    return v.load_padded(address, count)


def store_key(element: Any, source: int, dim: int, block: int, position: int) -> None:
    """Store a float32 key as one of a block's 32."""
    for d in range(0, dim, 32):
        count = min(32, dim - d)
        _store_key_block(element, block, dim, position, d, _load(source + 4 * d, count), count)


def store_values(element: Any, source: int, dim: int, row: int, block_bytes: int) -> None:
    """Store a float32 row of values."""
    for d in range(0, dim, 32):
        _store_value_block(element, row, _load(source + 4 * d, min(32, dim - d)))
        row += block_bytes
