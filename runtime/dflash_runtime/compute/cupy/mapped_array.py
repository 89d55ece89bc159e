"""Memory of the host that kernels are given: made for it, and named as they want it."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_protocol.ids import AnyArray, I32Array
from dflash_runtime.compute.cupy.device import HostMapping, KernelDevice


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
    num_bytes = -(-4 * count // mmap.PAGESIZE) * mmap.PAGESIZE
    array = np.frombuffer(mmap.mmap(-1, num_bytes), np.int32)
    array[:] = fill
    return array


def mapped_array(device: KernelDevice, mapping: HostMapping, array: AnyArray) -> MappedArray:
    """An array that was mapped, at the address that the device has for it."""
    family, _, index = device.name.partition(":")
    place = _Place(None if family == "host" else int(index), mapping.device_address)
    return MappedArray(array.shape, array.dtype, array.size, place, place, place)
