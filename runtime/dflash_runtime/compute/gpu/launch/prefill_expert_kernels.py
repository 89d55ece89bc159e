"""Kernels of a prefill chunk's expert FFNs: their arguments and compile-time shapes."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.gpu.device.device import Kernel, KernelDevice
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.layouts import row_bytes
from dflash_runtime.compute.gpu.launch.prefill_tiles import (
    ProductKind,
    Products,
    Tile,
    activation_parts,
)
from dflash_runtime.compute.gpu.launch.prefill_weights import product_row_bytes

ActivationArgs = kernel_struct("activation.cuh", "ActivationArgs")
GemmGateUpArgs = kernel_struct("gemm_gate_up.cu", "GemmGateUpArgs")
LevelArgs = kernel_struct("level_activations.cu", "LevelArgs")
GemmDownArgs = kernel_struct("gemm_down.cu", "GemmDownArgs")
CombineArgs = kernel_struct("combine.cu", "CombineArgs")


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


class ExpertKernelCache:
    """The kernels for experts of one size, each compiled on its first use."""

    def __init__(
        self, device: KernelDevice, products: Products, *, hidden_size: int, ffn_size: int
    ) -> None:
        self._device = device
        self._products = products
        self._sizes = hidden_size, ffn_size
        self._kernels: dict[tuple[int, int], ExpertKernels] = {}
        self._stored_gate_up: dict[tuple[TensorType, int], Kernel] = {}
        self._stored_down: dict[TensorType, Kernel] = {}

    def of(self, hidden_parts: int, down_parts: int) -> ExpertKernels:
        """For rows of so many parts (activation_parts), times matrices converted to halves or
        stored as products read them."""
        kernels = self._kernels.get((hidden_parts, down_parts))
        if kernels is None:
            shape, products = ExpertShape(*self._sizes, hidden_parts, down_parts), self._products
            gate_up_product, tile = products.of(hidden_parts)
            down_product = products.of(down_parts)
            kernels = ExpertKernels(
                gate_up=self._gate_up(shape.gate_up_defines(gate_up_product, tile)),
                level=self._device.module("level_activations.cu", shape.level_defines(tile)).kernel(
                    "level_activations", LevelArgs
                ),
                down=self._down(shape.down_defines(*down_product)),
            )
            self._kernels[hidden_parts, down_parts] = kernels
        return kernels

    def stored_gate_up(self, tensor_type: TensorType, down_parts: int) -> Kernel:
        """ExpertKernels.gate_up for matrices read without conversion to halves."""
        kernel = self._stored_gate_up.get((tensor_type, down_parts))
        if kernel is None:
            parts = activation_parts((tensor_type,))
            shape = ExpertShape(*self._sizes, parts, down_parts)
            kernel = self._gate_up(shape.gate_up_defines(*self._products.of(parts), tensor_type))
            self._stored_gate_up[tensor_type, down_parts] = kernel
        return kernel

    def stored_down(self, tensor_type: TensorType) -> Kernel:
        """ExpertKernels.down for such matrices."""
        kernel = self._stored_down.get(tensor_type)
        if kernel is None:
            parts = activation_parts((tensor_type,))
            shape = ExpertShape(*self._sizes, 0, parts)
            kernel = self._down(shape.down_defines(*self._products.of(parts), tensor_type))
            self._stored_down[tensor_type] = kernel
        return kernel

    def _gate_up(self, defines: dict[str, int | str]) -> Kernel:
        return self._device.module("gemm_gate_up.cu", defines).kernel(
            "gemm_gate_up", GemmGateUpArgs
        )

    def _down(self, defines: dict[str, int | str]) -> Kernel:
        return self._device.module("gemm_down.cu", defines).kernel("gemm_down", GemmDownArgs)
