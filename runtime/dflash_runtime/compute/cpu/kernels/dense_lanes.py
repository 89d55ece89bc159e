"""Vector primitives of rotary embedding and of routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_runtime.compute.cpu.simd.types import (
    I32,
    I64,
    LANES,
    emit_constant,
    emit_shuffle,
    emit_splat,
    emit_store,
    f32,
    f64,
    floats,
    i64,
    lanes_of,
    primitive,
    void,
)
from dflash_runtime.compute.cpu.simd.untyped import ir


def _shuffled(order: list[int]) -> Callable[..., Any]:
    @primitive(floats, floats, floats)
    def shuffled(builder: Any, a: Any, b: Any) -> Any:
        return emit_shuffle(builder, a, b, order)

    return shuffled


even_lanes = _shuffled(list(range(0, 2 * LANES, 2)))
odd_lanes = _shuffled(list(range(1, 2 * LANES, 2)))
zip_low = _shuffled([lane + part for lane in range(LANES // 2) for part in (0, LANES)])
zip_high = _shuffled([lane + part for lane in range(LANES // 2, LANES) for part in (0, LANES)])


@primitive(floats, floats, i64, f32)
def pad(builder: Any, lanes: Any, count: Any, padding: Any) -> Any:
    """Keep the first `count` lanes, all if `count` is larger; `padding` in the others."""
    numbers = ir.Constant(lanes_of(I64), list(range(LANES)))
    is_kept = builder.icmp_signed("<", numbers, emit_splat(builder, count))
    return builder.select(is_kept, lanes, emit_splat(builder, padding))


@primitive(floats, floats, i64)
def with_one(builder: Any, lanes: Any, index: Any) -> Any:
    """Set the lane `index` to 1."""
    numbers = ir.Constant(lanes_of(I32), list(range(LANES)))
    is_it = builder.icmp_signed("==", numbers, emit_splat(builder, builder.trunc(index, I32)))
    return builder.select(is_it, emit_constant(lanes.type, 1.0), lanes)


@primitive(floats, floats, f32)
def flush_tiny(builder: Any, lanes: Any, smallest: Any) -> Any:
    """Replace values closer to 0 than `smallest` by 0. NaNs stay."""
    limit = emit_splat(builder, smallest)
    is_below = builder.fcmp_ordered("<", lanes, limit)
    is_above = builder.fcmp_ordered(">", lanes, builder.fneg(limit))
    return builder.select(builder.and_(is_below, is_above), emit_constant(lanes.type, 0.0), lanes)


@primitive(i64, floats, f32)
def first_equal(builder: Any, lanes: Any, value: Any) -> Any:
    """Index of the first lane equal to `value`, or LANES."""
    is_equal = builder.fcmp_ordered("==", lanes, emit_splat(builder, value))
    bits = builder.zext(builder.bitcast(is_equal, ir.IntType(LANES)), I64)
    # The bit above the lanes is found if no lane matches.
    found = builder.or_(bits, I64(1 << LANES))
    return builder.cttz(found, ir.IntType(1)(1))


@primitive(f64, i64)
def double_from_bits(builder: Any, bits: Any) -> Any:
    return builder.bitcast(bits, ir.DoubleType())


@primitive(i64, f64)
def bits_of_double(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, I64)


@primitive(void, i64, i64)
def store_i32(builder: Any, address: Any, value: Any) -> None:
    emit_store(builder, address, builder.trunc(value, I32))
