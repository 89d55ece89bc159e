"""The functions of attention that depend on how a cache stores its elements, for any rows.

Each is compiled once for each element type and called by address, so that its callers are compiled
once. Functions that write store keys and values in the layout that attention_tiles reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from dflash_runtime.compute.cpu.compile.compiling import RowFunction, helper, variant
from dflash_runtime.compute.cpu.kernels import attention_tiles as tiles
from dflash_runtime.compute.cpu.kernels.attention_tiles import BLOCK, ELEMENTS
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.atomics import relaxed_load
from dflash_runtime.compute.cpu.simd.types import (
    FLOAT,
    HALF,
    I8,
    I16,
    I64,
    LANES,
    emit_call,
    emit_named,
    emit_shuffle,
    emit_splat,
    emit_store,
    floats,
    i64,
    lanes_of,
    primitive,
    void,
)
from dflash_runtime.compute.cpu.simd.untyped import cgutils, intrinsic, ir
from dflash_runtime.compute.kv_cache import KvType

# -- writing --------------------------------------------------------------------------------------

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


# -- reading --------------------------------------------------------------------------------------


def _scores(
    element: Any,
    queries: int,
    num_rows: int,
    keys: int,
    dim: int,
    scores: int,
    following: int,
    ahead: int,
) -> None:
    """`num_rows` queries times 32 keys; for `following` and `ahead` see attention_tiles."""
    row = 0
    while row < num_rows:
        query, place, left = queries + 4 * dim * row, scores + 4 * BLOCK * row, num_rows - row
        if left >= 8:
            _tile_8(element, query, keys, dim, place, following, ahead)
            row += 8
        elif left >= 4:
            _tile_4(element, query, keys, dim, place, following, ahead)
            row += 4
        elif left >= 2:
            _tile_2(element, query, keys, dim, place, following, ahead)
            row += 2
        else:
            _tile_1(element, query, keys, dim, place, following, ahead)
            row += 1


_tile_8, _tile_4, _tile_2, _tile_1 = tiles.score_8, tiles.score_4, tiles.score_2, tiles.score_1


_FETCHING = {f"_tile_{size}": getattr(tiles, f"fetch_score_{size}") for size in (8, 4, 2, 1)}
_fetch_scores = variant(_scores, "_fetch_scores", **_FETCHING)
"""`_scores` with tiles that prefetch."""


def _mix(
    element: Any,
    terms: int,
    num_rows: int,
    counts: int,
    values: int,
    row_bytes: int,
    factors: int,
    one: int,
    sums: int,
    stride: int,
) -> None:
    """32 lanes of ``sums * factor + terms @ values``; row r uses its first ``counts[r]``
    positions."""
    row = 0
    while row < num_rows:
        term, factor, target = terms + 4 * BLOCK * row, factors + 4 * row, sums + stride * row
        count, left = relaxed_load(counts + 8 * row), num_rows - row
        if left >= 8:
            tiles.mix_8(element, term, values, row_bytes, count, factor, target, stride)
            width = 8
        elif left >= 4:
            tiles.mix_4(element, term, values, row_bytes, count, factor, target, stride)
            width = 4
        elif left >= 2:
            tiles.mix_2(element, term, values, row_bytes, count, factor, target, stride)
            width = 2
        else:
            tiles.mix_1(element, term, values, row_bytes, count, factor, target, stride)
            width = 1
        # Rows of later tokens see more positions: the remaining ones, row by row.
        for later in range(row + 1, row + width):
            rest = relaxed_load(counts + 8 * later) - count
            if rest > 0:
                term = terms + 4 * (BLOCK * later + count)
                value, target = values + row_bytes * count, sums + stride * later
                tiles.mix_1(element, term, value, row_bytes, rest, one, target, stride)
        row += width


def _expand_keys(element: Any, keys: int, dim: int, out: int) -> None:
    tiles.expand_keys(element, keys, dim, out)


def _expand_values(element: Any, values: int, row_bytes: int, num_positions: int, out: int) -> None:
    """One block of 32 lanes of each row as float32. Shapes: out [num_positions][32]."""
    for _ in range(num_positions):
        v.store_floats(out, tiles.value_lanes(element, values))
        values += row_bytes
        out += 128


def _caller(num_arguments: int) -> Any:
    """Make ``call(function, element, …)``, a call by address; the element's value is ignored."""

    @primitive(void, *[i64] * (2 + num_arguments))
    def call(builder: Any, function: Any, *arguments: Any) -> None:
        emit_call(builder, ir.VoidType(), function, list(arguments))

    return call


call_score, call_mix, call_expand_keys, call_expand_values, call_store = (
    _caller(num_arguments) for num_arguments in (7, 9, 3, 4, 4)
)


@dataclass(frozen=True, slots=True, eq=False)
class ElementFunctions:
    """The functions compiled for one cache type."""

    score: RowFunction
    fetch_score: RowFunction
    mix: RowFunction
    expand_keys: RowFunction
    expand_values: RowFunction
    store_key: RowFunction
    store_values: RowFunction


@cache
def element_functions(kv_type: KvType) -> ElementFunctions:
    def compiled(function: Any, num_arguments: int) -> RowFunction:
        return RowFunction(function, ELEMENTS[kv_type], *[i64] * num_arguments)

    return ElementFunctions(
        compiled(_scores, 7),
        compiled(_fetch_scores, 7),
        compiled(_mix, 9),
        compiled(_expand_keys, 3),
        compiled(_expand_values, 4),
        compiled(store_key, 4),
        compiled(store_values, 4),
    )
