"""Arithmetic and tile sizes of prefill's products on a device.

Sizes never decide bits: a product's terms are always added in order of columns (gemm_tile.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from dflash_adapters.quant import TensorType
from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.gpu.device.device import KernelDevice


class ProductKind(IntEnum):
    """PRODUCT of gemm_tile.cuh."""

    FLOAT = 0
    """Floats by FMA: for F32 matrices, on every device."""
    HALF = 1
    """Halves by FMA with float32 sums, where there are no tensor cores."""
    TENSOR = 2
    """Halves on tensor cores with float32 sums."""


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

    @property
    def segment(self) -> int:
        """Elements of an activation row that are scaled by the same power of two."""
        return self.columns // self.warps_n // 2

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


TENSOR_TILES = (
    Tile(rows=128, columns=256, warps_m=2, warps_n=4, stages=3),
    Tile(rows=128, columns=128, warps_m=2, warps_n=2, stages=3),
    Tile(rows=128, columns=128, warps_m=2, warps_n=2, stages=2),
)
"""Largest first: larger tiles read their operands less often."""

FEW_TILE = Tile(rows=64, columns=64, warps_m=2, warps_n=2, stages=4, blocks_per_sm=3)
"""For dense matrices with fewer large tiles than multiprocessors."""

FMA_TILE = Tile(rows=128, columns=64, warps_m=4, warps_n=2, stages=2)

DENSE_FLOAT_TILE = Tile(rows=64, columns=64, warps_m=4, warps_n=2, stages=2, blocks_per_sm=2)
"""Routers are small: more tiles reach more of the device."""


@dataclass(frozen=True)
class Products:
    """A device's tiles for halves and for floats."""

    half: ProductKind
    half_tile: Tile
    float_tile: Tile = FMA_TILE
    dense_float_tile: Tile = DENSE_FLOAT_TILE
    few_tile: Tile | None = None
    """See FEW_TILE; for halves."""

    def __post_init__(self) -> None:
        if self.half is ProductKind.FLOAT:
            raise ValueError("halves are not multiplied as floats")
        if self.half_tile.rows != self.float_tile.rows:
            raise ValueError("groups are cut into tiles of one size")

    @property
    def tile_rows(self) -> int:
        """Rows of the tiles that groups of pairs are cut into."""
        return self.half_tile.rows

    def of(self, parts: int) -> tuple[ProductKind, Tile]:
        """For experts, with activations in that many rows of halves each; 0: floats."""
        return (self.half, self.half_tile) if parts else (ProductKind.FLOAT, self.float_tile)

    def of_dense(self, parts: int, *, is_few: bool = False) -> tuple[ProductKind, Tile]:
        """The same for dense matrices; `is_few`: there would be few large tiles."""
        if parts and is_few and self.few_tile is not None:
            return self.half, self.few_tile
        return (self.half, self.half_tile) if parts else (ProductKind.FLOAT, self.dense_float_tile)


def products_of(device: KernelDevice) -> Products:
    """The fastest products of the device."""
    if device.capabilities.mma and device.lanes == 32:
        for tile in TENSOR_TILES:
            if tile.shared_bytes <= device.max_shared_bytes:
                return Products(ProductKind.TENSOR, tile, few_tile=FEW_TILE)
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
