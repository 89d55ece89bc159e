"""Host memory mapped for kernels, as arrays that launches accept."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.typing import DTypeLike

from dflash_protocol.ids import AnyArray, I32Array
from dflash_runtime.compute.gpu.device.device import HostMapping, KernelDevice

_ALIGNMENT = 256
"""Alignment of each array in a block, the same as of device arrays."""

Layout: TypeAlias = Sequence[tuple[tuple[int, ...], DTypeLike]]
"""Shapes and types."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A mapped array's device and address, with the attributes of CuPy's arrays."""

    id: int | None = None
    ptr: int = 0
    c_contiguous: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class MappedArray:
    """Mapped host memory; has the attributes of device.DeviceArray that launches read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int
    device: _Place
    data: _Place
    flags: _Place


def whole_pages(count: int, fill: int) -> I32Array:
    """At least `count` elements in pages of their own: drivers lock whole pages, each only once.

    Shapes: result [count or more] int32.
    """
    array = _pages(4 * count).view(np.int32)
    array[:] = fill
    return array


def mapped_array(
    device: KernelDevice, mapping: HostMapping, array: AnyArray, *, offset_bytes: int = 0
) -> MappedArray:
    """An array inside mapped memory, `offset_bytes` from its start, with its device address."""
    family, _, index = device.name.partition(":")
    address = mapping.device_address + offset_bytes
    place = _Place(None if family == "host" else int(index), address)
    return MappedArray(array.shape, array.dtype, array.size, place, place, place)


class MappedBlock:
    """Several zeroed arrays in one mapped piece of host memory.

    Owns: the mapping. Raises: DeviceUnavailable.
    """

    def __init__(self, device: KernelDevice, layout: Layout) -> None:
        offsets, end = [], 0
        for shape, dtype in layout:
            offsets.append(end)
            num_bytes = prod(shape) * np.dtype(dtype).itemsize
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        memory = _pages(end)
        self._mapping = device.map_host(memory)
        self.host: list[Any] = []
        """The arrays for the host."""
        self.device: list[Any] = []
        """The same as MappedArrays for kernels."""
        for (shape, dtype), offset in zip(layout, offsets, strict=True):
            num_bytes = prod(shape) * np.dtype(dtype).itemsize
            array = memory[offset : offset + num_bytes].view(dtype).reshape(shape)
            self.host.append(array)
            self.device.append(mapped_array(device, self._mapping, array, offset_bytes=offset))

    def close(self) -> None:
        """Unmap it; no kernel that uses it may be running. Idempotent."""
        self._mapping.close()


def _pages(num_bytes: int) -> npt.NDArray[np.uint8]:
    whole = max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
    return np.frombuffer(mmap.mmap(-1, whole), np.uint8)
