"""Memory of the host that kernels are given: made for it, and named as they want it."""

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
"""Of each array of a block, as that of arrays of a device."""

Layout: TypeAlias = Sequence[tuple[tuple[int, ...], DTypeLike]]
"""Shapes and types."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a mapped array is on a device, in the words that CuPy has for it."""

    id: int | None = None
    ptr: int = 0
    c_contiguous: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class MappedArray:
    """Memory of the host as kernels are given it: of a device.DeviceArray, what is needed here."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int
    device: _Place
    data: _Place
    flags: _Place


def whole_pages(count: int, fill: int) -> I32Array:
    """At least so many elements, in pages that nothing else is in: drivers lock pages, each once.

    Shapes: result [count or more] int32.
    """
    array = _pages(4 * count).view(np.int32)
    array[:] = fill
    return array


def mapped_array(
    device: KernelDevice, mapping: HostMapping, array: AnyArray, *, offset_bytes: int = 0
) -> MappedArray:
    """An array that was mapped, or lies in what was, at the address that the device has for it."""
    family, _, index = device.name.partition(":")
    address = mapping.device_address + offset_bytes
    place = _Place(None if family == "host" else int(index), address)
    return MappedArray(array.shape, array.dtype, array.size, place, place, place)


class MappedBlock:
    """Several arrays in one mapped piece of the host's memory, zero to begin with.

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
        """As the host sees them."""
        self.device: list[Any] = []
        """As kernels do: MappedArrays, which launch records take as arrays of the device."""
        for (shape, dtype), offset in zip(layout, offsets, strict=True):
            num_bytes = prod(shape) * np.dtype(dtype).itemsize
            array = memory[offset : offset + num_bytes].view(dtype).reshape(shape)
            self.host.append(array)
            self.device.append(mapped_array(device, self._mapping, array, offset_bytes=offset))

    def close(self) -> None:
        """Nothing that uses it may still run. Twice does nothing."""
        self._mapping.close()


def _pages(num_bytes: int) -> npt.NDArray[np.uint8]:
    whole = max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
    return np.frombuffer(mmap.mmap(-1, whole), np.uint8)
