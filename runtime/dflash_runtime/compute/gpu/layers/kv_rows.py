"""Keys and values of a layer on a device, in the layout of kernels/attention/kv_rows.cuh."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from dflash_adapters.spec import KvLayer
from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.sliding_window import MOST_KEPT, WindowRows, num_rows

LARGEST_HEAD = 256
"""Most elements of a head, which kernels keep in registers."""

Q8_BLOCK = 32

_MOST_POSITIONS = 1 << 24
"""Bound that keeps positions, and rows times heads, far inside 32 bits."""

_ELEMENTS: dict[KvType, type[np.generic]] = {
    KvType.F32: np.float32,
    KvType.F16: np.float16,
    KvType.Q8_0: np.int8,
}


def _rows_kept(kv: KvLayer, capacity: int) -> int:
    """Positions that a layer has rows for: those of a window if that, with all of its snapshots,
    takes no more memory than rows for all positions, which need no snapshots."""
    in_window = num_rows(kv.mask, capacity)
    return in_window if in_window * (1 + MOST_KEPT) <= capacity else capacity


class DeviceWindowRows(WindowRows):
    """WindowRows on a device: the positions that one layer has rows of."""

    __slots__ = ("_device",)

    def __init__(self, device: KernelDevice, kv: KvLayer, capacity: int) -> None:
        super().__init__(kv.mask, capacity)
        self.num_rows = _rows_kept(kv, capacity)
        self.is_window = self.num_rows < capacity
        self._device = device

    def empty_like(self, array: DeviceArray) -> DeviceArray:
        return self._device.empty(array.shape, array.dtype)

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        self._device.copy(target, source)


def row_elements(kv_type: KvType, dim: int) -> int:
    """Elements of a cached row of `dim` values: whole loads of 16 bytes, whole blocks.

    Raises: SettingsError if the kernels cannot take heads of this size.
    """
    if not 1 <= dim <= LARGEST_HEAD:
        raise SettingsError(
            f"heads of {dim} elements: attention on a GPU takes from 1 to {LARGEST_HEAD}"
        )
    unit = Q8_BLOCK if kv_type is KvType.Q8_0 else 16
    return -(-dim // unit) * unit


@dataclass(frozen=True, slots=True, eq=False)
class KvRows:
    """Keys or values of one layer.

    Shapes: elements [kv_heads, N, row] of the cache's element type, zeros past the head's dim;
    scales [kv_heads, N, row / 32] float16, only of q8_0. N are all positions, or those of a window.
    """

    elements: DeviceArray
    scales: DeviceArray | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerKvCache:
    """One layer of a cache."""

    kv: KvLayer
    kv_type: KvType
    capacity: int
    """Positions."""
    keys: KvRows
    values: KvRows

    @property
    def num_rows(self) -> int:
        """Positions that it can hold at the same time."""
        return self.keys.elements.shape[1]

    @property
    def window_rows(self) -> int:
        """The same for a window; 0 if it holds all positions."""
        return self.num_rows if self.num_rows < self.capacity else 0


def array_bytes(kv: KvLayer, capacity: int, kv_type: KvType) -> list[int]:
    """Bytes of each array of one layer on the device: keys and values, and scales of q8_0.

    Raises: SettingsError for heads or a capacity that the kernels do not support.
    """
    check_capacity(capacity)
    if kv.num_heads < 1:
        raise SettingsError(f"{kv.num_heads} key/value heads")
    all_rows, sizes = kv.num_heads * _rows_kept(kv, capacity), []
    for row in (row_elements(kv_type, kv.key_dim), row_elements(kv_type, kv.value_dim)):
        sizes.append(all_rows * row * np.dtype(_ELEMENTS[kv_type]).itemsize)
        if kv_type is KvType.Q8_0:
            sizes.append(2 * _scale_halves(all_rows, row))
    return sizes


def layer_bytes(kv: KvLayer, capacity: int, kv_type: KvType) -> int:
    """All of them together. Raises: SettingsError."""
    return sum(array_bytes(kv, capacity, kv_type))


def bytes_with_snapshots(kv: KvLayer, capacity: int, kv_type: KvType) -> int:
    """The same with the snapshots that an engine may keep."""
    is_window = _rows_kept(kv, capacity) < capacity
    return layer_bytes(kv, capacity, kv_type) * (1 + MOST_KEPT if is_window else 1)


def _scale_halves(all_rows: int, row: int) -> int:
    """Kernels read two scales at a time, the last too."""
    return -(-all_rows * (row // Q8_BLOCK) // 2) * 2


def check_capacity(capacity: int) -> None:
    """Raises: SettingsError if the kernels do not support so many positions."""
    if not 1 <= capacity <= _MOST_POSITIONS:
        raise SettingsError(
            f"a context of {capacity} positions; from 1 to {_MOST_POSITIONS} are possible"
        )


def new_layer_cache(
    device: KernelDevice, kv: KvLayer, *, capacity: int, kv_type: KvType
) -> LayerKvCache:
    """A new cache, uninitialised. Raises: DeviceOutOfMemory."""
    kept = _rows_kept(kv, capacity)

    def rows(dim: int) -> KvRows:
        row = row_elements(kv_type, dim)
        scales = None
        if kv_type is KvType.Q8_0:
            shape = (kv.num_heads, kept, row // Q8_BLOCK)
            halves = device.empty(_scale_halves(kv.num_heads * kept, row), np.float16)
            scales = halves[: prod(shape)].reshape(shape)
        return KvRows(device.empty((kv.num_heads, kept, row), _ELEMENTS[kv_type]), scales)

    return LayerKvCache(kv, kv_type, capacity, rows(kv.key_dim), rows(kv.value_dim))
