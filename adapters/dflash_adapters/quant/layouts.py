"""Block sizes of the GGML tensor types that are supported.

A tensor is stored as rows of blocks; a block has ``block_elements`` values in ``block_bytes``
bytes. `reference` and the kernels decode them.

Source: the GGML type table (checked against the gguf package by tests).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class BlockLayout(NamedTuple):
    """Elements and bytes of one block."""

    block_elements: int
    block_bytes: int


class TensorType(IntEnum):
    """GGML type id of a stored tensor. The scanner refuses other ids."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40

    @property
    def layout(self) -> BlockLayout:
        """Block size of this type."""
        return _LAYOUTS[self]

    @property
    def is_integer(self) -> bool:
        """Whether values are integers, which weights never are."""
        return TensorType.I8 <= self <= TensorType.I64

    def row_bytes(self, num_elements: int) -> int:
        """Bytes of one row.

        Raises: ValueError if the row is not a whole number of blocks.
        """
        layout = _LAYOUTS[self]
        num_blocks, remainder = divmod(num_elements, layout.block_elements)
        if remainder:
            raise ValueError(
                f"a row of {num_elements} is not a multiple of {self.name}'s "
                f"block of {layout.block_elements}"
            )
        return num_blocks * layout.block_bytes


_LAYOUTS: dict[TensorType, BlockLayout] = {
    TensorType.F32: BlockLayout(1, 4),
    TensorType.F16: BlockLayout(1, 2),
    TensorType.Q4_0: BlockLayout(32, 18),
    TensorType.Q4_1: BlockLayout(32, 20),
    TensorType.Q5_0: BlockLayout(32, 22),
    TensorType.Q5_1: BlockLayout(32, 24),
    TensorType.Q8_0: BlockLayout(32, 34),
    TensorType.Q2_K: BlockLayout(256, 84),
    TensorType.Q3_K: BlockLayout(256, 110),
    TensorType.Q4_K: BlockLayout(256, 144),
    TensorType.Q5_K: BlockLayout(256, 176),
    TensorType.Q6_K: BlockLayout(256, 210),
    TensorType.IQ2_XXS: BlockLayout(256, 66),
    TensorType.IQ2_XS: BlockLayout(256, 74),
    TensorType.IQ3_XXS: BlockLayout(256, 98),
    TensorType.IQ1_S: BlockLayout(256, 50),
    TensorType.IQ4_NL: BlockLayout(32, 18),
    TensorType.IQ3_S: BlockLayout(256, 110),
    TensorType.IQ2_S: BlockLayout(256, 82),
    TensorType.IQ4_XS: BlockLayout(256, 136),
    TensorType.I8: BlockLayout(1, 1),
    TensorType.I16: BlockLayout(1, 2),
    TensorType.I32: BlockLayout(1, 4),
    TensorType.I64: BlockLayout(1, 8),
    TensorType.F64: BlockLayout(1, 8),
    TensorType.IQ1_M: BlockLayout(256, 56),
    TensorType.BF16: BlockLayout(1, 2),
    TensorType.TQ1_0: BlockLayout(256, 54),
    TensorType.TQ2_0: BlockLayout(256, 66),
    TensorType.MXFP4: BlockLayout(32, 17),
    TensorType.NVFP4: BlockLayout(64, 36),
}
