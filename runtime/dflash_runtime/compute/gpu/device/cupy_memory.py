"""A device's memory: arrays that CuPy allocates from a pool.

Imports CuPy when a device is opened, not before.
"""

from __future__ import annotations

import importlib
from collections import deque
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dflash_protocol.device import Device
from dflash_protocol.errors import (
    DeviceOutOfMemory,
    DeviceUnavailable,
    SettingsError,
    one_line,
)
from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.capabilities import Vendor
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.device.devices import VENDORS, DeviceMemory, memory_of
from dflash_runtime.compute.gpu.device.driver import Driver

_OUTLIVED_POOLS: deque[tuple[int, Any]] = deque()
"""Device indices and memory pools of closed devices that still had arrays, as an error's traceback
may keep some. CuPy does not give the driver what they leave in their pool later."""


class CupyMemory:
    """A pool of one device's memory; call its methods while the device is current.

    The pool reuses a block as soon as nothing refers to it. That is safe because everything that
    uses the pool runs in the order of the main stream.
    """

    def __init__(self, cupy: Any, driver: Driver, device: Device) -> None:
        """`cupy`: what `import_cupy` has given."""
        self._cupy, self._driver = cupy, driver
        self._name, self._index = str(device), device.index
        self._pool = cupy.cuda.MemoryPool()
        self._empty_outlived_pools()

    def available(self) -> DeviceMemory:
        """Free and total memory. Raises: DeviceUnavailable."""
        return memory_of(self._driver, self._index)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """Raises: DeviceOutOfMemory with the amounts."""
        sizes = (shape,) if isinstance(shape, int) else shape
        num_bytes = prod(sizes) * np.dtype(dtype).itemsize
        try:
            with self._cupy.cuda.Device(self._index):
                memory = self._pool.malloc(num_bytes)
                array: DeviceArray = self._cupy.ndarray(shape, dtype, memptr=memory)
                return array
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            found = self.available()
            raise DeviceOutOfMemory(
                self._name,
                num_bytes=num_bytes,
                free_bytes=found.free_bytes,
                total_bytes=found.total_bytes,
            ) from error

    def download(self, array: DeviceArray) -> AnyArray:
        """A copy on the host of what the device has written."""
        given: Any = array
        with self._cupy.cuda.Device(self._index):
            copy: AnyArray = given.get()
        return copy

    def trim(self) -> None:
        """Return what no array uses to the driver."""
        with self._cupy.cuda.Device(self._index):
            self._pool.free_all_blocks()

    def close(self) -> None:
        """Return to the driver all memory that no array refers to any more."""
        _OUTLIVED_POOLS.append((self._index, self._pool))
        self._empty_outlived_pools()

    def _empty_outlived_pools(self) -> None:
        """Return to the driver what arrays of closed devices have left in their pools."""
        for _ in range(len(_OUTLIVED_POOLS)):
            index, pool = _OUTLIVED_POOLS.popleft()
            with self._cupy.cuda.Device(index):
                pool.free_all_blocks()
            if pool.total_bytes():
                _OUTLIVED_POOLS.append((index, pool))


def import_cupy(device: Device) -> Any:
    """Raises: DeviceUnavailable if there is none, or one for another vendor; SettingsError if the
    device is no GPU."""
    if device.kind not in VENDORS:
        raise SettingsError(f"{device} is not a GPU")
    try:
        cupy = importlib.import_module("cupy")
        is_hip = bool(cupy.cuda.runtime.is_hip)
    except Exception as error:  # libraries that it loads may raise anything
        raise DeviceUnavailable(f"{device}: CuPy cannot be used: {one_line(str(error))}") from error
    if is_hip != (VENDORS[device.kind] is Vendor.HIP):
        raise DeviceUnavailable(f"{device}: the installed CuPy is for another vendor")
    return cupy
