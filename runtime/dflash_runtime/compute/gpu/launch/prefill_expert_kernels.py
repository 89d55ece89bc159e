"""Kernels of a prefill chunk's expert FFNs: their arguments and compile-time shapes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.gpu.device.device import Kernel, KernelDevice
from dflash_runtime.compute.gpu.device.kernel_variants import KernelVariant
from dflash_runtime.compute.gpu.launch.layouts import row_bytes
from dflash_runtime.compute.gpu.launch.prefill_tiles import (
    FMA_TILE,
    TENSOR_TILES,
    ProductKind,
    Products,
    Tile,
)
from dflash_runtime.compute.gpu.launch.prefill_weights import MatrixChoice, product_row_bytes


class ActivationArgs(ctypes.Structure):
    """See activation.cuh."""

    _fields_ = (
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
        ("up_offset", ctypes.c_float),
    )


class GemmGateUpArgs(ctypes.Structure):
    """See gemm_gate_up.cu."""

    _fields_ = (
        ("counts", ctypes.c_uint64),
        ("tiles", ctypes.c_uint64),
        ("token_indices", ctypes.c_uint64),
        ("hidden", ctypes.c_uint64),
        ("hidden_scales", ctypes.c_uint64),
        ("gate", ctypes.c_uint64),
        ("up", ctypes.c_uint64),
        ("gate_bias", ctypes.c_uint64),
        ("up_bias", ctypes.c_uint64),
        ("gate_scale", ctypes.c_uint64),
        ("up_scale", ctypes.c_uint64),
        ("activations", ctypes.c_uint64),
        ("shifts", ctypes.c_uint64),
        ("hidden_part_bytes", ctypes.c_uint64),
        ("activation_part_bytes", ctypes.c_uint64),
        ("gate_stride", ctypes.c_uint64),
        ("up_stride", ctypes.c_uint64),
        ("choice", MatrixChoice),
        ("form", ActivationArgs),
    )


class LevelArgs(ctypes.Structure):
    """See level_activations.cu."""

    _fields_ = (
        ("counts", ctypes.c_uint64),
        ("shifts", ctypes.c_uint64),
        ("activations", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("part_bytes", ctypes.c_uint64),
    )


class GemmDownArgs(ctypes.Structure):
    """See gemm_down.cu."""

    _fields_ = (
        ("counts", ctypes.c_uint64),
        ("tiles", ctypes.c_uint64),
        ("activations", ctypes.c_uint64),
        ("activation_scales", ctypes.c_uint64),
        ("weights", ctypes.c_uint64),
        ("down", ctypes.c_uint64),
        ("bias", ctypes.c_uint64),
        ("scale", ctypes.c_uint64),
        ("terms", ctypes.c_uint64),
        ("activation_part_bytes", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
        ("choice", MatrixChoice),
    )


class CombineArgs(ctypes.Structure):
    """See combine.cu."""

    _fields_ = (
        ("terms", ctypes.c_uint64),
        ("rows_of_tokens", ctypes.c_uint64),
        ("sums", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("out_sums", ctypes.c_uint64),
        ("pairs_per_token", ctypes.c_int32),
    )


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of an expert, and the parts in which products read rows (activation_parts)."""

    hidden_size: int
    ffn_size: int
    hidden_parts: int
    down_parts: int

    def gate_up_defines(
        self, product: ProductKind, tile: Tile, stored: TensorType | None = None
    ) -> dict[str, int | str]:
        """Defines of gemm_gate_up.cu; `stored`: the type of matrices read without conversion."""
        return {
            **tile.defines(product),
            "NUM_COLUMNS": self.hidden_size,
            "NUM_ROWS": self.ffn_size,
            "NUM_PARTS": max(self.hidden_parts, 1),
            "OUT_PARTS": self.down_parts,
            **_weight_rows(self.hidden_size, self.hidden_parts, stored),
        }

    def level_defines(self, tile: Tile) -> dict[str, int | str]:
        """Defines of level_activations.cu; `tile`: that of gate and up."""
        return {
            "NUM_COLUMNS": self.ffn_size,
            "NUM_PARTS": max(self.down_parts, 1),
            "SEGMENT": tile.segment,
            "NUM_SEGMENTS": -(-self.ffn_size // tile.segment),
        }

    def down_defines(
        self, product: ProductKind, tile: Tile, stored: TensorType | None = None
    ) -> dict[str, int | str]:
        """Defines of gemm_down.cu; `stored` as above."""
        return {
            **tile.defines(product),
            "NUM_COLUMNS": self.ffn_size,
            "NUM_ROWS": self.hidden_size,
            "NUM_PARTS": max(self.down_parts, 1),
            **_weight_rows(self.ffn_size, self.down_parts, stored),
        }


def _weight_rows(columns: int, parts: int, stored: TensorType | None) -> dict[str, int | str]:
    if stored is None:
        return {"WEIGHT_ROW_BYTES": product_row_bytes(columns, parts)}
    return {"WEIGHT_ROW_BYTES": row_bytes(stored, columns), "STORED_TYPE": int(stored)}


@dataclass(frozen=True)
class ExpertKernels:
    """The kernels, compiled for one shape."""

    gate_up: Kernel
    level: Kernel
    down: Kernel


def compile_stored_gate_up(
    device: KernelDevice, shape: ExpertShape, products: Products, *, stored: TensorType
) -> Kernel:
    """ExpertKernels.gate_up for matrices read without conversion to halves."""
    defines = shape.gate_up_defines(*products.of(shape.hidden_parts), stored)
    return device.module("gemm_gate_up.cu", defines).kernel("gemm_gate_up", GemmGateUpArgs)


def compile_stored_down(
    device: KernelDevice, shape: ExpertShape, products: Products, *, stored: TensorType
) -> Kernel:
    """ExpertKernels.down for such matrices."""
    defines = shape.down_defines(*products.of(shape.down_parts), stored)
    return device.module("gemm_down.cu", defines).kernel("gemm_down", GemmDownArgs)


def compile_expert_kernels(
    device: KernelDevice, shape: ExpertShape, products: Products
) -> ExpertKernels:
    """Compile the kernels; the device caches modules."""
    product, tile = products.of(shape.hidden_parts)
    gate_up = device.module("gemm_gate_up.cu", shape.gate_up_defines(product, tile))
    level = device.module("level_activations.cu", shape.level_defines(tile))
    down = device.module("gemm_down.cu", shape.down_defines(*products.of(shape.down_parts)))
    return ExpertKernels(
        gate_up=gate_up.kernel("gemm_gate_up", GemmGateUpArgs),
        level=level.kernel("level_activations", LevelArgs),
        down=down.kernel("gemm_down", GemmDownArgs),
    )


def _product_variants() -> Iterator[KernelVariant]:
    for product, tile, parts in (
        (ProductKind.TENSOR, TENSOR_TILES[-1], 1),
        (ProductKind.TENSOR, TENSOR_TILES[-1], 2),
        (ProductKind.HALF, FMA_TILE, 1),
        (ProductKind.HALF, FMA_TILE, 2),
        (ProductKind.FLOAT, FMA_TILE, 0),
    ):
        shape = ExpertShape(hidden_size=96, ffn_size=160, hidden_parts=parts, down_parts=parts)
        is_tensor = product is ProductKind.TENSOR
        needs, lanes = (("mma",), (32,)) if is_tensor else ((), (32, 64))
        for file, defines in (
            ("gemm_gate_up.cu", shape.gate_up_defines(product, tile)),
            ("gemm_down.cu", shape.down_defines(product, tile)),
        ):
            yield KernelVariant(file, defines, needs=needs, lanes=lanes)
    shape = ExpertShape(hidden_size=512, ffn_size=512, hidden_parts=1, down_parts=1)
    tile = TENSOR_TILES[0]
    for file, defines in (
        ("gemm_gate_up.cu", shape.gate_up_defines(ProductKind.TENSOR, tile, TensorType.Q4_K)),
        ("gemm_down.cu", shape.down_defines(ProductKind.TENSOR, tile, TensorType.Q8_0)),
    ):
        yield KernelVariant(file, defines, needs=("mma",), lanes=(32,))


KERNEL_VARIANTS = (
    *_product_variants(),
    KernelVariant("level_activations.cu", ExpertShape(96, 160, 2, 2).level_defines(FMA_TILE)),
    KernelVariant("combine.cu", {"HIDDEN": 96}),
)
