"""Kernels of a decode step's experts: rows of repacked tiles times one token, with a GPU's bits.

GPUs multiply a row in *units* of 64 values: four *granules* of 16, of which each has an activation
scale of its own (gpu/kernels/dense/products.cuh). Lane ``unit % num_lanes`` of `num_lanes` (see
step_order.sum_lanes) adds up its units one after the other, and lanes are added in pairs, the
farthest apart first. For granules i and i + 1 of a unit, whose sums are exact integers::

    total = fma(scale, fma(x_scale[i + 1], sum[i + 1], x_scale[i] * sum[i]), total)
    total = fma(offset, x_sum[i] + x_sum[i + 1], total)

or, where each granule has a scale, one after the other: first both products, then both offsets.
Here 16 rows are multiplied side by side, and the lanes are vectors in memory.

Activations come as *step blocks* of 64 bytes for 32 values: the int8 quants, then as float32 for
each of both granules its scale, for each its scaled sum of quants, the sum of both scaled sums, and
for each its sum of quants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dflash_runtime.compute.cpu.compile.tiers import current_tier
from dflash_runtime.compute.cpu.simd.dots import Dots
from dflash_runtime.compute.cpu.simd.emitting import NUM_ROWS, Vec, constant, load
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
from dflash_runtime.compute.cpu.weights.repacked.formats import (
    LANES,
    Granules,
    RepackedFormat,
    TileRows,
)
from dflash_runtime.compute.cpu.weights.repacked.kernels import (
    chunk_loops,
    is_signed,
    quants_of,
)
from dflash_runtime.compute.step_order import MOST_SUM_LANES

STEP_BLOCK_BYTES = 64
"""Bytes of a step block: one token's 32 activations."""

SCALES_AT, SUMS_AT, PAIR_SUM_AT, INTEGER_SUMS_AT = 32, 40, 48, 52
"""Byte offsets of a step block's numbers."""


class _StepBlocks:
    """One token's step blocks from some block on."""

    def __init__(self, first: Vec) -> None:
        self._first = first

    def at(self, block: Vec) -> _StepBlocks:
        return _StepBlocks(self._first + block * STEP_BLOCK_BYTES)

    def quants(self, block: int, half: int, step: int) -> Vec:
        """Four values, repeated for each row."""
        place = self._first + (STEP_BLOCK_BYTES * block + 16 * half + 4 * step)
        return load(place, I32).splat(NUM_ROWS).as_type(lanes_of(I8, 4 * NUM_ROWS))

    def number(self, block: int, place: int) -> Vec:
        """A number of a block, repeated for each row."""
        return load(self._first + (STEP_BLOCK_BYTES * block + place), FLOAT).splat(NUM_ROWS)


class _Lanes:
    """Addresses of the lanes of a chunk's units; the number of lanes is a power of two."""

    def __init__(self, lanes: Vec, first_unit: Vec, last_lane: Vec) -> None:
        self._lanes, self._first_unit, self._last_lane = lanes, first_unit, last_lane

    def of(self, unit: int) -> Vec:
        return self._lanes + ((self._first_unit + unit) & self._last_lane) * 64


class _Chunk:
    """The sums of a chunk's granules, and how they are added to a unit's total."""

    def __init__(self, form: RepackedFormat, rows: TileRows, x: _StepBlocks) -> None:
        self._form, self._x = form, x
        self._scales, self._offsets = form.scales(rows)
        # Bytes that are multiplied as they are need nothing subtracted.
        self._centre = 0 if is_signed(form) else form.centre
        self._sums: dict[tuple[int, int], Vec] = {}

    def keep(self, block: int, half: int, sums: Vec) -> None:
        """The integer sums of a granule."""
        sums = sums.to_float()
        if self._centre:  # exact: integers below 2^24
            of_x = self._x.number(block, INTEGER_SUMS_AT + 4 * half)
            sums = of_x.times_plus(constant(sums.builder, LANES, -float(self._centre)), sums)
        self._sums[block, half] = sums

    def has(self, granules: Granules) -> bool:
        return all(each in self._sums for each in granules)

    def added(self, granules: Granules, total: Vec) -> Vec:
        """The total with a unit's granules, which are not needed any more."""
        for first, second in zip(granules[::2], granules[1::2], strict=True):
            total = self._with_pair(first, second, total)
        return total

    def _with_pair(self, first: tuple[int, int], second: tuple[int, int], total: Vec) -> Vec:
        x, has_offset = self._x, not self._form.centre
        x_scales = [x.number(block, SCALES_AT + 4 * half) for block, half in (first, second)]
        sums = [self._sums.pop(each) for each in (first, second)]
        if self._form.scales_a_block == 1:
            block = first[0]
            both = x_scales[1].times_plus(sums[1], x_scales[0] * sums[0])
            total = self._scales[block].times_plus(both, total)
            if has_offset:
                total = self._offsets[block].times_plus(x.number(block, PAIR_SUM_AT), total)
            return total
        indices = [2 * block + half for block, half in (first, second)]
        for index, x_scale, granule_sums in zip(indices, x_scales, sums, strict=True):
            total = self._scales[index].times_plus(x_scale * granule_sums, total)
        if has_offset:
            for index, (block, half) in zip(indices, (first, second), strict=True):
                x_sum = x.number(block, SUMS_AT + 4 * half)
                total = self._offsets[index].times_plus(x_sum, total)
        return total


def multiplying_step(form: RepackedFormat) -> Callable[..., Any]:
    """Make ``multiply_step(first_row, row_bytes, num_blocks, x, num_lanes, far, near, totals)``.

    Writes the products of 16 rows of whole chunks and one token's step blocks at `x`. Prefetches
    from `far` and `near` on as `multiplying_one` does.
    """

    @primitive(void, *[i64] * 8)
    def multiply_step(
        builder: Any,
        first_row: Any,
        row_bytes: Any,
        num_blocks: Any,
        x: Any,
        num_lanes: Any,
        far: Any,
        near: Any,
        totals: Any,
    ) -> None:
        place = cgutils.alloca_once(builder, LANES, size=MOST_SUM_LANES)
        lanes = Vec(builder, builder.ptrtoint(place, I64))
        zeros = constant(builder, LANES, 0.0)
        with cgutils.for_range(builder, num_lanes) as loop:
            zeros.store(lanes + Vec(builder, loop.index) * 64)
        last_lane = Vec(builder, num_lanes) - 1
        rows = TileRows(Vec(builder, first_row), Vec(builder, row_bytes))
        # A row of an odd number of blocks ends with half a unit.
        for begin, chunks, lines in chunk_loops(form, rows, num_blocks, (far, near)):
            first_block = begin * form.chunk_blocks
            here = _StepBlocks(Vec(builder, x)).at(first_block)
            _add_units(form, chunks, here, _Lanes(lanes, first_block >> 1, last_lane), lines)
        _fold(builder, lanes, num_lanes)
        load(lanes, LANES).store(Vec(builder, totals))

    return multiply_step


def _add_units(
    form: RepackedFormat,
    chunks: list[TileRows],
    x: _StepBlocks,
    lanes: _Lanes,
    lines: Iterator[None],
) -> None:
    """Add the units of one chunk, or the unit of two, to their lanes.

    Prefetches are spread among the reads of quads, as in `kernels`.
    """
    builder, tier, quants = chunks[0].builder, current_tier(), quants_of(form)
    signed, at = is_signed(form), 0
    parts = [
        _Chunk(form, rows, x.at(constant(builder, I64, index * form.chunk_blocks)))
        for index, rows in enumerate(chunks)
    ]
    waiting = list(enumerate(form.units))
    for part, rows in zip(parts, chunks, strict=True):
        for block, half, quad in form.quads(rows):
            next(lines)
            dots = Dots(builder, tier, quants)
            kept_quad = quad ^ 128 if signed else quad
            for step in range(4):
                weights = kept_quad.take(list(range(64 * step, 64 * step + 64)))
                dots.add(weights, x.quants(at + block, half, step))
            part.keep(block, half, dots.total())
            if form.chunk_blocks == 1:
                continue
            while waiting and part.has(waiting[0][1]):
                unit, granules = waiting.pop(0)
                lane = lanes.of(unit)
                part.added(granules, load(lane, LANES)).store(lane)
        at += form.chunk_blocks
    if form.chunk_blocks == 1:
        lane = lanes.of(0)
        total = load(lane, LANES)
        for part in parts:
            total = part.added(((0, 0), (0, 1)), total)
        total.store(lane)


def _fold(builder: Any, lanes: Vec, num_lanes: Any) -> None:
    """Add the second half of the lanes to the first half, until one is left."""
    width = MOST_SUM_LANES // 2
    while width:
        with builder.if_then(builder.icmp_unsigned(">", num_lanes, I64(width))):
            for lane in range(width):
                place, other = lanes + 64 * lane, lanes + 64 * (lane + width)
                (load(place, LANES) + load(other, LANES)).store(place)
        width //= 2
