"""Activations as int8 with one scale for each 32 values, in the records that kernels read.

Source: symmetric round-to-nearest quantisation by the largest magnitude, as ggml's Q8_0 but with
the scale in float32.
"""

from __future__ import annotations

from typing import Any

from dflash_runtime.compute.cpu.compiling import helper
from dflash_runtime.compute.cpu.panels.emitting import I8, I32, Vec, call, load
from dflash_runtime.compute.cpu.panels.kernels import RECORD_BYTES
from dflash_runtime.compute.cpu.panels.rows import LANES
from dflash_runtime.compute.cpu.untyped import ir
from dflash_runtime.compute.cpu.vector.types import FLOAT, i64, lanes_of, primitive, void

_BYTES = lanes_of(I8, 16)


@primitive(void, i64, i64, i64, i64)
def _quantise_block(builder: Any, x: Any, record: Any, slot: Any, num_slots: Any) -> None:
    """32 values into one token's place of a record."""
    values = [load(Vec(builder, x) + 64 * half, LANES) for half in range(2)]
    sizes = [Vec(builder, call(builder, "llvm.fabs.v16f32", LANES, each.value)) for each in values]
    larger = call(builder, "llvm.maximum.v16f32", LANES, sizes[0].value, sizes[1].value)
    largest = Vec(builder, call(builder, "llvm.vector.reduce.fmaximum.v16f32", FLOAT, larger))
    scale = largest * (1.0 / 127.0)
    is_zero = builder.fcmp_ordered("==", largest.value, ir.Constant(FLOAT, 0.0))
    inverse = builder.fdiv(ir.Constant(FLOAT, 127.0), largest.value)
    inverse = Vec(builder, builder.select(is_zero, ir.Constant(FLOAT, 0.0), inverse))
    place, sums = Vec(builder, record), []
    slot_v, slots = Vec(builder, slot), Vec(builder, num_slots)
    for half, each in enumerate(values):
        turns = call(builder, "llvm.rint.v16f32", LANES, (each * inverse.splat(16)).value)
        # Saturating, because a conversion of what is no number must still be some number.
        integers = call(builder, "llvm.fptosi.sat.v16i32.v16f32", lanes_of(I32, 16), turns)
        quants = Vec(builder, builder.trunc(integers, _BYTES))
        quants.store(place + slot_v * 32 + 16 * half)
        total = call(builder, "llvm.vector.reduce.add.v16i32", I32, integers)
        sums.append(Vec(builder, builder.sitofp(total, FLOAT)))
    numbers = place + slots * 32 + slot_v * 4
    whole = sums[0] + sums[1]  # exact: small integers
    for kind, number in enumerate((scale, scale * whole, scale * sums[0], scale * sums[1])):
        number.store(numbers + slots * (4 * kind))


@helper
def quantise(x: int, num_blocks: int, records: int, slot: int, num_slots: int) -> None:
    """One token's values at `x` into its `slot` of a group's records."""
    for block in range(num_blocks):
        record = records + RECORD_BYTES * num_slots * block
        _quantise_block(x + 128 * block, record, slot, num_slots)
