"""Weights as kernels see them: where rows lie, and which functions read them.

Weights stay where the file is mapped. Knows nothing of what a matrix is for.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import numpy as np

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_adapters.quant.reference import dequantise
from dflash_protocol.ids import AnyArray, I64Array, U8Array
from dflash_runtime.compute.cpu.rows import dot_f32, dot_f32_by_4, is_native, row_kernels

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class CpuMatrix:
    """A weight [rows, columns] of one native type. Implements ops.Matrix.

    Owns: `data`, which keeps the memory at `address` mapped.
    """

    rows: int
    columns: int
    row_bytes: int
    address: int
    layout: I64Array
    expand_address: int
    data: AnyArray


def load_matrix(file: GgufFile, tensor_name: str) -> CpuMatrix:
    """A two-dimensional tensor of the file.

    Raises: ValueError if it is not two-dimensional or its rows are not whole blocks.
    """
    tensor = file.tensor(tensor_name)
    if len(tensor.shape) != 2:
        raise ValueError(f"{tensor_name} is {tensor.shape}, not a matrix")
    rows, columns = tensor.shape
    return as_matrix(file.tensor_bytes(tensor_name), tensor.tensor_type, rows, columns)


def as_matrix(data: U8Array, tensor_type: TensorType, rows: int, columns: int) -> CpuMatrix:
    """Stored bytes as a matrix, in place if the type is native. Shapes: data [num_bytes] uint8."""
    num_bytes = rows * tensor_type.row_bytes(columns)
    if data.shape != (num_bytes,) or data.dtype != np.uint8 or not data.flags.c_contiguous:
        raise ValueError(f"{data.dtype} {data.shape}, expected {num_bytes} contiguous bytes")
    data, tensor_type = native_rows(data, tensor_type, rows, columns)
    return CpuMatrix(
        rows=rows,
        columns=columns,
        row_bytes=tensor_type.row_bytes(columns),
        address=data.ctypes.data,
        layout=row_layout(tensor_type, columns),
        expand_address=row_kernels(tensor_type).expand.address,
        data=data,
    )


def native_rows(
    data: U8Array, tensor_type: TensorType, rows: int, columns: int
) -> tuple[U8Array, TensorType]:
    """The same values in a type that kernels read: the same bytes, or a copy expanded to F32."""
    if is_native(tensor_type):
        return data, tensor_type
    _log_expanded(tensor_type)
    expanded = np.ascontiguousarray(dequantise(data, tensor_type, (rows, columns)))
    return expanded.reshape(-1).view(np.uint8), TensorType.F32


@cache
def _log_expanded(tensor_type: TensorType) -> None:
    _log.warning("no kernel reads %s: such weights are expanded to F32", tensor_type.name)


# Fields of a row layout, the array in which kernels get everything about rows but their place.
ROW_BYTES, COLUMNS, EXPAND, DOT, DOT_F32, DOT_F32_BY_4, NUM_FIELDS = range(7)


def row_layout(tensor_type: TensorType, columns: int) -> I64Array:
    """How kernels read rows of a native type.

    ``EXPAND`` is 0 where rows are F32 already, ``DOT`` is 0 where no function multiplies a stored
    row directly. Shapes: result [NUM_FIELDS] int64.
    """
    kernels = row_kernels(tensor_type)
    layout = np.zeros(NUM_FIELDS, np.int64)
    layout[ROW_BYTES] = tensor_type.row_bytes(columns)
    layout[COLUMNS] = columns
    layout[EXPAND] = 0 if tensor_type is TensorType.F32 else kernels.expand.address
    layout[DOT] = 0 if kernels.dot is None else kernels.dot.address
    layout[DOT_F32] = dot_f32().address
    layout[DOT_F32_BY_4] = dot_f32_by_4().address
    return layout
