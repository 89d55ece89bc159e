"""Kernels of repacked tiles: unpack a chunk, multiply it, or both at once for a single token.

Activations come as *q8 blocks*, one for each block of 32 values and group of tokens: the tokens'
int8 quants (32 bytes each), then for all tokens the scale, the scaled sum of the quants, and those
of the two halves (float32 each). An unpacked chunk has for each block 8 vectors of 64 bytes, then
scales, then offsets.

For every token and row, block sums are exact integers, added in float32 in the order of the blocks:
``total = fma(offset, x_sum, fma(sum, scale * x_scale, total))``. So the bits are the same for one
token or many, unpacked or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dflash_runtime.compute.cpu.compile.tiers import current_tier
from dflash_runtime.compute.cpu.simd.dots import Dots, Quants
from dflash_runtime.compute.cpu.simd.emitting import NUM_ROWS, Vec, keep_order, load, prefetch
from dflash_runtime.compute.cpu.simd.instruction_sets import Tier
from dflash_runtime.compute.cpu.simd.types import (
    FLOAT,
    I8,
    I32,
    I64,
    i64,
    lanes_of,
    primitive,
    void,
)
from dflash_runtime.compute.cpu.simd.untyped import cgutils
from dflash_runtime.compute.cpu.weights.repacked.formats import LANES, RepackedFormat, TileRows

BLOCKS_AT_ONCE = 8
"""Blocks of 32 values in an unpacked chunk."""

SCALES_AT, OFFSETS_AT, REPACKED_BYTES = 4096, 5120, 6144
"""Byte offsets in an unpacked chunk, and its size."""

Q8_BLOCK_BYTES = 48
"""Bytes for one token and one block of 32 activations."""

LARGEST_GROUP = 16
"""Tokens in the largest group of any tier."""

_TILES = {Tier.AVX_VNNI: (16, 4), Tier.AVX2: (8, 4), Tier.NEON_DOT: (8, 4)}
"""Rows and tokens multiplied at once, as many as fit the registers with quants and sums."""

_LARGEST_TILE = (NUM_ROWS, 8)


_SMALL_CHUNKS_AT_ONCE = 2
"""Chunks of one block processed together: neighbours share cache lines."""


def group_sizes() -> tuple[int, ...]:
    """Tokens that share one read of a repacked tile, largest first: powers of two down to 1."""
    return (16, 8, 4, 2, 1) if current_tier() is Tier.AMX else (8, 4, 2, 1)


def quants_of(form: RepackedFormat) -> Quants:
    """The range of a type's quants, as far as it matters to this tier."""
    return Quants(form.bits).representative(current_tier())


def is_signed(form: RepackedFormat) -> bool:
    """Whether this tier multiplies such quants as signed bytes, which then need no offset."""
    return quants_of(form).is_signed(current_tier())


class Q8Blocks:
    """The q8 blocks of a group of tokens, block by block."""

    def __init__(self, first: Vec, num_tokens: int, num_rows: int = NUM_ROWS) -> None:
        self.quants_at = first
        self._num_tokens = num_tokens
        self.num_rows = num_rows

    def block(self, block: Vec | int) -> Q8Blocks:
        """Those from a later block on."""
        first = self.quants_at + block * (Q8_BLOCK_BYTES * self._num_tokens)
        return Q8Blocks(first, self._num_tokens, self.num_rows)

    def quants(self, token: int, step: int) -> Vec:
        """Four values, repeated for each row."""
        place = self.quants_at + (32 * token + 4 * step)
        return load(place, I32).splat(self.num_rows).as_type(lanes_of(I8, 4 * self.num_rows))

    def scale(self, token: int) -> Vec:
        """The scale, repeated for each row."""
        return self._number(0, token)

    def sum(self, token: int, scales_a_block: int, part: int) -> Vec:
        """The scaled sum of a block, or of a half where blocks have two scales, for each row."""
        return self._number(1 if scales_a_block == 1 else 2 + part, token)

    def _number(self, kind: int, token: int) -> Vec:
        offset = 32 * self._num_tokens + 4 * (kind * self._num_tokens + token)
        return load(self.quants_at + offset, FLOAT).splat(self.num_rows)


def scaled(
    total: Vec, integers: Vec, scale: Vec, offset: Vec | None, x_scale: Vec, x_sum: Vec | None
) -> Vec:
    """Add a block's integer sums, scaled, to `total`; see the module's formula."""
    total = integers.to_float().times_plus(scale * x_scale, total)
    return total if offset is None or x_sum is None else offset.times_plus(x_sum, total)


def unpacking(form: RepackedFormat) -> Callable[..., Any]:
    """Make ``unpack(first_row, row_bytes, num_blocks, repacked)`` for whole chunks of the
    format."""
    signed = is_signed(form)

    @primitive(void, i64, i64, i64, i64)
    def unpack(
        builder: Any, first_row: Any, row_bytes: Any, num_blocks: Any, repacked: Any
    ) -> None:
        num_chunks = builder.udiv(num_blocks, I64(form.chunk_blocks))
        with cgutils.for_range(builder, num_chunks) as loop:
            chunk = Vec(builder, loop.index)
            rows = TileRows(Vec(builder, first_row), Vec(builder, row_bytes)).at(
                chunk * form.chunk_bytes
            )
            out = Vec(builder, repacked) + chunk * (512 * form.chunk_blocks)
            numbers = Vec(builder, repacked) + chunk * (
                64 * form.chunk_blocks * form.scales_a_block
            )
            for place, vectors in zip((SCALES_AT, OFFSETS_AT), form.scales(rows), strict=True):
                for index, vector in enumerate(vectors):
                    vector.store(numbers + (place + 64 * index))
            for block, half, quad in form.quads(rows):
                kept = quad ^ 128 if signed else quad
                kept.store(out + (512 * block + 256 * half))

    return unpack


def multiplying(num_tokens: int, scales_a_block: int, quants: Quants) -> Callable[..., Any]:
    """Make ``multiply(repacked, num_blocks, q8_blocks, totals)``: an unpacked chunk times tokens.

    It adds to `totals`, 16 float32 for each token.
    """
    rows_at_once, at_once = _TILES.get(current_tier(), _LARGEST_TILE)
    if num_tokens < at_once:
        rows_at_once, at_once = NUM_ROWS, num_tokens

    @primitive(void, i64, i64, i64, i64)
    def multiply(builder: Any, repacked: Any, num_blocks: Any, q8_blocks: Any, totals: Any) -> None:
        for first_row in range(0, NUM_ROWS, rows_at_once):
            x = Q8Blocks(Vec(builder, q8_blocks), num_tokens, rows_at_once)
            for first in range(0, num_tokens, at_once):
                _multiply_tile(
                    Vec(builder, repacked) + 4 * first_row,
                    num_blocks,
                    x,
                    Vec(builder, totals) + 4 * first_row,
                    range(first, min(first + at_once, num_tokens)),
                    scales_a_block,
                    quants,
                )

    return multiply


def _multiply_tile(
    repacked: Vec,
    num_blocks: Any,
    q8_blocks: Q8Blocks,
    totals: Vec,
    tokens: range,
    scales_a_block: int,
    quants: Quants,
) -> None:
    """Some rows times some tokens of a group, as many as fit the registers."""
    builder, tier = repacked.builder, current_tier()
    signed, steps = quants.is_signed(tier), 8 // scales_a_block
    num_rows = q8_blocks.num_rows
    lanes, step_bytes = lanes_of(FLOAT, num_rows), lanes_of(I8, 4 * num_rows)
    kept = {token: cgutils.alloca_once(builder, lanes) for token in tokens}
    for token in tokens:
        builder.store(load(totals + 64 * token, lanes).value, kept[token])
    with cgutils.for_range(builder, num_blocks) as loop:
        block = Vec(builder, loop.index)
        weights_at = repacked + block * 512
        scales_at = repacked + (block * (64 * scales_a_block) + SCALES_AT)
        x = q8_blocks.block(block)
        for part in range(scales_a_block):
            dots = {token: Dots(builder, tier, quants, num_rows) for token in tokens}
            for step in range(steps * part, steps * (part + 1)):
                weights = load(weights_at + 64 * step, step_bytes)
                for token in tokens:
                    dots[token].add(weights, x.quants(token, step))
            scale = load(scales_at + 64 * part, lanes)
            offset = None if signed else load(scales_at + (64 * part + 1024), lanes)
            for token in tokens:
                total = scaled(
                    Vec(builder, builder.load(kept[token])),
                    dots[token].total(),
                    scale,
                    offset,
                    x.scale(token),
                    None if signed else x.sum(token, scales_a_block, part),
                )
                builder.store(total.value, kept[token])
    for token in tokens:
        Vec(builder, builder.load(kept[token])).store(totals + 64 * token)


def multiplying_one(form: RepackedFormat) -> Callable[..., Any]:
    """Make ``multiply_one(first_row, row_bytes, num_blocks, q8_blocks, far, near, totals)``.

    Multiplies rows of whole chunks by one token straight from the blocks: storing unpacked bytes
    would cost more than the products. Prefetches as many bytes from `far` on. Tiers whose products
    outrun memory prefetch from `near` on, too, what has been prefetched before: some processors
    drop prefetches while they wait for many lines, Zen 5 most of them if they come without a pause.
    """

    @primitive(void, *[i64] * 7)
    def multiply_one(
        builder: Any,
        first_row: Any,
        row_bytes: Any,
        num_blocks: Any,
        q8_blocks: Any,
        far: Any,
        near: Any,
        totals: Any,
    ) -> None:
        kept = cgutils.alloca_once(builder, LANES)
        builder.store(load(Vec(builder, totals), LANES).value, kept)
        rows = TileRows(Vec(builder, first_row), Vec(builder, row_bytes))
        for begin, chunks, lines in chunk_loops(form, rows, num_blocks, (far, near)):
            x = Q8Blocks(Vec(builder, q8_blocks), 1).block(begin * form.chunk_blocks)
            total = Vec(builder, builder.load(kept))
            for chunk, here in enumerate(chunks):
                total = _multiply_chunk(
                    form, here, x.block(chunk * form.chunk_blocks), total, lines
                )
            builder.store(total.value, kept)
        Vec(builder, builder.load(kept)).store(Vec(builder, totals))

    return multiply_one


def chunk_loops(
    form: RepackedFormat, rows: TileRows, num_blocks: Any, ahead: tuple[Any, Any]
) -> Iterator[tuple[Vec, list[TileRows], Iterator[None]]]:
    """Emit the loops over a row's chunks; what is emitted between two `next` is the body of one.
    Gives the body's first chunk, the rows at each of its chunks, and `_lines_ahead` of these, from
    the far and the near address on. To be used to its end.

    Small chunks come two at a time, with one that may remain in a loop of its own.
    """
    builder = rows.builder
    unrolled = _SMALL_CHUNKS_AT_ONCE if form.chunk_blocks == 1 else 1
    firsts = ahead if current_tier().has_wide_registers else ahead[:1]
    num_chunks = builder.udiv(num_blocks, I64(form.chunk_blocks))
    num_steps = builder.udiv(num_chunks, I64(unrolled))
    rest = builder.mul(num_steps, I64(unrolled))
    loops = [(unrolled, I64(0), num_steps), (1, rest, num_chunks)]
    for count, first, end in loops if unrolled > 1 else loops[:1]:
        with cgutils.for_range_slice(builder, first, end, I64(1)) as (index, _):
            begin = Vec(builder, index) * count
            done = begin * (NUM_ROWS * form.chunk_bytes)
            lines = _lines_ahead(
                [Vec(builder, each) + done for each in firsts],
                count * NUM_ROWS * form.chunk_bytes,
                2 * count * form.chunk_blocks,
            )
            chunks = [rows.at((begin + chunk) * form.chunk_bytes) for chunk in range(count)]
            yield begin, chunks, lines


def _lines_ahead(firsts: list[Vec], num_bytes: int, num_parts: int) -> Iterator[None]:
    """Each `next` prefetches another part of `num_bytes` from each of these addresses on."""
    begin = 0
    for part in range(1, num_parts + 1):
        keep_order(firsts[0].builder)
        while begin < num_bytes * part // num_parts:
            for first in firsts:
                prefetch(first + begin)
            begin += 64
        yield


def _multiply_chunk(
    form: RepackedFormat, rows: TileRows, x: Q8Blocks, total: Vec, lines: Iterator[None]
) -> Vec:
    """Add the products of a chunk to `total`.

    Prefetches are spread among the reads of quads: all at once they would wait for each other, and
    later reads for them.
    """
    builder, tier, quants = total.builder, current_tier(), quants_of(form)
    signed, num_sums = quants.is_signed(tier), form.chunk_blocks * form.scales_a_block
    scales, offsets = form.scales(rows)
    sums: dict[int, Dots] = {}
    num_quads: dict[int, int] = {}
    num_added = 0
    for block, half, quad in form.quads(rows):
        next(lines)
        key = block if form.scales_a_block == 1 else 2 * block + half
        dots = sums.setdefault(key, Dots(builder, tier, quants))
        kept_quad = quad ^ 128 if signed else quad
        for step in range(4):
            weights = kept_quad.take(list(range(64 * step, 64 * step + 64)))
            dots.add(weights, x.block(block).quants(0, 4 * half + step))
        num_quads[key] = num_quads.get(key, 0) + 1
        while num_added < num_sums and num_quads.get(num_added, 0) == 2 // form.scales_a_block:
            at, part = divmod(num_added, form.scales_a_block)
            total = scaled(
                total,
                sums.pop(num_added).total(),
                scales[num_added],
                None if signed else offsets[num_added],
                x.block(at).scale(0),
                None if signed else x.block(at).sum(0, form.scales_a_block, part),
            )
            num_added += 1
    assert num_added == num_sums
    return total
