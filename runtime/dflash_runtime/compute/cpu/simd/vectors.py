"""What kernels do with vectors of 32 lanes: loads, stores, arithmetic, shuffles.

Everything is generic vector IR that LLVM lowers to whatever the CPU has. Only exactly rounded IEEE
operations, never reassociated or contracted: results have the same bits whatever the width of the
CPU's registers. Addresses are plain integers; callers have checked the bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_runtime.compute.cpu.simd.types import (
    DOUBLE,
    FLOAT,
    HALF,
    I8,
    I16,
    I32,
    I64,
    LANES,
    doubles,
    emit_bfloats,
    emit_call,
    emit_constant,
    emit_fma,
    emit_halves,
    emit_join,
    emit_load,
    emit_named,
    emit_prefetch,
    emit_shuffle,
    emit_splat,
    emit_store,
    f32,
    f64,
    floats,
    i64,
    lanes_of,
    primitive,
    unsigned,
    void,
)
from dflash_runtime.compute.cpu.simd.untyped import cgutils, intrinsic, ir

# -- memory ---------------------------------------------------------------------------------------


@intrinsic  # type: ignore[untyped-decorator]
def address_of(typing_context: Any, array: Any) -> Any:
    """Address of an array's first element; the kernel's caller keeps the array alive."""
    del typing_context

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, values[0]).data
        return builder.ptrtoint(data, I64)

    return i64(array), emit


@primitive(floats, i64)
def load_floats(builder: Any, address: Any) -> Any:
    return emit_load(builder, address, lanes_of(FLOAT))


load_halves = primitive(floats, i64)(emit_halves)


@primitive(floats, i64, i64)
def load_padded(builder: Any, address: Any, count: Any) -> Any:
    """The first `count` lanes from memory, zeros in the others; no byte beyond them is read."""
    buffer = cgutils.alloca_once(builder, lanes_of(FLOAT))
    builder.store(emit_constant(lanes_of(FLOAT), 0.0), buffer)
    cgutils.raw_memcpy(builder, buffer, builder.inttoptr(address, buffer.type), count, I64(4))
    return builder.load(buffer)


@primitive(floats, i64)
def load_bfloats(builder: Any, address: Any) -> Any:
    return emit_bfloats(builder, emit_load(builder, address, lanes_of(I16)))


def _emit_stored(builder: Any, address: Any, element: Any) -> Any:
    """Load part of a weight. LLVM may load it once for several uses, whatever is stored in between:
    weights do not change while kernels run."""
    value = emit_load(builder, address, element)
    value.set_metadata("invariant.load", builder.module.add_metadata([]))
    return value


@primitive(unsigned, i64)
def load_bytes(builder: Any, address: Any) -> Any:
    return emit_load(builder, address, lanes_of(I8))


@primitive(unsigned, i64)
def load_nibbles(builder: Any, address: Any) -> Any:
    """16 bytes: their low halves in lanes 0 … 15, their high halves in 16 … 31."""
    packed = emit_load(builder, address, lanes_of(I8, LANES // 2))
    low = builder.and_(packed, ir.Constant(packed.type, [15] * (LANES // 2)))
    high = builder.lshr(packed, ir.Constant(packed.type, [4] * (LANES // 2)))
    return emit_join(builder, low, high)


@primitive(void, i64, floats)
def store_floats(builder: Any, address: Any, values: Any) -> None:
    emit_store(builder, address, values)


@primitive(void, i64, floats, i64)
def store_partial(builder: Any, address: Any, values: Any, count: Any) -> None:
    """Store only the first `count` lanes."""
    buffer = cgutils.alloca_once(builder, lanes_of(FLOAT))
    builder.store(values, buffer)
    cgutils.raw_memcpy(builder, builder.inttoptr(address, buffer.type), buffer, count, I64(4))


@primitive(f32, i64)
def load_float(builder: Any, address: Any) -> Any:
    return emit_load(builder, address, FLOAT)


@primitive(f32, i64)
def load_half(builder: Any, address: Any) -> Any:
    return builder.fpext(builder.bitcast(emit_load(builder, address, I16), HALF), FLOAT)


@primitive(f32, i64)
def load_scale(builder: Any, address: Any) -> Any:
    """A half as `load_half`, but of a weight only, never of memory that a kernel writes."""
    bits = _emit_stored(builder, address, I16)
    return builder.fpext(builder.bitcast(bits, HALF), FLOAT)


@primitive(f32, i64)
def load_bfloat(builder: Any, address: Any) -> Any:
    return emit_bfloats(builder, emit_load(builder, address, I16))


@primitive(i64, i64)
def load_byte(builder: Any, address: Any) -> Any:
    return builder.zext(emit_load(builder, address, I8), I64)


@primitive(i64, i64)
def load_signed_byte(builder: Any, address: Any) -> Any:
    return builder.sext(emit_load(builder, address, I8), I64)


@primitive(i64, i64)
def load_u16(builder: Any, address: Any) -> Any:
    """Of a weight only, never of memory that a kernel writes."""
    return builder.zext(_emit_stored(builder, address, I16), I64)


@primitive(i64, i64)
def load_u32(builder: Any, address: Any) -> Any:
    return builder.zext(emit_load(builder, address, I32), I64)


@primitive(i64, i64)
def load_i32(builder: Any, address: Any) -> Any:
    return builder.sext(emit_load(builder, address, I32), I64)


@primitive(i64, i64)
def load_i64(builder: Any, address: Any) -> Any:
    return emit_load(builder, address, I64)


@primitive(void, i64, i64)
def store_i64(builder: Any, address: Any, value: Any) -> None:
    emit_store(builder, address, value)


@primitive(void, i64, i64)
def store_i32(builder: Any, address: Any, value: Any) -> None:
    emit_store(builder, address, builder.trunc(value, I32))


@primitive(f64, i64)
def load_double(builder: Any, address: Any) -> Any:
    return emit_load(builder, address, DOUBLE)


@primitive(void, i64, f64)
def store_double(builder: Any, address: Any, value: Any) -> None:
    emit_store(builder, address, value)


prefetch = primitive(void, i64)(emit_prefetch)


@primitive(void, i64, i64, i64)
def copy_bytes(builder: Any, target: Any, source: Any, num_bytes: Any) -> None:
    target, source = (builder.inttoptr(each, I8.as_pointer()) for each in (target, source))
    cgutils.raw_memcpy(builder, target, source, num_bytes, I64(1))


@primitive(void, i64, f32)
def store_float(builder: Any, address: Any, value: Any) -> None:
    emit_store(builder, address, value)


@primitive(void, i64, i64, i64, i64)
def call_expand(builder: Any, function: Any, row: Any, columns: Any, out: Any) -> None:
    """Call ``function(row, columns, out)``, which expands a row to float32."""
    emit_call(builder, ir.VoidType(), function, [row, columns, out])


# -- arithmetic -----------------------------------------------------------------------------------


@primitive(floats)
def zeros(builder: Any) -> Any:
    del builder
    return emit_constant(lanes_of(FLOAT), 0.0)


@primitive(doubles)
def double_zeros(builder: Any) -> Any:
    del builder
    return emit_constant(lanes_of(DOUBLE), 0.0)


@primitive(floats, f32)
def splat(builder: Any, value: Any) -> Any:
    return emit_splat(builder, value)


@primitive(f32, i64)
def as_float(builder: Any, value: Any) -> Any:
    """A small integer as float32; numba's own conversion would go through float64."""
    return builder.sitofp(value, FLOAT)


@primitive(f32, i64)
def float_from_bits(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.trunc(bits, I32), FLOAT)


@primitive(i64, f32)
def bits_of_float(builder: Any, value: Any) -> Any:
    return builder.zext(builder.bitcast(value, I32), I64)


@primitive(f64, i64)
def double_from_bits(builder: Any, bits: Any) -> Any:
    return builder.bitcast(bits, DOUBLE)


@primitive(i64, f64)
def bits_of_double(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, I64)


@primitive(floats, unsigned)
def from_unsigned(builder: Any, values: Any) -> Any:
    return builder.uitofp(values, lanes_of(FLOAT))


@primitive(floats, unsigned)
def from_signed(builder: Any, values: Any) -> Any:
    return builder.sitofp(values, lanes_of(FLOAT))


@primitive(floats, f32, f32)
def splat_halves(builder: Any, low: Any, high: Any) -> Any:
    """`low` in lanes 0 … 15, `high` in 16 … 31."""
    undefined = ir.Constant(lanes_of(FLOAT), ir.Undefined)
    pair = builder.insert_element(undefined, low, I32(0))
    pair = builder.insert_element(pair, high, I32(1))
    order = [0] * (LANES // 2) + [1] * (LANES // 2)
    return emit_shuffle(builder, pair, undefined, order)


@primitive(unsigned, i64)
def bit_lanes(builder: Any, bits: Any) -> Any:
    """Lane l is bit l of a 32-bit number, as 0 or 1."""
    mask = builder.bitcast(builder.trunc(bits, I32), lanes_of(ir.IntType(1)))
    return builder.zext(mask, lanes_of(I8))


def table_lookup(table: tuple[int, ...]) -> Callable[..., Any]:
    """Make a primitive that replaces each lane, 0 … 15, by that entry of a table of signed
    bytes."""
    half = LANES // 2

    @primitive(unsigned, unsigned)
    def look_up(builder: Any, indices: Any) -> Any:
        # LLVM lowers this pattern to a byte shuffle where the CPU has one for 16 lanes.
        entries = ir.Constant(lanes_of(I8, half), list(table))
        found = []
        for first in (0, half):
            part = ir.Constant(lanes_of(I8, half), ir.Undefined)
            for lane in range(half):
                index = builder.extract_element(indices, I32(first + lane))
                entry = builder.extract_element(entries, index)
                part = builder.insert_element(part, entry, I32(lane))
            found.append(part)
        return emit_join(builder, *found)

    return look_up


fma = primitive(floats, floats, floats, floats)(emit_fma)
fma_scalar = primitive(f32, f32, f32, f32)(emit_fma)


@primitive(floats, floats)
def square_root(builder: Any, values: Any) -> Any:
    return emit_named(builder, f"llvm.sqrt.v{LANES}f32", values.type, values)


@primitive(doubles, floats, doubles)
def add_squares(builder: Any, values: Any, total: Any) -> Any:
    """``total + values²`` in float64, where the square of a float32 is exact."""
    wide = builder.fpext(values, lanes_of(DOUBLE))
    return builder.fadd(total, builder.fmul(wide, wide))


@primitive(floats, floats, floats)
def maximum(builder: Any, a: Any, b: Any) -> Any:
    """Lane by lane; a NaN in `b` stays."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@primitive(floats, floats, floats)
def minimum(builder: Any, a: Any, b: Any) -> Any:
    """Lane by lane; a NaN in `a` stays."""
    return builder.select(builder.fcmp_ordered(">", a, b), b, a)


@primitive(f64, f32)
def widen(builder: Any, value: Any) -> Any:
    return builder.fpext(value, DOUBLE)


def _shuffled(order: list[int]) -> Callable[..., Any]:
    return primitive(floats, floats, floats)(
        lambda builder, a, b: emit_shuffle(builder, a, b, order)
    )


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


def _fold(builder: Any, values: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Fold the upper half onto the lower until one lane is left."""
    width = values.type.count
    while width > 1:
        width //= 2
        lower = emit_shuffle(builder, values, values, list(range(width)))
        upper = emit_shuffle(builder, values, values, list(range(width, 2 * width)))
        values = combine(lower, upper)
    return values


def _fold_all(builder: Any, values: Any, combine: Callable[[Any, Any], Any]) -> Any:
    return builder.extract_element(_fold(builder, values, combine), I32(0))


@primitive(f32, floats)
def sum_of(builder: Any, values: Any) -> Any:
    return _fold_all(builder, values, builder.fadd)


@primitive(f64, doubles)
def sum_of_doubles(builder: Any, values: Any) -> Any:
    return _fold_all(builder, values, builder.fadd)


@primitive(f32, floats)
def largest_of(builder: Any, values: Any) -> Any:
    def larger(a: Any, b: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    return _fold_all(builder, values, larger)
