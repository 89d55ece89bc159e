"""Weights for prefill's products: in the device's layout, or converted to halves in scratch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from dflash_adapters.quant import TensorType
from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.gpu.device.device import (
    DeviceArray,
    Kernel,
    KernelDevice,
    PreparedLaunch,
    address,
)
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.layouts import FIELDS, UNIT, num_units, row_bytes
from dflash_runtime.compute.gpu.launch.prefill_groups import GroupedPairs

_UNIT_THREADS = 256

MatrixChoice = kernel_struct("groups.cuh", "MatrixChoice")
DequantiseArgs = kernel_struct("dequantise.cu", "DequantiseArgs")


@dataclass(frozen=True)
class StoredProjection:
    """One projection of the experts on a device: ``y = scale * (W x) + bias``.

    Matrices lie `stride_bytes` apart, by slot (see StoredExperts), with rows as in layouts.py.
    Biases [E, rows] and scales [E] are float32 arrays by expert id, None: there are none.
    """

    tensor_type: TensorType
    weights_address: int
    stride_bytes: int
    bias: DeviceArray | None = None
    scale: DeviceArray | None = None


@dataclass(frozen=True, eq=False)
class StoredExperts:
    """The experts of one layer on a device.

    Shapes: slot_of_expert [E] int32; None: an expert's slot is its id.
    """

    gate: StoredProjection
    up: StoredProjection
    down: StoredProjection
    slot_of_expert: DeviceArray | None = None
    activation_limit: float = float("inf")
    activation_alpha: float = 1.0
    activation_up_offset: float = 0.0


AS_STORED = frozenset({TensorType.F32, TensorType.F16})
"""Types whose rows products read without conversion."""

IN_UNITS = frozenset(FIELDS) - {
    *(TensorType.F32, TensorType.F16, TensorType.BF16),
    *(TensorType.Q2_K, TensorType.Q3_K),
}
"""Types that products can convert themselves, 64 weights at a time, in the order of the row
(stored_units.cuh)."""


def half_row_bytes(columns: int) -> int:
    """Bytes of a row of halves, in scratch memory and in F16 matrices."""
    return 2 * UNIT * num_units(columns)


def product_row_bytes(columns: int, parts: int) -> int:
    """Bytes between rows of a matrix, for activations in that many parts (0: floats)."""
    return half_row_bytes(columns) if parts else row_bytes(TensorType.F32, columns)


def check_type(tensor_type: TensorType, columns: int) -> None:
    """Raises: SettingsError if prefill does not support such a matrix."""
    if tensor_type not in FIELDS:
        raise SettingsError(f"there are no GPU kernels for {tensor_type.name}")
    if columns <= 0 or columns % 32:
        raise SettingsError(f"matrices of {columns} columns: must be a multiple of 32")


class WeightScratch:
    """Device memory for halves of quantised matrices, and the kernels that fill it.

    Shared by everything that runs in one stream: each user overwrites what was there.
    """

    def __init__(self, device: KernelDevice, num_bytes: int) -> None:
        if num_bytes <= 0:
            raise SettingsError(f"{num_bytes} bytes of scratch memory")
        self.num_bytes = num_bytes
        self._device = device
        self.memory = device.empty(num_bytes, np.uint8)
        self._kernels: dict[tuple[TensorType, int], Kernel] = {}

    def place(self, offset_bytes: int = 0) -> int:
        """Its address plus `offset_bytes`."""
        return address(self.memory, offset_bytes)

    def prepare(self, tensor_type: TensorType, columns: int) -> Kernel:
        """The kernel for such rows; call it before a capture, which cannot compile."""
        key = tensor_type, columns
        if key not in self._kernels:
            check_type(tensor_type, columns)
            defines = {"WEIGHT_TYPE": int(tensor_type), "NUM_COLUMNS": columns}
            module = self._device.module("dequantise.cu", defines)
            self._kernels[key] = module.kernel("dequantise", DequantiseArgs)
        return self._kernels[key]

    def fill(
        self,
        tensor_type: TensorType,
        weights_address: int,
        *,
        rows: int,
        columns: int,
        offset_bytes: int = 0,
    ) -> tuple[PreparedLaunch, int]:
        """The launch that converts one matrix, `offset_bytes` into the scratch, and its bytes."""
        num_bytes = self._reserve(rows * half_row_bytes(columns), offset_bytes)
        args = DequantiseArgs(
            weights=weights_address, halves=self.place(offset_bytes), num_rows=rows
        )
        return self._launch(tensor_type, columns, args, num_matrices=1), num_bytes

    def fill_groups(
        self,
        projection: StoredProjection,
        groups: GroupedPairs,
        choice: ctypes.Structure,
        *,
        rows: int,
        columns: int,
        offset_bytes: int = 0,
    ) -> tuple[PreparedLaunch, int]:
        """The same for the chosen groups' matrices, one after another."""
        num_matrices: int = choice.end_group - choice.first_group
        num_bytes = num_matrices * rows * half_row_bytes(columns)
        self._reserve(num_bytes, offset_bytes)
        args = DequantiseArgs(
            counts=address(groups.counts),
            expert_ids=address(groups.expert_ids),
            weights=projection.weights_address,
            halves=self.place(offset_bytes),
            stride=projection.stride_bytes,
            choice=choice,
            num_rows=rows,
        )
        launch = self._launch(projection.tensor_type, columns, args, num_matrices=num_matrices)
        return launch, num_bytes

    def _reserve(self, num_bytes: int, offset_bytes: int) -> int:
        if offset_bytes < 0 or offset_bytes + num_bytes > self.num_bytes:
            raise SettingsError(
                f"{num_bytes} bytes from {offset_bytes} of {self.num_bytes} bytes of scratch memory"
            )
        return num_bytes

    def _launch(
        self, tensor_type: TensorType, columns: int, args: ctypes.Structure, *, num_matrices: int
    ) -> PreparedLaunch:
        kernel = self.prepare(tensor_type, columns)
        blocks = -(-args.num_rows * num_units(columns) // _UNIT_THREADS)
        return PreparedLaunch(kernel, (blocks, num_matrices, 1), _UNIT_THREADS, args)
