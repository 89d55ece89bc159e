"""Loads, stores and calls through plain integer addresses; callers have checked the bounds."""

from __future__ import annotations

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
    emit_constant,
    emit_join,
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


def emit_load(builder: Any, address: Any, element: Any) -> Any:
    # Blocks are packed: nothing in a row is aligned to more than a byte.
    value = builder.load(builder.inttoptr(address, element.as_pointer()))
    value.align = 1
    return value


def emit_store(builder: Any, address: Any, value: Any) -> None:
    stored = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    stored.align = 1


def _bfloat_to_float(builder: Any, bits: Any, element: Any, result: Any) -> Any:
    shifted = builder.shl(builder.zext(bits, element), emit_constant(element, 16))
    return builder.bitcast(shifted, result)


@intrinsic  # type: ignore[untyped-decorator]
def address_of(typing_context: Any, array: Any) -> Any:
    """Address of an array's first element; the kernel's caller keeps the array alive."""
    del typing_context

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, values[0]).data
        return builder.ptrtoint(data, I64)

    return i64(array), emit


def _load_floats(builder: Any, address: Any) -> Any:
    return emit_load(builder, address, lanes_of(FLOAT))


def _load_halves(builder: Any, address: Any) -> Any:
    bits = emit_load(builder, address, lanes_of(I16))
    return builder.fpext(builder.bitcast(bits, lanes_of(HALF)), lanes_of(FLOAT))


load_floats = primitive(floats, i64)(_load_floats)
load_halves = primitive(floats, i64)(_load_halves)


@primitive(floats, i64, i64)
def load_padded(builder: Any, address: Any, count: Any) -> Any:
    """The first `count` lanes from memory, zeros in the others; no byte beyond them is read."""
    buffer = cgutils.alloca_once(builder, lanes_of(FLOAT))
    builder.store(emit_constant(lanes_of(FLOAT), 0.0), buffer)
    cgutils.raw_memcpy(builder, buffer, builder.inttoptr(address, buffer.type), count, I64(4))
    return builder.load(buffer)


@primitive(floats, i64)
def load_bfloats(builder: Any, address: Any) -> Any:
    bits = emit_load(builder, address, lanes_of(I16))
    return _bfloat_to_float(builder, bits, lanes_of(I32), lanes_of(FLOAT))


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
def load_bfloat(builder: Any, address: Any) -> Any:
    return _bfloat_to_float(builder, emit_load(builder, address, I16), I32, FLOAT)


@primitive(i64, i64)
def load_byte(builder: Any, address: Any) -> Any:
    return builder.zext(emit_load(builder, address, I8), I64)


@primitive(i64, i64)
def load_signed_byte(builder: Any, address: Any) -> Any:
    return builder.sext(emit_load(builder, address, I8), I64)


@primitive(i64, i64)
def load_u16(builder: Any, address: Any) -> Any:
    return builder.zext(emit_load(builder, address, I16), I64)


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


@primitive(f64, i64)
def load_double(builder: Any, address: Any) -> Any:
    return emit_load(builder, address, DOUBLE)


@primitive(void, i64, f64)
def store_double(builder: Any, address: Any, value: Any) -> None:
    emit_store(builder, address, value)


@primitive(void, i64)
def prefetch(builder: Any, address: Any) -> None:
    """Prefetch one cache line; any address is allowed."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    name, numbers = "llvm.prefetch.p0", [I32(0), I32(3), I32(1)]
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(function, [pointer, *numbers])


@primitive(void, i64, i64, i64)
def copy_bytes(builder: Any, target: Any, source: Any, num_bytes: Any) -> None:
    target, source = (builder.inttoptr(each, I8.as_pointer()) for each in (target, source))
    cgutils.raw_memcpy(builder, target, source, num_bytes, I64(1))


@primitive(void, i64, f32)
def store_float(builder: Any, address: Any, value: Any) -> None:
    emit_store(builder, address, value)


def emit_call(builder: Any, result: Any, function: Any, arguments: list[Any]) -> Any:
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(builder.inttoptr(function, function_type.as_pointer()), arguments)


@primitive(void, i64, i64, i64, i64)
def call_expand(builder: Any, function: Any, row: Any, columns: Any, out: Any) -> None:
    """Call ``function(row, columns, out)``, which expands a row to float32."""
    emit_call(builder, ir.VoidType(), function, [row, columns, out])
