"""Inner products of attention: queries with 32 cached keys, probabilities with cached values.

A tile keeps 8, 4, 2 or 1 rows (queries) of 32 sums in registers. Each sum is one chain of fused
multiply-adds in ascending order, so its bits depend on neither the tile nor its other rows.

The type of the argument `element`, whose value is ignored, says how a cache stores its elements: a
pointer to float32, uint16 (halves) or uint8 (Q8_0: signed bytes, and a half for 32 along a row).

    keys     blocks of 32 positions, one lane each: [D][32 positions]; Q8_0: bytes in that order,
             D padded to a multiple of 32, then their scales [D / 32][32 positions]
    values   a row for each position: [V padded to 32]; Q8_0: blocks of a scale and 32 bytes
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_runtime.compute.cpu.compile.tiers import current_tier
from dflash_runtime.compute.cpu.simd.types import (
    FLOAT,
    HALF,
    I8,
    I16,
    I64,
    LANES,
    emit_constant,
    emit_fma,
    emit_halves,
    emit_load,
    emit_prefetch,
    emit_splat,
    emit_store,
    floats,
    i64,
    lanes_of,
    primitive,
    void,
)
from dflash_runtime.compute.cpu.simd.untyped import cgutils, intrinsic, ir, types
from dflash_runtime.compute.host_room import POSITION_BLOCK
from dflash_runtime.compute.kv_cache import KvType

BLOCK = POSITION_BLOCK
"""Positions between updates of the running maximum; the stride of rows of scores."""

_FLOAT32, _HALVES, _BYTES = (
    types.CPointer(element) for element in (types.float32, types.uint16, types.uint8)
)
ELEMENTS = {KvType.F32: _FLOAT32, KvType.F16: _HALVES, KvType.Q8_0: _BYTES}

_ELEMENT_BYTES = {_FLOAT32: 4, _HALVES: 2, _BYTES: 1}

_LINE = 64


def _registers() -> tuple[int, int]:
    """Rows and lanes of sums that fit the CPU's registers together with the factors."""
    return (8, 32) if current_tier().has_wide_registers else (4, 16)


def _at(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, I64(offset)) if offset else address


def _scaled_index(builder: Any, base: Any, index: Any, stride: Any) -> Any:
    stride = I64(stride) if isinstance(stride, int) else stride
    return builder.add(base, builder.mul(index, stride))


def _lanes(builder: Any, element: Any, address: Any, count: int) -> Any:
    """Elements as float32, exactly; those of Q8_0 without their scale."""
    if element == _FLOAT32:
        return emit_load(builder, address, lanes_of(FLOAT, count))
    if element == _HALVES:
        return emit_halves(builder, address, count)
    integers = emit_load(builder, address, lanes_of(I8, count))
    return builder.sitofp(integers, lanes_of(FLOAT, count))


def _value_lanes(builder: Any, element: Any, block: Any, first: int, count: int) -> Any:
    """Some of the 32 lanes of a block of values; a byte times a half is exact."""
    if element != _BYTES:
        address = _at(builder, block, first * _ELEMENT_BYTES[element])
        return _lanes(builder, element, address, count)
    half = builder.bitcast(emit_load(builder, block, I16), HALF)
    scale = emit_splat(builder, builder.fpext(half, FLOAT), count)
    return builder.fmul(_lanes(builder, element, _at(builder, block, 2 + first), count), scale)


def _for_each_key_line(
    builder: Any,
    element: Any,
    keys: Any,
    dim: Any,
    first: int,
    count: int,
    body: Callable[[Any, Any], None],
) -> None:
    """Emit ``body(d, lanes)`` for each d < dim: element d of the keys of `count` positions."""
    size = _ELEMENT_BYTES[element]
    steps = builder.lshr(builder.add(dim, I64(LANES - 1)), I64(5))
    scales = _at(builder, _scaled_index(builder, keys, steps, LANES * LANES), 2 * first)
    with cgutils.for_range(builder, steps) as outer:
        first_d = builder.mul(outer.index, I64(LANES))
        rest = builder.sub(dim, first_d)
        is_whole = builder.icmp_signed(">", rest, I64(LANES))
        end = builder.select(is_whole, I64(LANES), rest)
        if element == _BYTES:
            place = _scaled_index(builder, scales, outer.index, 2 * LANES)
            scale = emit_halves(builder, place, count)
        with cgutils.for_range(builder, end) as inner:
            d = builder.add(first_d, inner.index)
            line = _at(builder, _scaled_index(builder, keys, d, size * LANES), size * first)
            lanes = _lanes(builder, element, line, count)
            body(d, builder.fmul(lanes, scale) if element == _BYTES else lanes)


def _prefetch(builder: Any, address: Any, num_lines: int) -> None:
    for line in range(num_lines):
        emit_prefetch(builder, _at(builder, address, _LINE * line))


def _zero_sums(builder: Any, rows: int, count: int) -> list[Any]:
    kind = lanes_of(FLOAT, count)
    sums = [cgutils.alloca_once(builder, kind) for _ in range(rows)]
    for place in sums:
        builder.store(emit_constant(kind, 0.0), place)
    return sums


def _score_tile(num_rows: int, *, from_memory: bool) -> Callable[..., Any]:
    """Make ``tile(element, queries, keys, dim, scores, following, ahead)``.

    It multiplies `num_rows` queries by 32 keys. `from_memory`: it prefetches the next call's keys
    from `following`, and as many bytes from `ahead`.
    Shapes: queries [num_rows][dim] float32; scores [num_rows][BLOCK], of which 32 are written.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def score_tile(
        typing_context: Any,
        element: Any,
        queries: Any,
        keys: Any,
        dim: Any,
        scores: Any,
        following: Any,
        ahead: Any,
    ) -> Any:
        del typing_context, queries, keys, dim, scores, following, ahead

        def emit(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
            del sig
            _, queries, keys, dim, scores, following, ahead = arguments
            rows, count = min(num_rows, _registers()[0]), _registers()[1]
            size = _ELEMENT_BYTES[element]
            num_lines = -(-size * LANES // _LINE)
            row_bytes = builder.mul(dim, I64(4))
            for first in range(0, LANES, count):
                for first_row in range(0, num_rows, rows):
                    sums = _zero_sums(builder, rows, count)
                    fetches = from_memory and first == first_row == 0

                    def add_line(
                        d: Any,
                        line: Any,
                        sums: list[Any] = sums,
                        first_row: int = first_row,
                        fetches: bool = fetches,
                    ) -> None:
                        if fetches:
                            offset = builder.mul(d, I64(size * LANES))
                            _prefetch(builder, builder.add(following, offset), num_lines)
                            offset = builder.mul(d, I64(_LINE * num_lines))
                            _prefetch(builder, builder.add(ahead, offset), num_lines)
                        column = _scaled_index(builder, queries, d, 4)
                        for row, total in enumerate(sums, first_row):
                            place = builder.add(column, builder.mul(row_bytes, I64(row)))
                            query = emit_splat(builder, emit_load(builder, place, FLOAT), count)
                            value = emit_fma(builder, query, line, builder.load(total))
                            builder.store(value, total)

                    _for_each_key_line(builder, element, keys, dim, first, count, add_line)
                    for row, total in enumerate(sums, first_row):
                        place = _at(builder, scores, 4 * (row * BLOCK + first))
                        emit_store(builder, place, builder.load(total))
            return context.get_dummy_value()

        return void(element, i64, i64, i64, i64, i64, i64), emit

    return score_tile  # type: ignore[no-any-return]


def _mix_tile(num_rows: int) -> Callable[..., Any]:
    """Make ``tile(element, terms, values, row_bytes, num_positions, factors, sums, stride)``.

    It computes 32 lanes of ``sums * factor + terms @ values`` for `num_rows` rows, each with its
    factor.
    Shapes: terms [num_rows][BLOCK]; factors [num_rows]; sums [num_rows] rows of `stride` bytes.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def mix_tile(
        typing_context: Any,
        element: Any,
        terms: Any,
        values: Any,
        row_bytes: Any,
        num_positions: Any,
        factors: Any,
        sums: Any,
        stride: Any,
    ) -> Any:
        del typing_context, terms, values, row_bytes, num_positions, factors, sums, stride

        def emit(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
            del sig
            _, terms, values, row_bytes, num_positions, factors, sums, stride = arguments
            rows, count = min(num_rows, _registers()[0]), _registers()[1]
            kind = lanes_of(FLOAT, count)
            for first in range(0, LANES, count):
                for first_row in range(0, num_rows, rows):
                    targets, totals = [], []
                    for row in range(first_row, first_row + rows):
                        target = _scaled_index(builder, sums, I64(row), stride)
                        targets.append(_at(builder, target, 4 * first))
                        factor = emit_load(builder, _at(builder, factors, 4 * row), FLOAT)
                        before = emit_load(builder, targets[-1], kind)
                        totals.append(cgutils.alloca_once(builder, kind))
                        scaled = builder.fmul(before, emit_splat(builder, factor, count))
                        builder.store(scaled, totals[-1])
                    with cgutils.for_range(builder, num_positions) as loop:
                        block = _scaled_index(builder, values, loop.index, row_bytes)
                        line = _value_lanes(builder, element, block, first, count)
                        column = _scaled_index(builder, terms, loop.index, 4)
                        for row, total in enumerate(totals, first_row):
                            place = _at(builder, column, 4 * BLOCK * row)
                            term = emit_splat(builder, emit_load(builder, place, FLOAT), count)
                            value = emit_fma(builder, term, line, builder.load(total))
                            builder.store(value, total)
                    for target, total in zip(targets, totals, strict=True):
                        emit_store(builder, target, builder.load(total))
            return context.get_dummy_value()

        return void(element, *[i64] * 7), emit

    return mix_tile  # type: ignore[no-any-return]


score_8, score_4, score_2, score_1 = (_score_tile(rows, from_memory=False) for rows in (8, 4, 2, 1))
fetch_score_8, fetch_score_4, fetch_score_2, fetch_score_1 = (
    _score_tile(rows, from_memory=True) for rows in (8, 4, 2, 1)
)
mix_8, mix_4, mix_2, mix_1 = (_mix_tile(rows) for rows in (8, 4, 2, 1))


@intrinsic  # type: ignore[untyped-decorator]
def expand_keys(typing_context: Any, element: Any, keys: Any, dim: Any, out: Any) -> Any:
    """A block of 32 keys as float32. Shapes: out [dim][32]."""
    del typing_context, keys, dim, out

    def emit(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        del sig
        _, keys, dim, out = arguments

        def store(d: Any, line: Any) -> None:
            emit_store(builder, _scaled_index(builder, out, d, 4 * LANES), line)

        _for_each_key_line(builder, element, keys, dim, 0, LANES, store)
        return context.get_dummy_value()

    return void(element, i64, i64, i64), emit


@intrinsic  # type: ignore[untyped-decorator]
def value_lanes(typing_context: Any, element: Any, block: Any) -> Any:
    """The 32 lanes of a block of values, as float32."""
    del typing_context, block

    def emit(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        del context, sig
        return _value_lanes(builder, element, arguments[1], 0, LANES)

    return floats(element, i64), emit


@primitive(floats, floats, i64)
def keep_first(builder: Any, lanes: Any, count: Any) -> Any:
    """Keep the first `count` lanes, 0 to all; -inf in the others."""
    numbers = ir.Constant(lanes_of(I64), list(range(LANES)))
    is_kept = builder.icmp_signed("<", numbers, emit_splat(builder, count))
    return builder.select(is_kept, lanes, emit_constant(lanes_of(FLOAT), float("-inf")))


@primitive(floats, floats, i64)
def drop_first(builder: Any, lanes: Any, count: Any) -> Any:
    """Put -inf in the first `count` lanes, 0 to all; keep the others."""
    numbers = ir.Constant(lanes_of(I64), list(range(LANES)))
    is_kept = builder.icmp_signed(">=", numbers, emit_splat(builder, count))
    return builder.select(is_kept, lanes, emit_constant(lanes_of(FLOAT), float("-inf")))
