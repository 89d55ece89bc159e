"""Small matrix products with sums kept in registers, for the gated delta rule.

A tile is some rows of a few vectors of sums. Each sum is one chain of fused multiply-adds in
ascending order, so its bits depend on neither the tile nor its other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from dflash_runtime.compute.cpu.compile.compiling import RowFunction
from dflash_runtime.compute.cpu.compile.tiers import current_tier
from dflash_runtime.compute.cpu.simd.types import (
    FLOAT,
    I64,
    LANES,
    emit_call,
    emit_fma,
    emit_load,
    emit_splat,
    emit_store,
    i64,
    lanes_of,
    primitive,
    void,
)
from dflash_runtime.compute.cpu.simd.untyped import cgutils, ir

_WIDE = 128
"""Lanes of a tile of few rows: enough sums to hide the latency of a multiply-add."""


def _lanes_at_once(num_rows: int, lanes: int) -> int:
    """Lanes of a tile whose sums fit the CPU's registers."""
    sums = 256 if current_tier().has_wide_registers else 64
    return min(lanes, max(sums // num_rows, 16))


def _at(builder: Any, base: Any, index: Any, stride: Any) -> Any:
    return builder.add(base, builder.mul(index, stride))


def _tile(num_rows: int, lanes: int) -> Callable[..., Any]:
    """Make ``tile(a, a_stride, b, b_stride, count, sums, sums_stride)``.

    It computes ``sums += a[:, :count] @ b``. Strides are in bytes.
    Shapes: a [num_rows][count]; b [count][lanes]; sums [num_rows][lanes].
    """

    @primitive(void, *[i64] * 7)
    def tile(
        builder: Any,
        a: Any,
        a_stride: Any,
        b: Any,
        b_stride: Any,
        count: Any,
        sums: Any,
        sums_stride: Any,
    ) -> None:
        at_once = _lanes_at_once(num_rows, lanes)
        kind = lanes_of(FLOAT, at_once)
        for first in range(0, lanes, at_once):
            targets, totals = [], []
            for row in range(num_rows):
                target = _at(builder, sums, I64(row), sums_stride)
                targets.append(builder.add(target, I64(4 * first)))
                totals.append(cgutils.alloca_once(builder, kind))
                builder.store(emit_load(builder, targets[-1], kind), totals[-1])
            with cgutils.for_range(builder, count) as loop:
                line = _at(builder, b, loop.index, b_stride)
                line = emit_load(builder, builder.add(line, I64(4 * first)), kind)
                column = _at(builder, a, loop.index, I64(4))
                for row, total in enumerate(totals):
                    place = _at(builder, column, I64(row), a_stride)
                    factor = emit_splat(builder, emit_load(builder, place, FLOAT), at_once)
                    builder.store(emit_fma(builder, factor, line, builder.load(total)), total)
            for target, total in zip(targets, totals, strict=True):
                emit_store(builder, target, builder.load(total))

    return tile


_tile_8, _tile_4, _tile_1 = _tile(8, LANES), _tile(4, LANES), _tile(1, LANES)
_wide_2, _wide_1 = _tile(2, _WIDE), _tile(1, _WIDE)


def _add_products(
    num_rows: int,
    width: int,
    a: int,
    a_stride: int,
    b: int,
    b_stride: int,
    count: int,
    sums: int,
    sums_stride: int,
) -> None:
    """``sums += a[:, :count] @ b``, where `width` is a multiple of 32; see `_tile`.

    Shapes: a [num_rows][count]; b [count][width]; sums [num_rows][width]; strides are in bytes.
    """
    row = 0
    while row < num_rows:
        left = num_rows - row
        place, target, lane = a + row * a_stride, sums + row * sums_stride, 0
        if left >= 8:
            while lane < width:
                _tile_8(place, a_stride, b + 4 * lane, b_stride, count, target, sums_stride)
                target += 128
                lane += 32
            row += 8
        elif left >= 4:
            while lane < width:
                _tile_4(place, a_stride, b + 4 * lane, b_stride, count, target, sums_stride)
                target += 128
                lane += 32
            row += 4
        elif left >= 2:
            while lane + 128 <= width:
                _wide_2(place, a_stride, b + 4 * lane, b_stride, count, target, sums_stride)
                target += 512
                lane += 128
            while lane < width:
                other = target + sums_stride
                _tile_1(place, a_stride, b + 4 * lane, b_stride, count, target, sums_stride)
                _tile_1(
                    place + a_stride, a_stride, b + 4 * lane, b_stride, count, other, sums_stride
                )
                target += 128
                lane += 32
            row += 2
        else:
            while lane + 128 <= width:
                _wide_1(place, a_stride, b + 4 * lane, b_stride, count, target, sums_stride)
                target += 512
                lane += 128
            while lane < width:
                _tile_1(place, a_stride, b + 4 * lane, b_stride, count, target, sums_stride)
                target += 128
                lane += 32
            row += 1


@cache
def products_function() -> RowFunction:
    """`_add_products`, compiled once and called by address."""
    return RowFunction(_add_products, *[i64] * 9)


@primitive(void, *[i64] * 10)
def add_products(builder: Any, function: Any, *arguments: Any) -> None:
    """Call ``(address of products_function, num_rows, width, a, …)``."""
    emit_call(builder, ir.VoidType(), function, list(arguments))
