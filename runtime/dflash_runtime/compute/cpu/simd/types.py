"""Numba types of vectors of 32 lanes, their operators, and functions that emit LLVM instructions.

`primitive` turns a function that emits instructions into one that kernels can call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from dflash_runtime.compute.cpu.simd.instruction_sets import host_cpu, prefetch_level
from dflash_runtime.compute.cpu.simd.untyped import (
    cgutils,
    ir,
    lower_builtin,
    models,
    register_model,
    signature,
    templates,
    types,
)

LANES = 32

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, FLOAT, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()

Emitter = Callable[..., Any]


def lanes_of(element: Any, lanes: int = LANES) -> Any:
    """The LLVM type of a vector of `lanes` elements."""
    return ir.VectorType(element, lanes)


class VectorType(types.Type):  # type: ignore[misc]
    """A numba type that is one LLVM vector."""

    def __init__(self, name: str, element: Any, count: int = LANES) -> None:
        super().__init__(name=name)
        self.llvm_type = lanes_of(element, count)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector_type: VectorType) -> None:
        super().__init__(manager, vector_type, vector_type.llvm_type)


floats = VectorType("float32x32", FLOAT)
doubles = VectorType("float64x32", DOUBLE)
unsigned = VectorType("uint8x32", I8)

f32, f64, i64, void = types.float32, types.float64, types.int64, types.void


def define(
    key: Any, result: Any, arguments: tuple[Any, ...], emit: Emitter, *, extends: bool = True
) -> None:
    """Add a signature to a function that numba knows (`extends`), or define a new function."""
    name = getattr(key, "__name__", str(key))
    cases = [signature(result, *arguments)]
    template = type(name, (templates.ConcreteTemplate,), {"key": key, "cases": cases})
    if extends:
        templates.infer_global(key)(template)
    else:
        templates.infer_global(key, types.Function(template))

    @lower_builtin(key, *arguments)  # type: ignore[untyped-decorator]
    def lower(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        del sig
        value = emit(builder, *values)
        return context.get_dummy_value() if result is void else value


def primitive(result: Any, *arguments: Any) -> Callable[[Emitter], Callable[..., Any]]:
    """Turn ``emit(builder, *values) -> value`` into a function that kernels can call."""

    def register(emit: Emitter) -> Callable[..., Any]:
        def only_in_kernels(*values: Any) -> Any:
            raise NotImplementedError(f"{emit.__name__} exists in compiled kernels only")

        only_in_kernels.__name__ = emit.__name__
        only_in_kernels.__doc__ = emit.__doc__
        define(only_in_kernels, result, arguments, emit, extends=False)
        return only_in_kernels

    return register


# -- emitting -------------------------------------------------------------------------------------


def emit_load(builder: Any, address: Any, element: Any) -> Any:
    # Blocks are packed: nothing in a row is aligned to more than a byte.
    value = builder.load(builder.inttoptr(address, element.as_pointer()))
    value.align = 1
    return value


def emit_halves(builder: Any, address: Any, count: int = LANES) -> Any:
    """Halves as float32."""
    bits = emit_load(builder, address, lanes_of(I16, count))
    return builder.fpext(builder.bitcast(bits, lanes_of(HALF, count)), lanes_of(FLOAT, count))


def emit_bfloats(builder: Any, bits: Any) -> Any:
    """Bits of bfloat16, one number or a vector, as float32."""
    many = isinstance(bits.type, ir.VectorType)
    word, number = (lanes_of(each, bits.type.count) if many else each for each in (I32, FLOAT))
    shifted = builder.shl(builder.zext(bits, word), emit_constant(word, 16))
    return builder.bitcast(shifted, number)


def emit_store(builder: Any, address: Any, value: Any) -> None:
    stored = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    stored.align = 1


def emit_prefetch(builder: Any, address: Any) -> None:
    """Prefetch one cache line, into the cache that suits this CPU; any address is allowed."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    to_read, locality, data = I32(0), I32(4 - prefetch_level(host_cpu())), I32(1)
    emit_named(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, to_read, locality, data)


def emit_named(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call an LLVM intrinsic or C function by name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def emit_call(builder: Any, result: Any, function: Any, arguments: Sequence[Any]) -> Any:
    """Call a function by its address."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    suffix = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
    return emit_named(builder, f"llvm.fma.{suffix}", a.type, a, b, c)


def emit_join(builder: Any, low: Any, high: Any) -> Any:
    """Concatenate two vectors."""
    return emit_shuffle(builder, low, high, list(range(2 * low.type.count)))


def emit_shuffle(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    """Lanes by index into `a` followed by `b`."""
    return builder.shuffle_vector(a, b, ir.Constant(lanes_of(I32, len(order)), order))


def emit_splat(builder: Any, scalar: Any, count: int = LANES) -> Any:
    undefined = ir.Constant(lanes_of(scalar.type, count), ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return emit_shuffle(builder, first, undefined, [0] * count)


def emit_constant(vector: Any, value: Any) -> Any:
    """`value` in every lane, or a scalar."""
    if isinstance(vector, ir.VectorType):
        return ir.Constant(vector, [value] * vector.count)
    return ir.Constant(vector, value)


# -- operators ------------------------------------------------------------------------------------


def _byte_operator(key: Any, method: str) -> None:
    def with_bytes(builder: Any, a: Any, b: Any) -> Any:
        return getattr(builder, method)(a, b)

    def with_scalar(builder: Any, a: Any, b: Any) -> Any:
        return getattr(builder, method)(a, emit_splat(builder, builder.trunc(b, I8)))

    define(key, unsigned, (unsigned, unsigned), with_bytes)
    define(key, unsigned, (unsigned, i64), with_scalar)


def _float_operator(key: Any, method: str) -> None:
    def emit(builder: Any, a: Any, b: Any) -> Any:
        return getattr(builder, method)(a, b)

    define(key, floats, (floats, floats), emit)


_float_operator(operator.add, "fadd")
_float_operator(operator.sub, "fsub")
_float_operator(operator.mul, "fmul")
_float_operator(operator.truediv, "fdiv")
_byte_operator(operator.and_, "and_")
_byte_operator(operator.or_, "or_")
_byte_operator(operator.rshift, "lshr")
_byte_operator(operator.lshift, "shl")
