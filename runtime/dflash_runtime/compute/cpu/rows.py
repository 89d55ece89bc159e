"""Which functions expand and multiply rows of each tensor type; compiled when a type is first met.

A type that is missing here is expanded to F32 when it is loaded; see matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.cpu import rows_32, rows_256, rows_dense, vector
from dflash_runtime.compute.cpu.compiling import Kernel, RowFunction, compile_row_function

_EXPAND: dict[TensorType, Kernel] = {
    TensorType.F32: rows_dense.expand_f32,
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
}

_FUSED_DOT: dict[TensorType, Kernel] = {TensorType.Q8_0: rows_32.dot_q8_0}


@dataclass(frozen=True, slots=True, eq=False)
class RowKernels:
    """Compiled row functions of one type, by address; see rows_dense for their arguments.

    ``dot`` is absent (None) where a row is expanded first and then multiplied as F32.
    """

    expand: RowFunction
    dot: RowFunction | None


def is_native(tensor_type: TensorType) -> bool:
    """Whether kernels read this type as it is stored."""
    return tensor_type in _EXPAND


@cache
def row_kernels(tensor_type: TensorType) -> RowKernels:
    """The functions of a native type."""
    i64 = vector.i64
    fused = _FUSED_DOT.get(tensor_type)
    if tensor_type is TensorType.F32:
        dot: RowFunction | None = dot_f32()
    elif fused is not None:
        dot = compile_row_function(fused, vector.f32, i64, i64, i64)
    else:
        dot = None
    expand = compile_row_function(_EXPAND[tensor_type], vector.void, i64, i64, i64)
    return RowKernels(expand, dot)


@cache
def dot_f32() -> RowFunction:
    """Multiplies an expanded row."""
    return compile_row_function(rows_dense.dot_f32, vector.f32, *[vector.i64] * 3)


@cache
def dot_f32_by_4() -> RowFunction:
    """Multiplies an expanded row with four vectors."""
    return compile_row_function(rows_dense.dot_f32_by_4, vector.void, *[vector.i64] * 8)
