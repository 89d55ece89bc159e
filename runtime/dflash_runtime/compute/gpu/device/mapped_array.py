"""Host memory mapped for kernels, as arrays that launches accept."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from dflash_runtime.compute.gpu.device.device import KernelDevice

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


def first_rows(array: Any, num_rows: int) -> Any:
    """The first rows of a MappedArray."""
    shape = num_rows, *array.shape[1:]
    return replace(array, shape=shape, size=prod(shape))


def layout_bytes(layout: Layout) -> int:
    """Bytes of a MappedBlock, without the rest of its last page."""
    sizes = (prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layout)
    return sum(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT for num_bytes in sizes)


class MappedBlock:
    """Several zeroed arrays in one mapped piece of host memory, in pages of their own: drivers lock
    whole pages, each only once.

    Owns: the mapping. Raises: DeviceUnavailable.
    """

    def __init__(self, device: KernelDevice, layout: Layout) -> None:
        offsets, end = [], 0
        for shape, dtype in layout:
            offsets.append(end)
            num_bytes = prod(shape) * np.dtype(dtype).itemsize
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        num_pages = max(1, -(-layout_bytes(layout) // mmap.PAGESIZE))
        memory = np.frombuffer(mmap.mmap(-1, num_pages * mmap.PAGESIZE), np.uint8)
        self._mapping = device.map_host(memory)
        self.host: list[Any] = []
        """The arrays for the host."""
        self.device: list[Any] = []
        """The same as MappedArrays for kernels."""
        family, _, index = device.name.partition(":")
        device_id = None if family == "host" else int(index)
        for (shape, dtype), offset in zip(layout, offsets, strict=True):
            num_bytes = prod(shape) * np.dtype(dtype).itemsize
            array = memory[offset : offset + num_bytes].view(dtype).reshape(shape)
            self.host.append(array)
            place = _Place(device_id, self._mapping.device_address + offset)
            mapped = MappedArray(array.shape, array.dtype, array.size, place, place, place)
            self.device.append(mapped)

    def close(self) -> None:
        """Unmap it; no kernel that uses it may be running. Idempotent."""
        self._mapping.close()
