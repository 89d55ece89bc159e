"""The functions of attention that depend on how a cache stores its elements, for any rows.

Each is compiled once for each element type and called by address, so that its callers are compiled
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from dflash_runtime.compute.cpu.compile.compiling import RowFunction, variant
from dflash_runtime.compute.cpu.kernels import attention_tiles as tiles
from dflash_runtime.compute.cpu.kernels.attention_store import store_key, store_values
from dflash_runtime.compute.cpu.kernels.attention_tiles import BLOCK, ELEMENTS
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.atomics import relaxed_load
from dflash_runtime.compute.cpu.simd.types import emit_call, i64, primitive, void
from dflash_runtime.compute.cpu.simd.untyped import ir
from dflash_runtime.compute.kv_cache import KvType


def _scores(
    element: Any, queries: int, num_rows: int, keys: int, dim: int, scores: int, ahead: int
) -> None:
    """`num_rows` queries times 32 keys; for `ahead` see attention_tiles."""
    row = 0
    while row < num_rows:
        query, place, left = queries + 4 * dim * row, scores + 4 * BLOCK * row, num_rows - row
        if left >= 8:
            _tile_8(element, query, keys, dim, place, ahead)
            row += 8
        elif left >= 4:
            _tile_4(element, query, keys, dim, place, ahead)
            row += 4
        elif left >= 2:
            _tile_2(element, query, keys, dim, place, ahead)
            row += 2
        else:
            _tile_1(element, query, keys, dim, place, ahead)
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
    _caller(num_arguments) for num_arguments in (6, 9, 3, 4, 4)
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
        compiled(_scores, 6),
        compiled(_fetch_scores, 6),
        compiled(_mix, 9),
        compiled(_expand_keys, 3),
        compiled(_expand_values, 4),
        compiled(store_key, 4),
        compiled(store_values, 4),
    )
