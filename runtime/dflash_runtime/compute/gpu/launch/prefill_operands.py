"""What prefill's products read: tiles and their arithmetic, rows of activations, weights.

Sizes of tiles never decide bits: a product's terms are always added in order of columns
(gemm_tile.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np

from dflash_adapters.quant import TensorType
from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.gpu.device.device import (
    FLOAT32,
    DeviceArray,
    Kernel,
    KernelDevice,
    PreparedLaunch,
    address,
    optional_address,
)
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.layouts import (
    FIELDS,
    UNIT,
    num_units,
    row_bytes,
)

_THREADS = 256

HalfRowsArgs = kernel_struct("half_rows.cu", "HalfRowsArgs")
MatrixChoice = kernel_struct("groups.cuh", "MatrixChoice")
DequantiseArgs = kernel_struct("dequantise.cu", "DequantiseArgs")


class ProductKind(IntEnum):
    """PRODUCT of gemm_tile.cuh."""

    FLOAT = 0
    """Floats by FMA: for F32 matrices, on every device."""
    HALF = 1
    """Halves by FMA with float32 sums, where there are no tensor cores."""
    TENSOR = 2
    """Halves on tensor cores with float32 sums."""


SEGMENT = 16
"""Elements of an activation row that are scaled by the same power of two."""


@dataclass(frozen=True)
class Tile:
    """Output tile of a block, and its warps of 32 threads."""

    rows: int
    columns: int
    warps_m: int
    warps_n: int
    stages: int
    blocks_per_sm: int = 1

    @property
    def num_threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def shared_bytes(self) -> int:
        return 128 * self.stages * (self.rows + self.columns)

    def defines(self, product: ProductKind) -> dict[str, int | str]:
        """Defines of gemm_tile.cuh."""
        return {
            "PRODUCT": int(product),
            "TILE_M": self.rows,
            "TILE_N": self.columns,
            "WARPS_M": self.warps_m,
            "WARPS_N": self.warps_n,
            "STAGES": self.stages,
            "BLOCKS_PER_SM": self.blocks_per_sm,
        }


FMA_TILE = Tile(rows=128, columns=64, warps_m=4, warps_n=2, stages=2)

DENSE_FLOAT_TILE = Tile(rows=64, columns=64, warps_m=4, warps_n=2, stages=2, blocks_per_sm=2)
"""Routers are small: more tiles reach more of the device."""

_FEW_FLOATS_TILE = Tile(rows=16, columns=32, warps_m=1, warps_n=2, stages=4, blocks_per_sm=8)
"""For routers of short chunks: a block of the usual tile takes as long whatever their length."""


@dataclass(frozen=True)
class Products:
    """A device's tiles for halves and for floats."""

    half: ProductKind
    half_tile: Tile
    float_tile: Tile = FMA_TILE
    few_tile: Tile | None = None
    """For halves times dense matrices with fewer large tiles than multiprocessors."""
    stored_tile: Tile | None = None
    """For halves times experts' matrices that the product converts itself."""

    def __post_init__(self) -> None:
        if self.half is ProductKind.FLOAT:
            raise ValueError("halves are not multiplied as floats")
        tiles = self.half_tile, self.float_tile, self.stored_tile or self.half_tile
        if len({each.rows for each in tiles}) > 1:
            raise ValueError("groups are cut into tiles of one size")

    @property
    def tile_rows(self) -> int:
        """Rows of the tiles that groups of pairs are cut into."""
        return self.half_tile.rows

    def of(self, parts: int, *, is_stored: bool = False) -> tuple[ProductKind, Tile]:
        """For experts, with activations in that many rows of halves each; 0: floats. `is_stored`:
        the product converts their matrices itself."""
        if is_stored and self.stored_tile is not None:
            return self.half, self.stored_tile
        return (self.half, self.half_tile) if parts else (ProductKind.FLOAT, self.float_tile)

    def of_dense(self, parts: int, *, is_few: bool = False) -> tuple[ProductKind, Tile]:
        """The same for dense matrices; `is_few`: there would be few large tiles."""
        if not parts:
            return ProductKind.FLOAT, _FEW_FLOATS_TILE if is_few else DENSE_FLOAT_TILE
        return self.half, self.few_tile if is_few and self.few_tile is not None else self.half_tile


_FEW_TILE = Tile(rows=64, columns=64, warps_m=2, warps_n=2, stages=4, blocks_per_sm=3)

TENSOR_PRODUCTS = (
    Products(
        ProductKind.TENSOR,
        Tile(rows=64, columns=256, warps_m=2, warps_n=4, stages=2, blocks_per_sm=2),
        float_tile=Tile(rows=64, columns=64, warps_m=4, warps_n=2, stages=2),
        few_tile=_FEW_TILE,
        stored_tile=Tile(rows=64, columns=128, warps_m=1, warps_n=4, stages=2, blocks_per_sm=3),
    ),
    Products(
        ProductKind.TENSOR,
        Tile(rows=128, columns=128, warps_m=2, warps_n=2, stages=3),
        few_tile=_FEW_TILE,
    ),
    Products(
        ProductKind.TENSOR,
        Tile(rows=128, columns=128, warps_m=2, warps_n=2, stages=2),
        few_tile=_FEW_TILE,
    ),
)
"""Those of tensor cores, by the shared memory that they take. The first is that of an H100 or A100:
two blocks hide what each waits for, and an expert rarely has 128 rows of a chunk."""


def products_of(device: KernelDevice) -> Products:
    """The fastest products of the device."""
    if device.capabilities.mma and device.lanes == 32:
        for products in TENSOR_PRODUCTS:
            tile = products.half_tile
            if tile.blocks_per_sm * tile.shared_bytes <= device.max_shared_bytes:
                return products
    if device.max_shared_bytes < FMA_TILE.shared_bytes:
        raise SettingsError(
            f"{device.name} has {device.max_shared_bytes} bytes of shared memory a block, "
            f"prefill needs {FMA_TILE.shared_bytes}"
        )
    return Products(ProductKind.HALF, FMA_TILE)


@cache
def activation_parts(tensor_types: tuple[TensorType, ...]) -> int:
    """Rows of halves that represent a row of activations multiplied by these types; 0: floats.

    Matrices of plain halves need two to keep their precision; for quantised ones one suffices.
    Raises: SettingsError if F32 is mixed with other types.
    """
    types = set(tensor_types)
    if types == {TensorType.F32}:
        return 0
    if TensorType.F32 in types:
        names = ", ".join(sorted(each.name for each in types))
        raise SettingsError(f"matrices of {names} cannot be multiplied together")
    return 2 if types & {TensorType.F16, TensorType.BF16} else 1


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
    halves: DeviceArray
    scales: DeviceArray
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

    `parts` is the most that any product of these rows needs (activation_parts).
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
        self._args = HalfRowsArgs()
        """Those that differ from call to call are set for each."""
        self._launches: dict[int, PreparedLaunch] = {}
        """By number of rows."""
        self._halves = device.empty((parts, max_rows, columns), np.uint16)
        self._scales = device.empty(max_rows if parts else 0, np.float32)
        self._half_addresses: tuple[int, int, int] | None = None
        if parts:
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
        if x.dtype != FLOAT32 or (norm is not None and norm.dtype != FLOAT32):
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
            launch = self._launches.get(num_rows)
            if launch is None:
                launch = PreparedLaunch(self._kernel, (num_rows, 1, 1), _THREADS, args)
                self._launches[num_rows] = launch
            self._device.start((launch,))
        return PreparedRows(
            num_rows=num_rows,
            columns=self.columns,
            parts=self.parts,
            floats=floats,
            halves=self._halves,
            scales=self._scales,
            half_addresses=self._half_addresses,
        )


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
        *,
        rows: int,
        columns: int,
        num_matrices: int = 1,
        offset_bytes: int = 0,
        **args: Any,
    ) -> tuple[PreparedLaunch, int]:
        """The launch that converts matrices, one after another, `offset_bytes` into the scratch;
        and the bytes of their halves.

        `args` are the matrices' of DequantiseArgs: `weights`, or all that chosen groups have.
        """
        num_bytes = num_matrices * rows * half_row_bytes(columns)
        if offset_bytes < 0 or offset_bytes + num_bytes > self.num_bytes:
            raise SettingsError(
                f"{num_bytes} bytes from {offset_bytes} of {self.num_bytes} bytes of scratch memory"
            )
        blocks = -(-rows * num_units(columns) // _THREADS)
        launch = PreparedLaunch(
            self.prepare(tensor_type, columns),
            (blocks, num_matrices, 1),
            _THREADS,
            DequantiseArgs(halves=self.place(offset_bytes), num_rows=rows, **args),
        )
        return launch, num_bytes
