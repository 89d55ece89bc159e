"""Repacked tiles times 16 tokens with AMX, two products at a time; same bits as other kernels.

While the CPU scales the sums of two products, the tile unit computes the next two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_runtime.compute.cpu.compile.tiers import current_tier
from dflash_runtime.compute.cpu.simd.emitting import Vec, load
from dflash_runtime.compute.cpu.simd.instruction_sets import Tier
from dflash_runtime.compute.cpu.simd.tiles import (
    NUM_TOKENS,
    SUMS_BYTES,
    emit_begin,
    emit_end,
    emit_product,
)
from dflash_runtime.compute.cpu.simd.types import I8, I64, i64, primitive, void
from dflash_runtime.compute.cpu.simd.untyped import cgutils, ir
from dflash_runtime.compute.cpu.weights.repacked.formats import LANES, WORDS
from dflash_runtime.compute.cpu.weights.repacked.kernels import (
    OFFSETS_AT,
    SCALES_AT,
    Q8Blocks,
    scaled,
)


@primitive(void, i64)
def begin_tiles(builder: Any, num_vectors: Any) -> None:
    """Call before a part of a set that has groups of 16; does nothing on other tiers."""
    _if_tiles(builder, num_vectors, emit_begin)


@primitive(void, i64)
def end_tiles(builder: Any, num_vectors: Any) -> None:
    """Call after the part, with the same argument as `begin_tiles`."""
    _if_tiles(builder, num_vectors, emit_end)


def _if_tiles(builder: Any, num_vectors: Any, emit: Callable[[Any], None]) -> None:
    if current_tier() is Tier.AMX:
        with builder.if_then(builder.icmp_signed(">=", num_vectors, I64(NUM_TOKENS))):
            emit(builder)


def multiplying_by_tiles(scales_a_block: int) -> Callable[..., Any]:
    """Make ``multiply(repacked, num_blocks, q8_blocks, totals)`` (see kernels), to be called
    between `begin_tiles` and `end_tiles`."""

    @primitive(void, i64, i64, i64, i64)
    def multiply(builder: Any, repacked: Any, num_blocks: Any, q8_blocks: Any, totals: Any) -> None:
        emit_multiply(builder, scales_a_block, repacked, num_blocks, q8_blocks, totals)

    return multiply


def emit_multiply(
    builder: Any, scales_a_block: int, repacked: Any, num_blocks: Any, q8_blocks: Any, totals: Any
) -> None:
    """Emit the multiplication in pairs of products: those of two blocks, or of a block's halves."""
    with builder.goto_entry_block():
        room = builder.alloca(ir.ArrayType(I8, 4 * SUMS_BYTES))  # numba's would zero it
    room.align = 64
    sums = Vec(builder, builder.ptrtoint(room, I64))  # of two alternating pairs
    place = Vec(builder, totals)
    kept = [cgutils.alloca_once(builder, LANES) for _ in range(NUM_TOKENS)]
    for token in range(NUM_TOKENS):
        builder.store(load(place + 64 * token, LANES).value, kept[token])
    last = builder.sub(num_blocks, I64(1))
    is_whole = scales_a_block == 1
    num_pairs = builder.lshr(builder.add(num_blocks, I64(1)), I64(1)) if is_whole else num_blocks

    def blocks_of(pair: Any) -> list[Any]:
        if not is_whole:
            return [pair, pair]
        first = builder.shl(pair, I64(1))
        second = builder.or_(first, I64(1))
        # An odd last block is paired with itself; the second result is ignored.
        is_there = builder.icmp_signed("<=", second, last)
        return [first, builder.select(is_there, second, first)]

    def sums_of(pair: Any, index: int) -> Vec:
        turn = Vec(builder, builder.and_(pair, I64(1)))
        return sums + turn * (2 * SUMS_BYTES) + index * SUMS_BYTES

    def multiply_pair(pair: Any) -> None:
        for index, block in enumerate(blocks_of(pair)):
            half = 0 if is_whole else index
            quants = Vec(builder, repacked) + Vec(builder, block) * 512 + 256 * half
            x = Q8Blocks(Vec(builder, q8_blocks), NUM_TOKENS).block(Vec(builder, block))
            out = sums_of(pair, index)
            emit_product(builder, scales_a_block, index, quants, x.quants_at + 16 * half, out)

    def scale(pair: Any, index: int, block: Any) -> None:
        part = 0 if is_whole else index
        at = Vec(builder, repacked) + Vec(builder, block) * (64 * scales_a_block) + 64 * part
        factor, offset = load(at + SCALES_AT, LANES), load(at + OFFSETS_AT, LANES)
        x = Q8Blocks(Vec(builder, q8_blocks), NUM_TOKENS).block(Vec(builder, block))
        out = sums_of(pair, index)
        for token in range(NUM_TOKENS):
            integers = load(out + 64 * token, WORDS)
            x_sum = x.sum(token, scales_a_block, part)
            total = Vec(builder, builder.load(kept[token]))
            total = scaled(total, integers, factor, offset, x.scale(token), x_sum)
            builder.store(total.value, kept[token])

    multiply_pair(I64(0))
    with cgutils.for_range(builder, num_pairs) as loop:
        pair, following = loop.index, builder.add(loop.index, I64(1))
        with builder.if_then(builder.icmp_signed("<", following, num_pairs)):
            multiply_pair(following)
        first, second = blocks_of(pair)
        scale(pair, 0, first)
        if is_whole:
            with builder.if_then(builder.icmp_signed("!=", first, second)):
                scale(pair, 1, second)
        else:
            scale(pair, 1, second)
    for token in range(NUM_TOKENS):
        Vec(builder, builder.load(kept[token])).store(place + 64 * token)
