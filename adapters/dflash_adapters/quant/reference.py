"""Dequantises stored tensors to float32: slow, and the reference for every kernel's tests."""

from __future__ import annotations

import math

import numpy as np

from dflash_adapters.quant.layouts import TensorType
from dflash_protocol.ids import F32Array, U8Array

_PLAIN_FLOATS = {TensorType.F32: "<f4", TensorType.F16: "<f2", TensorType.F64: "<f8"}
_INTEGERS = frozenset({TensorType.I8, TensorType.I16, TensorType.I32, TensorType.I64})


def dequantise(data: U8Array, tensor_type: TensorType, shape: tuple[int, ...]) -> F32Array:
    """Decode a tensor, or whole rows of one, into a new float32 array.

    NaN and infinite values are preserved; F64 is rounded.
    Shapes: data [rows * row_bytes] uint8; `shape` row-major, columns last; result `shape`.
    Raises: ValueError if the number of bytes is wrong, or the type is an integer type.
    Source: the GGML block formats, as the gguf package decodes them.
    """
    if tensor_type in _INTEGERS:
        raise ValueError(f"{tensor_type.name} tensors hold integers, not weights")
    num_rows = math.prod(shape[:-1])
    row_bytes = tensor_type.row_bytes(shape[-1])
    if data.dtype != np.uint8 or data.size != num_rows * row_bytes:
        raise ValueError(
            f"{data.size} items of {data.dtype} for {tensor_type.name} of shape {shape}, "
            f"which takes {num_rows * row_bytes} bytes"
        )
    if data.size == 0:
        return np.empty(shape, dtype=np.float32)
    rows = np.ascontiguousarray(data).reshape(num_rows, row_bytes)
    if (plain := _PLAIN_FLOATS.get(tensor_type)) is not None:
        with np.errstate(all="ignore"):
            return rows.view(plain).astype(np.float32).reshape(shape)
    # Imported late: the package takes 0.2 s and only the reference needs it.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    # Scales of random or damaged blocks may overflow; the result is inf, not an error.
    with np.errstate(all="ignore"):
        values: F32Array = dequantize(rows, GGMLQuantizationType(int(tensor_type)))
    return values.astype(np.float32, copy=False).reshape(shape)
