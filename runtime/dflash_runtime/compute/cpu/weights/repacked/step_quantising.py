"""Quantises activations of a decode step to int8 with one scale for each 16 values: the step blocks
that step_kernels reads, with the bits of a GPU (gpu/kernels/dense/quantise.cuh).

Granules are computed side by side, so that what a granule has one of takes one lane.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from dflash_runtime.compute.cpu.compile.compiling import RowFunction
from dflash_runtime.compute.cpu.simd.emitting import Vec, constant, load
from dflash_runtime.compute.cpu.simd.types import (
    FLOAT,
    I32,
    emit_call,
    i64,
    lanes_of,
    primitive,
    void,
)
from dflash_runtime.compute.cpu.simd.untyped import ir
from dflash_runtime.compute.cpu.weights.repacked.quantising import (
    as_int8,
    magnitude_bits,
    plus,
    reduced,
)
from dflash_runtime.compute.cpu.weights.repacked.step_kernels import (
    INTEGER_SUMS_AT,
    PAIR_SUM_AT,
    SCALES_AT,
    STEP_BLOCK_BYTES,
    SUMS_AT,
)

_GRANULE = lanes_of(FLOAT, 16)

_BLOCKS_AT_ONCE = 8

_INFINITE_BITS, _NAN_BITS = 0x7F800000, 0x7FC00000

_SMALLEST = 1e-35
"""Granules of smaller values count as zero: the inverse of their scale would overflow."""


def _scales(largest: Vec) -> tuple[Vec, Vec]:
    """Scales and their inverses of the bits of granules' largest magnitudes."""
    builder, bits = largest.builder, largest.value
    magnitude = largest.bits_to_float()
    kind = magnitude.value.type
    steps, zero = constant(builder, kind, 127.0).value, constant(builder, kind, 0.0).value
    scale = builder.fdiv(magnitude.value, steps)
    inverse = builder.fdiv(steps, magnitude.value)
    smallest = constant(builder, kind, _SMALLEST).value
    is_small = builder.fcmp_ordered("<", magnitude.value, smallest)
    # NaN and infinity make the scale NaN, as int8 would hide them.
    infinite = constant(builder, largest.value.type, _INFINITE_BITS).value
    is_bad = builder.icmp_signed(">=", bits, infinite)
    nan = constant(builder, largest.value.type, _NAN_BITS).bits_to_float().value
    scale = builder.select(is_bad, nan, builder.select(is_small, zero, scale))
    inverse = builder.select(builder.or_(is_bad, is_small), zero, inverse)
    return Vec(builder, scale), Vec(builder, inverse)


def _quantising(num_blocks: int) -> Callable[..., Any]:
    """Make ``quantise(x, out)``: some neighbouring blocks."""

    @primitive(void, i64, i64)
    def quantise_blocks(builder: Any, x: Any, out: Any) -> None:
        first, blocks = Vec(builder, x), Vec(builder, out)
        granules = [load(first + 64 * index, _GRANULE) for index in range(2 * num_blocks)]
        sizes = [magnitude_bits(each) for each in granules]
        scales, inverses = _scales(reduced(sizes, Vec.maximum))
        integers = []
        for index, values in enumerate(granules):
            words, quants = as_int8(values, inverses.take([index] * 16))
            block, half = divmod(index, 2)
            quants.store(blocks + (STEP_BLOCK_BYTES * block + 16 * half))
            integers.append(words)
        integer_sums = reduced(integers, plus).to_float()
        sums = scales * integer_sums
        order = range(2 * num_blocks)
        pairs = sums + sums.take([index ^ 1 for index in order])
        for index in order:
            block, half = divmod(index, 2)
            at = blocks + (STEP_BLOCK_BYTES * block + 4 * half)
            for place, lanes in (
                (SCALES_AT, scales),
                (SUMS_AT, sums),
                (INTEGER_SUMS_AT, integer_sums),
            ):
                number = builder.extract_element(lanes.value, I32(index))
                Vec(builder, number).store(at + place)
            if half == 0:
                number = builder.extract_element(pairs.value, I32(index))
                Vec(builder, number).store(at + PAIR_SUM_AT)

    return quantise_blocks


_quantise_several, _quantise_one = _quantising(_BLOCKS_AT_ONCE), _quantising(1)


def _quantise(x: int, num_blocks: int, out: int) -> None:
    block = 0
    while block + _BLOCKS_AT_ONCE <= num_blocks:
        _quantise_several(x + 128 * block, out + STEP_BLOCK_BYTES * block)
        block += _BLOCKS_AT_ONCE
    while block < num_blocks:
        _quantise_one(x + 128 * block, out + STEP_BLOCK_BYTES * block)
        block += 1


@cache
def quantise_step_function() -> RowFunction:
    """The function whose address kernels are passed, to call it through `quantise_step`."""
    return RowFunction(_quantise, *[i64] * 3)


@primitive(void, *[i64] * 4)
def quantise_step(builder: Any, function: Any, x: Any, num_blocks: Any, out: Any) -> None:
    """Call ``function(x, num_blocks, out)``: float32 values into step blocks."""
    emit_call(builder, ir.VoidType(), function, [x, num_blocks, out])
