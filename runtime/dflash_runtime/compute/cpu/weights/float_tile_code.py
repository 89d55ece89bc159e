"""The tile of float_tile, some rows times some vectors, as generated code.

float_tile says what determines a product's bits.
"""

from __future__ import annotations

from itertools import chain, product
from typing import Any

from dflash_runtime.compute.cpu.compile.tiers import current_tier
from dflash_runtime.compute.cpu.simd.types import (
    FLOAT,
    HALF,
    I16,
    I32,
    I64,
    emit_bfloats,
    emit_constant,
    emit_fma,
    emit_load,
    emit_prefetch,
    emit_shuffle,
    emit_store,
    i64,
    lanes_of,
    primitive,
    void,
)
from dflash_runtime.compute.cpu.simd.untyped import cgutils, ir

F32, F16, BF16 = range(3)
"""Kinds of rows."""

LANES = 16
LINE = 64
_ELEMENT_BYTES = (4, 2, 2)
_LEAD_BYTES = 4096  # as in kernels/products
_PREFETCH_VECTORS = 4


def tile_shape() -> tuple[int, int]:
    """Rows and vectors multiplied at once: accumulators and operands just fit the registers."""
    return (4, 6) if current_tier().has_wide_registers else (2, 3)


@primitive(i64)
def tile_rows(builder: Any) -> Any:
    del builder
    return I64(tile_shape()[0])


@primitive(i64)
def tile_vectors(builder: Any) -> Any:
    del builder
    return I64(tile_shape()[1])


def block_products(kinds: tuple[int, ...]) -> Any:
    """Make a primitive: rows of one of these kinds times vectors from a table of addresses.

    Called ``(kind, number of vectors, arguments of _block_function…)``, with up to a tile's number
    of vectors.
    """

    @primitive(void, *[i64] * 9)
    def multiply_block(builder: Any, kind: Any, num_vectors: Any, *arguments: Any) -> None:
        rows, most_vectors = tile_shape()
        done = builder.append_basic_block("done")
        switch = builder.switch(builder.add(builder.shl(kind, I64(8)), num_vectors), done)
        for stored, vectors in product(kinds, range(1, most_vectors + 1)):
            with builder.goto_block(builder.append_basic_block("case")):
                switch.add_case(I64((stored << 8) + vectors), builder.block)
                builder.call(_block_function(builder.module, stored, rows, vectors), arguments)
                builder.branch(done)
        builder.position_at_end(done)

    return multiply_block


def _block_function(module: Any, kind: int, num_rows: int, num_vectors: int) -> Any:
    """A separate function for each kind and size, so that each has all registers."""
    name = f"float_tile_{kind}_{num_rows}x{num_vectors}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 7), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    row, row_bytes, rows, columns, table, out, out_stride = function.args
    vectors = [emit_load(builder, builder.add(table, I64(8 * t)), I64) for t in range(num_vectors)]
    step = I64(num_rows)
    tiles = builder.udiv(builder.add(rows, I64(num_rows - 1)), step)
    with cgutils.for_range(builder, tiles) as loop:
        first = builder.mul(loop.index, step)
        last = builder.sub(builder.sub(rows, first), I64(1))
        # Rows beyond the last repeat it: computed and stored more than once.
        indices = [builder.add(first, _smaller(builder, I64(r), last)) for r in range(num_rows)]
        places = [builder.add(row, builder.mul(index, row_bytes)) for index in indices]
        # The next tile, or with short rows the one after it.
        is_short = builder.icmp_signed("<", row_bytes, I64(_LEAD_BYTES))
        tiles_ahead = builder.select(is_short, builder.shl(step, I64(1)), step)
        ahead = builder.mul(tiles_ahead, row_bytes)
        products = _emit_tile(builder, kind, places, vectors, columns, ahead)
        columns_out = [
            builder.add(out, builder.mul(I64(t), out_stride)) for t in range(num_vectors)
        ]
        is_whole = builder.icmp_signed(">=", last, I64(num_rows - 1))
        with builder.if_else(is_whole) as (together, one_by_one):
            with together:
                for column, sums in zip(columns_out, products, strict=True):
                    emit_store(builder, builder.add(column, builder.mul(first, I64(4))), sums)
            with one_by_one:
                for column, sums in zip(columns_out, products, strict=True):
                    for r, index in enumerate(indices):
                        place = builder.add(column, builder.mul(index, I64(4)))
                        emit_store(builder, place, builder.extract_element(sums, I32(r)))
    builder.ret_void()
    return function


def _emit_tile(
    builder: Any, kind: int, rows: list[Any], vectors: list[Any], columns: Any, ahead: Any
) -> list[Any]:
    """The products of each row with each vector, one product a lane."""
    element_bytes = _ELEMENT_BYTES[kind]
    floats = lanes_of(FLOAT, LANES)
    totals = [[cgutils.alloca_once(builder, floats) for _ in rows] for _ in vectors]
    for total in chain.from_iterable(totals):
        builder.store(emit_constant(floats, 0.0), total)

    def add_products(column: Any, count: Any = None) -> None:
        row_offset = builder.mul(column, I64(element_bytes))
        x_offset = builder.mul(column, I64(4))
        x = [_load(builder, F32, builder.add(place, x_offset), count) for place in vectors]
        for r, place in enumerate(rows):
            values = _load(builder, kind, builder.add(place, row_offset), count)
            for t, operand in enumerate(x):
                total = totals[t][r]
                builder.store(emit_fma(builder, values, operand, builder.load(total)), total)

    # Unrolled twice: less loop overhead.
    turn = 2 * LANES
    with cgutils.for_range(builder, builder.udiv(columns, I64(turn))) as loop:
        first = builder.mul(loop.index, I64(turn))
        # With more vectors the hardware prefetcher keeps up, and addresses need the registers.
        if len(vectors) <= _PREFETCH_VECTORS:
            turn_bytes = len(rows) * turn * element_bytes
            start = builder.add(builder.mul(loop.index, I64(turn_bytes)), ahead)
            for offset in range(0, turn_bytes, LINE):
                emit_prefetch(builder, builder.add(rows[0], builder.add(start, I64(offset))))
        add_products(first)
        add_products(builder.add(first, I64(LANES)))
    with builder.if_then(_is_set(builder, columns, LANES)):
        add_products(builder.and_(columns, I64(-turn)))
    rest = builder.and_(columns, I64(LANES - 1))
    with builder.if_then(builder.icmp_signed("!=", rest, I64(0)), likely=False):
        add_products(builder.sub(columns, rest), rest)
    return _fold_all(builder, totals)


def _smaller(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def _is_set(builder: Any, value: Any, bit: int) -> Any:
    return builder.icmp_signed("!=", builder.and_(value, I64(bit)), I64(0))


def _load(builder: Any, kind: int, address: Any, count: Any = None) -> Any:
    """16 stored numbers as float32; with `count` only the first `count`, then zeros."""
    element = FLOAT if kind == F32 else I16
    lanes = lanes_of(element, LANES)
    if count is None:
        stored = emit_load(builder, address, lanes)
    else:
        buffer = cgutils.alloca_once(builder, lanes)
        builder.store(ir.Constant(lanes, None), buffer)
        source = builder.inttoptr(address, buffer.type)
        cgutils.raw_memcpy(builder, buffer, source, count, I64(_ELEMENT_BYTES[kind]))
        stored = builder.load(buffer)
    if kind == F32:
        return stored
    if kind == BF16:
        return emit_bfloats(builder, stored)
    return builder.fpext(builder.bitcast(stored, lanes_of(HALF, LANES)), lanes_of(FLOAT, LANES))


def _fold_all(builder: Any, totals: list[list[Any]]) -> list[Any]:
    """The sum of every vector's lanes; those of one list lie side by side in one result.

    Lanes are added as if each vector were folded alone, upper half onto lower. Folding two vectors
    at once, the second in the lanes that the first leaves empty, takes half the instructions.
    """
    # Each folded vector comes with the (vector, row) that each of its lanes belongs to.
    folded = [
        (builder.load(total), [(t, r)] * LANES)
        for t, each in enumerate(totals)
        for r, total in enumerate(each)
    ]
    width = LANES  # lanes left of each
    while width > 1:
        firsts, seconds = folded[::2], folded[1::2]
        if len(firsts) > len(seconds):
            seconds.append(firsts[-1])
        folded = [_fold_pair(builder, a, b, width) for a, b in zip(firsts, seconds, strict=True)]
        width //= 2
    place = {name: (vector, names.index(name)) for vector, names in folded for name in names}
    results = []
    for t, each in enumerate(totals):
        lanes = [place[t, r] for r in range(len(each))]
        vector = lanes[0][0]
        results.append(emit_shuffle(builder, vector, vector, [lane for _, lane in lanes]))
    return results


def _fold_pair(builder: Any, a: Any, b: Any, width: int) -> tuple[Any, list[tuple[int, int]]]:
    """Fold parts of `width` lanes by half, in two vectors at once."""
    (a_vector, a_names), (b_vector, b_names) = a, b
    names = a_names + b_names
    # Narrow parts stay within their four lanes: shuffles are faster there.
    group = LANES if width > 4 else 4
    parts = [
        first + part
        for start in range(0, LANES, group)
        for first in (start, LANES + start)
        for part in range(0, group, width)
    ]
    lower = [part + lane for part in parts for lane in range(width // 2)]
    upper = [lane + width // 2 for lane in lower]
    folded = builder.fadd(
        emit_shuffle(builder, a_vector, b_vector, lower),
        emit_shuffle(builder, a_vector, b_vector, upper),
    )
    return folded, [names[lane] for lane in lower]
