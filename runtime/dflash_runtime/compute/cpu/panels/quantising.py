"""Activations as int8 with one scale for each 32 values, in the records that kernels read.

Source: symmetric round-to-nearest quantisation by the largest magnitude, as ggml's Q8_0, but with
the scale in float32 and the better of two grids, which takes off 4 % of the error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_runtime.compute.cpu.compiling import helper
from dflash_runtime.compute.cpu.panels.emitting import I8, I32, Vec, call, load
from dflash_runtime.compute.cpu.panels.kernels import RECORD_BYTES
from dflash_runtime.compute.cpu.panels.rows import LANES
from dflash_runtime.compute.cpu.untyped import ir
from dflash_runtime.compute.cpu.vector.types import FLOAT, i64, lanes_of, primitive, void

_BYTES = lanes_of(I8, 16)

_STEPS = (127, 126)
"""Steps from 0 to the largest magnitude: of two grids the nearer one is taken, block by block."""


@primitive(void, i64, i64, i64, i64)
def _quantise_block(builder: Any, x: Any, record: Any, slot: Any, num_slots: Any) -> None:
    """32 values into one token's place of a record."""
    values = [load(Vec(builder, x) + 64 * half, LANES) for half in range(2)]
    sizes = [Vec(builder, call(builder, "llvm.fabs.v16f32", LANES, each.value)) for each in values]
    larger = call(builder, "llvm.maximum.v16f32", LANES, sizes[0].value, sizes[1].value)
    largest = Vec(builder, call(builder, "llvm.vector.reduce.fmaximum.v16f32", FLOAT, larger))
    grids = [_Grid(values, largest, steps) for steps in _STEPS]
    # Of a NaN neither is nearer, and the scale is one too.
    is_second = builder.fcmp_ordered("<", grids[1].error.value, grids[0].error.value)

    def chosen(first: Vec, second: Vec) -> Vec:
        return Vec(builder, builder.select(is_second, second.value, first.value))

    scale = chosen(grids[0].scale, grids[1].scale)
    place, sums = Vec(builder, record), []
    slot_v, slots = Vec(builder, slot), Vec(builder, num_slots)
    for half in range(2):
        turns = chosen(grids[0].turns[half], grids[1].turns[half])
        # Saturating, because a conversion of what is no number must still be some number.
        integers = call(builder, "llvm.fptosi.sat.v16i32.v16f32", lanes_of(I32, 16), turns.value)
        quants = Vec(builder, builder.trunc(integers, _BYTES))
        quants.store(place + slot_v * 32 + 16 * half)
        total = call(builder, "llvm.vector.reduce.add.v16i32", I32, integers)
        sums.append(Vec(builder, builder.sitofp(total, FLOAT)))
    numbers = place + slots * 32 + slot_v * 4
    whole = sums[0] + sums[1]  # exact: small integers
    for kind, number in enumerate((scale, scale * whole, scale * sums[0], scale * sums[1])):
        number.store(numbers + slots * (4 * kind))


class _Grid:
    """32 values rounded to whole steps, and how far that is from them."""

    def __init__(self, values: list[Vec], largest: Vec, steps: int) -> None:
        builder = largest.builder
        is_zero = builder.fcmp_ordered("==", largest.value, ir.Constant(FLOAT, 0.0))
        inverse = builder.fdiv(ir.Constant(FLOAT, float(steps)), largest.value)
        inverse = Vec(builder, builder.select(is_zero, ir.Constant(FLOAT, 0.0), inverse))
        self.scale = largest * _float32(1.0 / steps)
        self.turns = []
        squares = []
        for each in values:
            exact = each * inverse.splat(16)
            turns = Vec(builder, call(builder, "llvm.rint.v16f32", LANES, exact.value))
            rest = exact - turns
            self.turns.append(turns)
            squares.append(rest * rest)
        total = squares[0] + squares[1]
        width = 16
        while width > 1:
            width //= 2
            total = total.take(list(range(width))) + total.take(list(range(width, 2 * width)))
        error = Vec(builder, builder.extract_element(total.value, I32(0)))
        self.error = error * _float32(1.0 / steps**2)


def _float32(value: float) -> float:
    return float(np.float32(value))


@helper
def quantise(x: int, num_blocks: int, records: int, slot: int, num_slots: int) -> None:
    """One token's values at `x` into its `slot` of a group's records."""
    for block in range(num_blocks):
        record = records + RECORD_BYTES * num_slots * block
        _quantise_block(x + 128 * block, record, slot, num_slots)
