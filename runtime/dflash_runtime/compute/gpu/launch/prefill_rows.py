"""Rows of activations for prefill's products: scaled halves that cannot overflow, or floats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.gpu.device.device import (
    DeviceArray,
    KernelDevice,
    address,
    optional_address,
)
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct

_ROW_THREADS = 256

HalfRowsArgs = kernel_struct("half_rows.cu", "HalfRowsArgs")


@dataclass(slots=True, eq=False)  # as DenseProduct is
class PreparedRows:
    """Rows on the device.

    Shapes: floats [T, columns] float32; halves [parts, max_rows, columns] uint16, scales [T]
    float32: factors of the sum of the parts. There are no halves if parts is 0.
    """

    num_rows: int
    columns: int
    parts: int
    floats: DeviceArray
    halves: DeviceArray | None
    scales: DeviceArray | None
    half_addresses: tuple[int, int, int] | None
    """Addresses of rows and scales, and bytes from one part to the next."""

    def addresses(self, parts: int) -> tuple[int, int, int]:
        """Addresses of rows in that many parts and of their scales, and bytes between parts.

        Raises: SettingsError if the rows have fewer parts.
        """
        if parts == 0:
            return address(self.floats), 0, 0
        if self.half_addresses is None or parts > self.parts:
            raise SettingsError(f"rows of {self.parts} parts are multiplied as {parts}")
        return self.half_addresses


class RowPreparer:
    """Buffers for up to `max_rows` rows, overwritten by each use.

    `parts` is the most that any product of these rows needs (prefill_tiles.activation_parts).
    """

    def __init__(self, device: KernelDevice, *, columns: int, max_rows: int, parts: int) -> None:
        if columns <= 0 or columns % 32 or max_rows <= 0 or not 0 <= parts <= 2:
            raise SettingsError(
                f"{max_rows} rows of {columns} columns in {parts} parts: columns must be a "
                f"multiple of 32"
            )
        self.columns = columns
        self.max_rows = max_rows
        self.parts = parts
        self._device = device
        defines = {"NUM_COLUMNS": columns, "NUM_PARTS": max(parts, 1)}
        self._kernel = device.module("half_rows.cu", defines).kernel("half_rows", HalfRowsArgs)
        self._floats: DeviceArray | None = None
        self._halves = self._scales = None
        if parts:
            self._halves = device.empty((parts, max_rows, columns), np.uint16)
            self._scales = device.empty(max_rows, np.float32)
        self._args = HalfRowsArgs()
        """Arguments that all rows have in common."""
        self._half_addresses: tuple[int, int, int] | None = None
        if self._halves is not None and self._scales is not None:
            part_bytes = self._halves.nbytes // parts
            self._half_addresses = address(self._halves), address(self._scales), part_bytes
            self._args.halves, self._args.scales, self._args.part_bytes = self._half_addresses

    def reserve_floats(self) -> None:
        """Allocate memory for normalised floats. Call it before a capture."""
        if self._floats is None:
            self._floats = self._device.empty((self.max_rows, self.columns), np.float32)

    def prepare(
        self,
        x: DeviceArray,
        *,
        norm: DeviceArray | None = None,
        eps: float = 0.0,
        wants_floats: bool = False,
    ) -> PreparedRows:
        """Rows for products; with `norm` ``norm * x / sqrt(mean(x²) + eps)`` of them.

        `wants_floats` says that normalised rows are also multiplied by F32 matrices. Halves differ
        from x by their rounding; with two parts by next to nothing. NaN stays NaN.
        Shapes: x [T, columns] float32; norm [columns] float32.
        Raises: SettingsError for other shapes or more rows than there is room for.
        """
        num_rows = x.shape[0]
        if x.shape != (num_rows, self.columns) or not 0 < num_rows <= self.max_rows:
            raise SettingsError(f"x is {x.shape}, room for {(self.max_rows, self.columns)}")
        if norm is not None and norm.shape != (self.columns,):
            raise SettingsError(f"a norm of {norm.shape} for {self.columns} columns")
        if x.dtype != np.float32 or (norm is not None and norm.dtype != np.float32):
            raise SettingsError("rows and norms must be float32")
        floats = x
        makes_floats = norm is not None and (wants_floats or not self.parts)
        if makes_floats:
            self.reserve_floats()
            assert self._floats is not None
            floats = self._floats[:num_rows]
        if self.parts or makes_floats:
            args = self._args
            args.x = address(x)
            args.norm = optional_address(norm)
            args.floats = address(floats) if makes_floats else 0
            args.eps = eps
            self._device.launch(self._kernel, (num_rows, 1, 1), _ROW_THREADS, args)
        return PreparedRows(
            num_rows=num_rows,
            columns=self.columns,
            parts=self.parts,
            floats=floats,
            halves=self._halves,
            scales=self._scales,
            half_addresses=self._half_addresses,
        )
