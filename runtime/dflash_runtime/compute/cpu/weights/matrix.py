"""Weights as kernels see them: where rows lie, and which functions multiply them.

Weights stay where the file is mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_protocol.ids import AnyArray, I64Array, U8Array
from dflash_runtime.compute.cpu.compile.compiling import RowFunction, variant
from dflash_runtime.compute.cpu.simd.dots import Quants
from dflash_runtime.compute.cpu.simd.tiles import NUM_TOKENS
from dflash_runtime.compute.cpu.simd.types import i64
from dflash_runtime.compute.cpu.weights import float_tile
from dflash_runtime.compute.cpu.weights.repacked.amx import multiplying_by_tiles
from dflash_runtime.compute.cpu.weights.repacked.formats import FORMATS
from dflash_runtime.compute.cpu.weights.repacked.kernels import (
    LARGEST_GROUP,
    group_sizes,
    multiplying,
    multiplying_one,
    quants_of,
    unpacking,
)
from dflash_runtime.compute.cpu.weights.repacked.step_kernels import multiplying_step
from dflash_runtime.compute.cpu.weights.rows import (
    COLUMNS,
    EXPAND,
    EXPAND_STEP,
    FLOAT_ROWS,
    MULTIPLY,
    MULTIPLY_ONE,
    MULTIPLY_STEP,
    ROW_BYTES,
    SUM_LANES,
    UNPACK,
    expand_function,
)
from dflash_runtime.compute.cpu.weights.step_floats import step_float_function

_PLAIN = {
    TensorType.F32: float_tile.F32,
    TensorType.F16: float_tile.F16,
    TensorType.BF16: float_tile.BF16,
}

NUM_FIELDS = MULTIPLY + LARGEST_GROUP + 1
"""Fields of a row layout."""


@dataclass(frozen=True, slots=True, eq=False)
class CpuMatrix:
    """A weight [rows, columns]. Implements ops.Matrix.

    Owns `data`, which keeps the memory at `address` mapped.
    """

    rows: int
    columns: int
    tensor_type: TensorType
    address: int
    layout: I64Array
    data: AnyArray


def load_matrix(file: GgufFile, tensor_name: str) -> CpuMatrix:
    """A two-dimensional tensor of the file, or a vector as a matrix of one row.

    Raises: ValueError if it has more dimensions or its rows are not whole blocks.
    """
    tensor = file.tensor(tensor_name)
    if len(tensor.shape) > 2:
        raise ValueError(f"{tensor_name} is {tensor.shape}, not a matrix")
    rows, columns = tensor.num_rows, tensor.columns
    return as_matrix(file.tensor_bytes(tensor_name), tensor.tensor_type, rows, columns)


def as_matrix(data: U8Array, tensor_type: TensorType, rows: int, columns: int) -> CpuMatrix:
    """Stored bytes as a matrix, in place. Shapes: data [num_bytes] uint8."""
    num_bytes = rows * tensor_type.row_bytes(columns)
    if data.shape != (num_bytes,) or data.dtype != np.uint8 or not data.flags.c_contiguous:
        raise ValueError(f"{data.dtype} {data.shape}, expected {num_bytes} contiguous bytes")
    return CpuMatrix(
        rows=rows,
        columns=columns,
        tensor_type=tensor_type,
        address=data.ctypes.data,
        layout=row_layout(tensor_type, columns),
        data=data,
    )


def row_layout(tensor_type: TensorType, columns: int) -> I64Array:
    """How kernels read rows of a type; compiles the functions that they call.

    ``UNPACK`` is 0 for rows multiplied as float32 through ``FLOAT_ROWS``, with ``EXPAND`` as in
    float_tile. Shapes: result [NUM_FIELDS] int64.
    """
    layout = np.zeros(NUM_FIELDS, np.int64)
    layout[ROW_BYTES] = tensor_type.row_bytes(columns)
    layout[COLUMNS] = columns
    if tensor_type in FORMATS:
        for field, function in repacked_functions(tensor_type).items():
            layout[field] = function.address
    else:
        is_plain = tensor_type in _PLAIN
        layout[EXPAND] = _PLAIN[tensor_type] if is_plain else expand_function(tensor_type).address
        layout[FLOAT_ROWS] = float_tile.float_rows(_PLAIN.get(tensor_type)).address
    return layout


def step_fields(tensor_type: TensorType, num_sum_lanes: int) -> dict[int, int]:
    """Values of the fields of a layout by which decode steps multiply rows in step order (see
    step_order); compiles the functions."""
    if tensor_type in FORMATS:
        multiply, expand = step_function(tensor_type).address, 0
    else:
        multiply = step_float_function(tensor_type).address
        expand = expand_function(tensor_type).address
    return {MULTIPLY_STEP: multiply, EXPAND_STEP: expand, SUM_LANES: num_sum_lanes}


# -- functions of repacked tiles, compiled on first use of a type ---------------------------------


@cache
def repacked_functions(tensor_type: TensorType) -> dict[int, RowFunction]:
    """By their field in a layout; for their arguments see repacked/kernels.

    Raises: KeyError for a type that has no repacked tiles.
    """
    form = FORMATS[tensor_type]
    name, quants = tensor_type.name.lower(), quants_of(form)
    return {
        UNPACK: _compiled(f"unpack_{name}", _four_numbers, unpacking(form)),
        MULTIPLY_ONE: _compiled(f"multiply_one_{name}", _seven_numbers, multiplying_one(form)),
        **{MULTIPLY + size: _multiply(size, form.scales_a_block, quants) for size in group_sizes()},
    }


@cache
def step_function(tensor_type: TensorType) -> RowFunction:
    """`multiply_step` of a type. Raises: KeyError for one that has no repacked tiles."""
    name, multiply = tensor_type.name.lower(), multiplying_step(FORMATS[tensor_type])
    return _compiled(f"multiply_step_{name}", _eight_numbers, multiply)


@cache
def _multiply(num_tokens: int, scales_a_block: int, quants: Quants) -> RowFunction:
    if num_tokens == NUM_TOKENS:
        name, primitive = "tiles", multiplying_by_tiles(scales_a_block)
    else:
        name, primitive = f"{quants.bits}_bits", multiplying(num_tokens, scales_a_block, quants)
    return _compiled(f"multiply_{num_tokens}_{scales_a_block}_{name}", _four_numbers, primitive)


def _four_numbers(a: int, b: int, c: int, d: int) -> None:
    _emitted(a, b, c, d)


def _seven_numbers(a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> None:
    _emitted(a, b, c, d, e, f, g)


def _eight_numbers(a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int) -> None:
    _emitted(a, b, c, d, e, f, g, h)


def _emitted(*numbers: int) -> None:
    raise NotImplementedError(numbers)


def _compiled(name: str, body: Callable[..., None], primitive: Callable[..., Any]) -> RowFunction:
    """A function that is one primitive; it is cached under `name`."""
    function = variant(body, name, _emitted=primitive)
    return RowFunction(function, *[i64] * body.__code__.co_argcount)
