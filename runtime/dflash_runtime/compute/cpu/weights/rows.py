"""How kernels read rows: the fields of a layout, and functions that expand rows to float32."""

from __future__ import annotations

from functools import cache

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.cpu.compile.compiling import Kernel, RowFunction
from dflash_runtime.compute.cpu.simd.types import i64
from dflash_runtime.compute.cpu.weights import (
    rows_32,
    rows_256,
    rows_codebook,
    rows_dense,
    rows_nvfp4,
    rows_ternary,
)

ROW_BYTES, COLUMNS, UNPACK, MULTIPLY_ONE, EXPAND, FLOAT_ROWS, MULTIPLY = range(7)
"""Fields of a row layout, int64: all that kernels need to know of rows except their address.
Functions are addresses; MULTIPLY is followed by one for each group size."""

_EXPAND: dict[TensorType, Kernel] = {
    TensorType.F32: rows_dense.expand_f32,
    TensorType.F64: rows_dense.expand_f64,
    TensorType.F16: rows_dense.expand_f16,
    TensorType.BF16: rows_dense.expand_bf16,
    TensorType.Q4_0: rows_32.expand_q4_0,
    TensorType.Q4_1: rows_32.expand_q4_1,
    TensorType.Q5_0: rows_32.expand_q5_0,
    TensorType.Q5_1: rows_32.expand_q5_1,
    TensorType.Q8_0: rows_32.expand_q8_0,
    TensorType.IQ4_NL: rows_32.expand_iq4_nl,
    TensorType.MXFP4: rows_32.expand_mxfp4,
    TensorType.Q2_K: rows_256.expand_q2_k,
    TensorType.Q3_K: rows_256.expand_q3_k,
    TensorType.Q4_K: rows_256.expand_q4_k,
    TensorType.Q5_K: rows_256.expand_q5_k,
    TensorType.Q6_K: rows_256.expand_q6_k,
    TensorType.IQ4_XS: rows_256.expand_iq4_xs,
    TensorType.NVFP4: rows_nvfp4.expand_nvfp4,
    TensorType.IQ2_XXS: rows_codebook.expand_iq2_xxs,
    TensorType.IQ2_XS: rows_codebook.expand_iq2_xs,
    TensorType.IQ2_S: rows_codebook.expand_iq2_s,
    TensorType.IQ3_XXS: rows_codebook.expand_iq3_xxs,
    TensorType.IQ3_S: rows_codebook.expand_iq3_s,
    TensorType.IQ1_S: rows_codebook.expand_iq1_s,
    TensorType.IQ1_M: rows_codebook.expand_iq1_m,
    TensorType.TQ1_0: rows_ternary.expand_tq1_0,
    TensorType.TQ2_0: rows_ternary.expand_tq2_0,
}


@cache
def expand_function(tensor_type: TensorType) -> RowFunction:
    """``function(row, columns, out)``: expands a stored row to float32."""
    return RowFunction(_EXPAND[tensor_type], *[i64] * 3)
