"""Weights on the device: read from the file and repacked by the device."""

from __future__ import annotations

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_protocol.errors import UnsupportedModel
from dflash_protocol.ids import U8Array
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.launch.decode_tokens import Repack
from dflash_runtime.compute.gpu.launch.layouts import FIELDS, DeviceMatrix, is_native, row_bytes

STAGED_BYTES = 64 << 20
"""Bytes of the file repacked at once, which are on the device twice meanwhile."""

PRODUCT_COLUMNS = 32
"""Values that products of all types process at once."""


class Uploader:
    """Uploads rows of files to the device."""

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._repacks: dict[tuple[TensorType, int], Repack] = {}
        self._staging: DeviceArray | None = None

    def matrix(self, file: GgufFile, tensor_name: str) -> DeviceMatrix:
        """A two-dimensional tensor, or a vector as a matrix of one row.

        Raises: UnsupportedModel if there are no kernels for its type; ValueError if it has more
        dimensions; DeviceOutOfMemory.
        """
        tensor = file.tensor(tensor_name)
        if len(tensor.shape) > 2:
            raise ValueError(f"{tensor_name} is {tensor.shape}, not a matrix")
        rows, columns = tensor.num_rows, tensor.columns
        require_kernels(file, tensor_name, tensor.tensor_type, columns=columns)
        weights = self._device.empty(rows * row_bytes(tensor.tensor_type, columns), np.uint8)
        self.fill(weights, file.tensor_bytes(tensor_name), tensor.tensor_type, columns=columns)
        return DeviceMatrix(rows, columns, tensor.tensor_type, weights)

    def fill(
        self, weights: DeviceArray, raw: U8Array, tensor_type: TensorType, *, columns: int
    ) -> None:
        """Write rows of a file, in their order, to the beginning of `weights`.

        Shapes: raw [rows * the file's row bytes] uint8; weights at least [rows * row_bytes].
        """
        native_bytes = tensor_type.row_bytes(columns)
        device_bytes = row_bytes(tensor_type, columns)
        if is_native(tensor_type, columns):
            self._device.write(weights[: raw.size], raw)
            return
        num_rows = raw.size // native_bytes
        at_once = max(1, STAGED_BYTES // native_bytes)
        if self._staging is None or self._staging.size < min(at_once, num_rows) * native_bytes:
            self._staging = self._device.empty(min(at_once, num_rows) * native_bytes, np.uint8)
        for first in range(0, num_rows, at_once):
            end = min(first + at_once, num_rows)
            native = self._staging[: (end - first) * native_bytes]
            self._device.write(native, raw[first * native_bytes : end * native_bytes])
            out = weights[first * device_bytes : end * device_bytes]
            self.lay_out(native, out, tensor_type, columns=columns)

    def lay_out(
        self, native: DeviceArray, out: DeviceArray, tensor_type: TensorType, *, columns: int
    ) -> None:
        """Repack rows of a file that are on the device already, or copy them if the layout is the
        file's.

        Shapes: native [rows * the file's row bytes], out [rows * row_bytes] uint8.
        """
        if is_native(tensor_type, columns):
            self._device.copy(out, native)
            return
        key = tensor_type, columns
        if key not in self._repacks:
            self._repacks[key] = Repack(self._device, tensor_type, columns=columns)
        self._repacks[key].launch(native, out)

    def finish(self) -> None:
        """Free memory that only uploads need."""
        self._staging = None


def require_kernels(
    file: GgufFile, tensor_name: str, tensor_type: TensorType, *, columns: int
) -> None:
    """Raises: UnsupportedModel if GPU kernels cannot read such rows."""
    reason = ""
    if tensor_type not in FIELDS:
        reason = tensor_type.name
    elif columns % PRODUCT_COLUMNS:
        reason = f"rows of {columns} values, which are no multiple of {PRODUCT_COLUMNS}"
    if reason:
        raise UnsupportedModel(
            # docs: this model's tensors have a type or a width that only CPUs compute
            f"there are no GPU kernels for {reason}; use --device cpu",
            path=file.path,
            field=tensor_name,
        )
