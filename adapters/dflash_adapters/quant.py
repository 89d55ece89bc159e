"""GGML tensor types that are supported: their ids, their blocks, and a slow dequantiser.

A tensor is stored as rows of blocks. The dequantiser is the reference for every kernel's tests.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple, Self

import numpy as np

from dflash_protocol.ids import F32Array, U8Array


class BlockLayout(NamedTuple):
    """Elements and bytes of one block."""

    block_elements: int
    block_bytes: int


class TensorType(IntEnum):
    """GGML type id of a stored tensor, and the layout of its blocks. The scanner refuses other ids.

    Source: the GGML type table (checked against the gguf package by tests).
    """

    layout: BlockLayout

    def __new__(cls, type_id: int, block_elements: int, block_bytes: int) -> Self:
        member = int.__new__(cls, type_id)
        member._value_ = type_id
        member.layout = BlockLayout(block_elements, block_bytes)
        return member

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36

    @property
    def is_integer(self) -> bool:
        """Whether values are integers, which weights never are."""
        return TensorType.I8 <= self <= TensorType.I64

    def row_bytes(self, num_elements: int) -> int:
        """Bytes of one row.

        Raises: ValueError if the row is not a whole number of blocks.
        """
        num_blocks, remainder = divmod(num_elements, self.layout.block_elements)
        if remainder:
            raise ValueError(
                f"a row of {num_elements} is not a multiple of {self.name}'s "
                f"block of {self.layout.block_elements}"
            )
        return num_blocks * self.layout.block_bytes


_PLAIN_FLOATS = {TensorType.F32: "<f4", TensorType.F16: "<f2", TensorType.F64: "<f8"}


def dequantise(data: U8Array, tensor_type: TensorType, shape: tuple[int, ...]) -> F32Array:
    """Decode a tensor, or whole rows of one, into a new float32 array.

    NaN and infinite values are preserved; F64 is rounded.
    Shapes: data [rows * row_bytes] uint8; `shape` row-major, columns last; result `shape`.
    Raises: ValueError if the number of bytes is wrong, or the type is an integer type.
    Source: the GGML block formats, as the gguf package decodes them.
    """
    if tensor_type.is_integer:
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
