"""Float rows of a decode step's experts times one vector, with a GPU's bits.

GPUs multiply such a row in units of 16 bytes, 4 or 8 values, whose products a lane adds one after
the other (gpu/kernels/dense/products.cuh): unit u belongs to lane ``u % num_lanes``, and lanes are
added in pairs, the farthest apart first (see step_order). Rows are expanded to float32 before.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.cpu.compile.compiling import RowFunction, variant
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import (
    FLOAT,
    emit_call,
    emit_fma,
    emit_load,
    emit_shuffle,
    f32,
    floats,
    i64,
    lanes_of,
    primitive,
)
from dflash_runtime.compute.step_order import MOST_SUM_LANES, float_unit

LANES_BYTES = 4 * MOST_SUM_LANES
"""Scratch bytes of `multiply_step_float`, beside an expanded row."""


def _adding(unit: int) -> Any:
    """Make ``add(row, x, lanes)``: a unit of each of 32 lanes."""

    @primitive(floats, i64, i64, floats)
    def add(builder: Any, row: Any, x: Any, lanes: Any) -> Any:
        whole = lanes_of(FLOAT, unit * MOST_SUM_LANES)
        weights, values = (emit_load(builder, place, whole) for place in (row, x))
        for element in range(unit):
            order = list(range(element, whole.count, unit))
            weight, value = (emit_shuffle(builder, each, each, order) for each in (weights, values))
            lanes = emit_fma(builder, weight, value, lanes)
        return lanes

    return add


_add_4, _add_8 = _adding(4), _adding(8)
_UNIT, _add = 8, _add_8  # `step_float_function` substitutes those of F32


def _multiply(row: int, x: int, columns: int, num_lanes: int, scratch: int) -> float:
    """``row · x``, both float32. `scratch`: LANES_BYTES."""
    num_units = (columns + _UNIT - 1) // _UNIT
    unit = 0
    lanes = v.zeros()
    if num_lanes == MOST_SUM_LANES:
        while (unit + MOST_SUM_LANES) * _UNIT <= columns:
            lanes = _add(row + 4 * _UNIT * unit, x + 4 * _UNIT * unit, lanes)
            unit += MOST_SUM_LANES
    v.store_floats(scratch, lanes)
    while unit < num_units:
        place = scratch + 4 * (unit % num_lanes)
        total = v.load_float(place)
        for column in range(_UNIT * unit, min(_UNIT * (unit + 1), columns)):
            weight, value = v.load_float(row + 4 * column), v.load_float(x + 4 * column)
            total = v.fma_scalar(weight, value, total)
        v.store_float(place, total)
        unit += 1
    width = num_lanes // 2
    while width > 0:
        for place in range(scratch, scratch + 4 * width, 4):
            v.store_float(place, v.load_float(place) + v.load_float(place + 4 * width))
        width //= 2
    return v.load_float(scratch)  # type: ignore[no-any-return]


@cache
def step_float_function(tensor_type: TensorType) -> RowFunction:
    """``multiply(row, x, columns, num_lanes, scratch)``: see `_multiply`."""
    unit = float_unit(tensor_type)
    add = _add_4 if unit == 4 else _add_8
    function = variant(_multiply, f"multiply_step_float_{unit}", _UNIT=unit, _add=add)
    return RowFunction(function, *[i64] * 5, result=f32)


@primitive(f32, *[i64] * 6)
def multiply_step_float(builder: Any, function: Any, *numbers: Any) -> Any:
    """Call a `step_float_function`, whose arguments follow."""
    return emit_call(builder, FLOAT, function, list(numbers))
