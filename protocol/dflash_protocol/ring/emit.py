"""Primitives of the ring's kernels, as LLVM IR: loads and stores, clock, checksum, copies.

Addresses and counts are plain int64, which the kernels have checked.

The checksum: 64 lanes of 32 bits, each a chain ``s = mix(s ^ word)``, folded into 64 bits. Every
step is a bijection of the word, so a change within one 4-byte word (any flipped bit) is always
detected; mixing multiplies and shifts down, so swapped words are detected except for one in 2^32.
It detects accidents, not attacks: a process that can write the segment can write the checksum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.ir
import numba
import numba.core.cgutils
import numba.core.imputils
import numba.core.typing
import numba.core.typing.templates
import numba.extending

from dflash_protocol.ring import layout as ring

_SEED = 0x2545F4914F6CDD1D
_ODD_32 = 0x9E3779B1
_ODD_64, _ODD_64_LEFT = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_LANES = 64
_CLOCK_MONOTONIC = 1
_DRAIN_BYTES = 64

ir: Any = llvmlite.ir
types: Any = numba.types
cgutils: Any = numba.core.cgutils
templates: Any = numba.core.typing.templates
_signature: Any = getattr(numba.core.typing, "signature")  # noqa: B009
_lower_builtin: Any = numba.core.imputils.lower_builtin
_intrinsic: Any = numba.extending.intrinsic
i64, f64, void = types.int64, types.float64, types.void
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, FLOAT, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_STATE_TYPE = ir.VectorType(I32, _LANES)
helper: Any = numba.njit(nogil=True, error_model="numpy")


def primitive(result: Any, *arguments: Any) -> Callable[[Any], Any]:
    """Turn ``emit(builder, *values) -> value`` into a function that kernels can call."""

    def register(emit: Any) -> Any:
        def only_in_kernels(*values: Any) -> Any:
            raise NotImplementedError(f"{emit.__name__} exists in compiled code only")

        cases = [_signature(result, *arguments)]
        template = type(
            emit.__name__,
            (templates.ConcreteTemplate,),
            {"key": only_in_kernels, "cases": cases},
        )
        templates.infer_global(only_in_kernels, types.Function(template))

        @_lower_builtin(only_in_kernels, *arguments)  # type: ignore[untyped-decorator]
        def lower(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            del sig
            value = emit(builder, *values)
            return context.get_dummy_value() if result is void else value

        return only_in_kernels

    return register


@_intrinsic  # type: ignore[untyped-decorator]
def address_of(typing_context: Any, array: Any) -> Any:
    """Address of an array's first element; the caller keeps the array alive."""
    del typing_context

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, values[0]).data
        return builder.ptrtoint(data, I64)

    return i64(array), emit


# -- words ------------------------------------------------------------------------------------


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


@primitive(i64, i64)
def load(builder: Any, address: Any) -> Any:
    return builder.load(_pointer(builder, address, I64))


@primitive(i64, i64)
def load_int32(builder: Any, address: Any) -> Any:
    return builder.sext(builder.load(_pointer(builder, address, I32)), I64)


@primitive(void, i64, i64)
def store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, _pointer(builder, address, I64))


@primitive(void, i64, f64)
def store_time(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, _pointer(builder, address, DOUBLE))


@primitive(f64, i64)
def load_time(builder: Any, address: Any) -> Any:
    return builder.load(_pointer(builder, address, DOUBLE))


@primitive(i64, i64)
def load_acquire(builder: Any, address: Any) -> Any:
    return builder.load_atomic(_pointer(builder, address, I64), "acquire", 8)


@primitive(i64, i64)
def load_ordered(builder: Any, address: Any) -> Any:
    return builder.load_atomic(_pointer(builder, address, I64), "seq_cst", 8)


@primitive(void, i64, i64)
def store_ordered(builder: Any, address: Any, value: Any) -> None:
    """Sequentially consistent, which includes release order."""
    builder.store_atomic(value, _pointer(builder, address, I64), "seq_cst", 8)


@primitive(i64, i64, i64)
def exchange(builder: Any, address: Any, value: Any) -> Any:
    return builder.atomic_rmw("xchg", _pointer(builder, address, I64), value, "seq_cst")


@primitive(void)
def pause(builder: Any) -> None:
    """Spin-loop hint to the CPU."""
    if builder.module.triple.startswith(("aarch64", "arm64")):
        # yield does nothing on most cores; isb takes about as long as x86's pause.
        kind = ir.FunctionType(ir.VoidType(), [I32])
        builder.call(_external(builder, kind, "llvm.aarch64.isb"), [I32(15)])
    elif builder.module.triple.startswith("x86_64"):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(_external(builder, kind, "llvm.x86.sse2.pause"), [])


@primitive(i64)
def monotonic_ns(builder: Any) -> Any:
    time = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
    kind = ir.FunctionType(I32, [I32, time.type])
    function = _external(builder, kind, "clock_gettime")
    builder.call(function, [I32(_CLOCK_MONOTONIC), time])
    seconds, nanoseconds = (
        builder.load(builder.gep(time, [I32(0), I32(index)])) for index in range(2)
    )
    return builder.add(builder.mul(seconds, I64(10**9)), nanoseconds)


@primitive(void, i64, i64)
def clear(builder: Any, address: Any, num_bytes: Any) -> None:
    """Store zeros."""
    cgutils.memset(builder, _pointer(builder, address, I8), num_bytes, 0)


@primitive(void, i64, i64, i64)
def add_doubles(builder: Any, to: Any, source: Any, count: Any) -> None:
    """Add `count` elements of float64 to others."""

    def add(element: Any, first: Any, number: Any, size: int) -> None:
        with cgutils.for_range(builder, number, intp=I64) as loop:
            offset = builder.add(first, builder.mul(loop.index, I64(size)))
            places = [
                _pointer(builder, builder.add(each, offset), element) for each in (to, source)
            ]
            total = builder.fadd(*(builder.load(place, align=8) for place in places))
            builder.store(total, places[0], align=8)

    block = ir.VectorType(DOUBLE, _LANES // 8)
    num_blocks = builder.lshr(count, I64(3))
    done = builder.shl(num_blocks, I64(3))
    add(block, I64(0), num_blocks, 64)
    add(DOUBLE, builder.shl(done, I64(3)), builder.sub(count, done), 8)


@primitive(i64, i64, i64, i64)
def call(builder: Any, function: Any, first: Any, second: Any) -> Any:
    """Call ``int64 function(int64, int64)`` at an address."""
    kind = ir.FunctionType(I64, [I64, I64])
    return builder.call(_pointer(builder, function, kind), [first, second])


# -- the operating system ---------------------------------------------------------------------


@primitive(void, i64)
def ring_bell(builder: Any, bell: Any) -> None:
    """Write a byte into a pipe; if the pipe is full the bell is ringing already."""
    byte = cgutils.alloca_once_value(builder, I8(ord("!")))
    kind = ir.FunctionType(I64, [I32, byte.type, I64])
    arguments = [builder.trunc(bell, I32), byte, I64(1)]
    builder.call(_external(builder, kind, "write"), arguments)


@primitive(void, i64)
def silence_bell(builder: Any, bell: Any) -> None:
    """Read the bell's bytes. Bytes beyond one read cause a spurious wake-up."""
    room = cgutils.alloca_once(builder, I8, size=I32(_DRAIN_BYTES))
    kind = ir.FunctionType(I64, [I32, room.type, I64])
    arguments = [builder.trunc(bell, I32), room, I64(_DRAIN_BYTES)]
    builder.call(_external(builder, kind, "read"), arguments)


@primitive(i64, i64, i64, i64)
def poll(builder: Any, entries: Any, count: Any, timeout_ms: Any) -> Any:
    """poll(2): number of ready descriptors, 0 after the timeout, -1 if interrupted by a signal.

    An entry is a word: descriptor | events << 32 | returned events << 48.
    """
    address = builder.inttoptr(entries, I64.as_pointer())
    kind = ir.FunctionType(I32, [address.type, I64, I32])
    arguments = [address, count, builder.trunc(timeout_ms, I32)]
    return builder.sext(builder.call(_external(builder, kind, "poll"), arguments), I64)


def _external(builder: Any, kind: Any, name: str) -> Any:
    return cgutils.get_or_insert_function(builder.module, kind, name)


# -- checksum ---------------------------------------------------------------------------------


def _splat(vector: Any, value: Any) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def _mix_64(builder: Any, value: Any) -> Any:
    """A bijection of 64 bits, or of each lane."""

    def constant(number: int) -> Any:
        is_vector = isinstance(value.type, ir.VectorType)
        return _splat(value.type, number) if is_vector else value.type(number)

    value = builder.xor(value, builder.lshr(value, constant(32)))
    value = builder.mul(value, constant(_ODD_64))
    return builder.xor(value, builder.lshr(value, constant(29)))


@primitive(void, i64)
def start_checksum(builder: Any, state: Any) -> None:
    seeds = [(_ODD_32 * (lane + 1) ^ 0x5BD1E995) & 0xFFFFFFFF for lane in range(_LANES)]
    builder.store(ir.Constant(_STATE_TYPE, seeds), _state_pointer(builder, state))


@primitive(i64, i64, i64)
def finish_checksum(builder: Any, state: Any, header: Any) -> Any:
    """Checksum of what the state has absorbed and of a header's words before the checksum's own."""
    lanes = builder.load(_state_pointer(builder, state))
    value = builder.bitcast(lanes, ir.VectorType(I64, _LANES // 2))
    while value.type.count > 1:
        half = value.type.count // 2
        low, high = (
            builder.shuffle_vector(
                value, value, ir.Constant(ir.VectorType(I32, half), list(range(at, at + half)))
            )
            for at in (0, half)
        )
        low = builder.mul(low, _splat(low.type, _ODD_64_LEFT))
        value = _mix_64(builder, builder.xor(low, high))
    result = builder.xor(I64(_SEED), builder.extract_element(value, I32(0)))
    for word in range(ring.CHECKSUM):
        loaded = builder.load(_pointer(builder, builder.add(header, I64(8 * word)), I64))
        result = _mix_64(builder, builder.xor(result, loaded))
    return result


def _state_pointer(builder: Any, state: Any) -> Any:
    return _pointer(builder, state, _STATE_TYPE)


def _step(builder: Any, state: Any, wire: Any) -> Any:
    mixed = builder.mul(builder.xor(state, wire), _splat(_STATE_TYPE, _ODD_32))
    return builder.xor(mixed, builder.lshr(mixed, _splat(_STATE_TYPE, 15)))


# -- copies -----------------------------------------------------------------------------------


def _copier(source: Any, target: Any, convert: Any, *, from_wire: bool) -> Any:
    """Make a function (state, target, source, count) that converts `count` elements and adds their
    wire form to the checksum. Returns 1 if `convert` flags an element: one that overflowed when
    packed, or a received sum that is NaN or infinite; else 0.

    Works in blocks of one checksum step. Each element is loaded once, and that value is both stored
    and added: the other process may change the source meanwhile.
    """
    wire = source if from_wire else target
    lanes = _LANES * 4 // _bytes_of(wire)
    source_block, target_block = ir.VectorType(source, lanes), ir.VectorType(target, lanes)

    @primitive(i64, i64, i64, i64, i64)
    def copy(builder: Any, state: Any, to: Any, source_at: Any, count: Any) -> Any:
        state_at = cgutils.alloca_once(builder, _STATE_TYPE)
        builder.store(builder.load(_state_pointer(builder, state)), state_at)
        is_large_at = cgutils.alloca_once_value(builder, I1(0))

        def absorb(loaded: Any) -> Any:
            converted, is_large = convert(builder, loaded, target_block)
            absorbed = builder.bitcast(loaded if from_wire else converted, _STATE_TYPE)
            builder.store(_step(builder, builder.load(state_at), absorbed), state_at)
            if is_large is not None:
                before = builder.load(is_large_at)
                builder.store(builder.or_(before, is_large), is_large_at)
            return converted

        num_blocks = builder.lshr(count, I64(lanes.bit_length() - 1))
        with cgutils.for_range(builder, num_blocks, intp=I64) as loop:
            offset = builder.mul(loop.index, I64(lanes * _bytes_of(source)))
            loaded = builder.load(
                _pointer(builder, builder.add(source_at, offset), source_block), align=1
            )
            converted = absorb(loaded)
            offset = builder.mul(loop.index, I64(lanes * _bytes_of(target)))
            builder.store(
                converted,
                _pointer(builder, builder.add(to, offset), target_block),
                align=1,
            )
        done = builder.mul(num_blocks, I64(lanes))
        rest = builder.sub(count, done)
        with builder.if_then(builder.icmp_signed(">", rest, I64(0))):
            before = cgutils.alloca_once(builder, source_block)
            after = cgutils.alloca_once(builder, target_block)
            builder.store(ir.Constant(source_block, None), before)
            at = builder.add(source_at, builder.mul(done, I64(_bytes_of(source))))
            size = I64(_bytes_of(source))
            cgutils.raw_memcpy(builder, before, _pointer(builder, at, source), rest, size)
            builder.store(absorb(builder.load(before)), after)
            at = builder.add(to, builder.mul(done, I64(_bytes_of(target))))
            size = I64(_bytes_of(target))
            cgutils.raw_memcpy(builder, _pointer(builder, at, target), after, rest, size)
        builder.store(builder.load(state_at), _state_pointer(builder, state))
        return builder.zext(builder.load(is_large_at), I64)

    return copy


def _bytes_of(element: Any) -> int:
    return {I16: 2, I32: 4, FLOAT: 4, DOUBLE: 8}[element]


def _unchanged(builder: Any, loaded: Any, target: Any) -> Any:
    del builder, target
    return loaded, None


def _is_nonfinite(builder: Any, value: Any) -> Any:
    """Whether an element is NaN or infinite."""
    zero = builder.fsub(value, value)  # 0 of finite values, else a NaN
    is_odd = builder.fcmp_unordered("uno", zero, zero)
    mask = builder.bitcast(is_odd, ir.IntType(value.type.count))
    return builder.icmp_unsigned("!=", mask, mask.type(0))


def _sums(builder: Any, loaded: Any, target: Any) -> Any:
    del target
    return loaded, _is_nonfinite(builder, loaded)


def _to_bf16(builder: Any, loaded: Any, target: Any) -> Any:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits_type = ir.VectorType(I32, target.count)
    value = _to_float(builder, loaded)
    bits = builder.bitcast(value, bits_type)
    high = builder.lshr(bits, _splat(bits_type, 16))
    odd = builder.and_(high, _splat(bits_type, 1))
    rounded = builder.add(builder.add(bits, odd), _splat(bits_type, 0x7FFF))
    rounded = builder.lshr(rounded, _splat(bits_type, 16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    quiet = builder.or_(high, _splat(bits_type, 0x40))
    halves = builder.trunc(builder.select(is_nan, quiet, rounded), target)
    return halves, _became_infinite(builder, loaded, halves, 0x7F80)


def _from_bf16(builder: Any, loaded: Any, target: Any) -> Any:
    bits_type = ir.VectorType(I32, target.count)
    bits = builder.shl(builder.zext(loaded, bits_type), _splat(bits_type, 16))
    return _from_float(builder, builder.bitcast(bits, ir.VectorType(FLOAT, target.count)), target)


def _to_f16(builder: Any, loaded: Any, target: Any) -> Any:
    """Round to nearest, ties to even; a single rounding also from float64."""
    value = _to_float(builder, loaded, is_odd=True)
    halves = builder.bitcast(builder.fptrunc(value, ir.VectorType(HALF, target.count)), target)
    return halves, _became_infinite(builder, loaded, halves, 0x7C00)


def _became_infinite(builder: Any, loaded: Any, halves: Any, infinity: int) -> Any:
    """Whether a finite element has overflowed to infinity."""
    magnitude = builder.and_(halves, _splat(halves.type, 0x7FFF))
    is_infinite = builder.icmp_unsigned("==", magnitude, _splat(halves.type, infinity))
    # x - x is 0 for finite values, else a NaN
    zero = builder.fsub(loaded, loaded)
    is_finite = builder.fcmp_ordered("ord", zero, zero)
    mask = builder.bitcast(builder.and_(is_infinite, is_finite), ir.IntType(halves.type.count))
    return builder.icmp_unsigned("!=", mask, mask.type(0))


def _from_f16(builder: Any, loaded: Any, target: Any) -> Any:
    halves = builder.bitcast(loaded, ir.VectorType(HALF, target.count))
    return _from_float(builder, builder.fpext(halves, ir.VectorType(FLOAT, target.count)), target)


def _to_float(builder: Any, value: Any, *, is_odd: bool = False) -> Any:
    """Float64 to float32. `is_odd` rounds to odd, so that a second rounding gives the result of a
    single one."""
    if value.type.element is FLOAT:
        return value
    nearest = builder.fptrunc(value, ir.VectorType(FLOAT, value.type.count))
    if not is_odd:
        return nearest
    bits_type = ir.VectorType(I32, value.type.count)
    wide_type = ir.VectorType(I64, value.type.count)
    back = builder.fpext(nearest, value.type)
    is_inexact = builder.fcmp_ordered("one", back, value)
    magnitudes = (
        builder.shl(builder.bitcast(each, wide_type), _splat(wide_type, 1))
        for each in (back, value)
    )
    is_rounded_up = builder.and_(is_inexact, builder.icmp_unsigned(">", *magnitudes))
    bits = builder.sub(builder.bitcast(nearest, bits_type), builder.zext(is_rounded_up, bits_type))
    return builder.bitcast(builder.or_(bits, builder.zext(is_inexact, bits_type)), nearest.type)


def _from_float(builder: Any, value: Any, target: Any) -> Any:
    """Float32 rows unchanged; sums widened to float64, and whether any is NaN or infinite."""
    if target.element is FLOAT:
        return value, None
    return builder.fpext(value, target), _is_nonfinite(builder, value)


copy_words = _copier(I32, I32, _unchanged, from_wire=True)
copy_sums = _copier(DOUBLE, DOUBLE, _sums, from_wire=True)
pack_bf16 = _copier(FLOAT, I16, _to_bf16, from_wire=False)
pack_bf16_sums = _copier(DOUBLE, I16, _to_bf16, from_wire=False)
unpack_bf16 = _copier(I16, FLOAT, _from_bf16, from_wire=True)
unpack_bf16_sums = _copier(I16, DOUBLE, _from_bf16, from_wire=True)
pack_f16 = _copier(FLOAT, I16, _to_f16, from_wire=False)
pack_f16_sums = _copier(DOUBLE, I16, _to_f16, from_wire=False)
unpack_f16 = _copier(I16, FLOAT, _from_f16, from_wire=True)
unpack_f16_sums = _copier(I16, DOUBLE, _from_f16, from_wire=True)
