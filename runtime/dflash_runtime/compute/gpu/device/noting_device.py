"""A device that runs nothing, and tells which kernels its user wants to launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from math import prod
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike

from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.capabilities import Capabilities
from dflash_runtime.compute.gpu.device.device import (
    NANOSECONDS_PER_MS,
    DeviceArray,
    Kernel,
    address,
)
from dflash_runtime.compute.gpu.device.kernel_sources import Defines, define_options

_CALLED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 1)
_ADDRESS = ctypes.cast(_CALLED, ctypes.c_void_p).value or 0
"""What compiled code would call in a driver's place; it fails, whatever its arguments."""


class _Nothing:
    """A module that is not compiled, its kernels, a graph of them, a mark, a stream."""

    name = "nothing"
    launcher = _ADDRESS, 0, 0
    functions = _ADDRESS, _ADDRESS, _ADDRESS, 0
    handle = 0

    def kernel(self, name: str, args: type[ctypes.Structure]) -> Kernel:
        return self

    def is_empty(self) -> bool:
        return True

    def launch(self, *_: Any, **__: Any) -> None:
        """Nothing runs."""

    replay = wait_for = read = write = synchronize = close = launch


_NOTHING = _Nothing()


class _NotedMapping:
    def __init__(self, device_address: int) -> None:
        self.device_address = device_address

    def close(self) -> None:
        """Nothing is mapped."""


class NotingDevice:
    """Implements KernelDevice, but for other processes' memory.

    All arrays lie at the same place, which nobody reads or writes: they take no memory. What is
    downloaded is zero.
    """

    name = product_name = "host:0"
    """Arrays are the host's."""
    uuid = bytes(16)
    ticks_per_ms = NANOSECONDS_PER_MS

    def __init__(
        self,
        capabilities: Capabilities,
        *,
        lanes: int,
        num_multiprocessors: int,
        max_shared_bytes: int,
        on_module: Callable[[str, Defines], None],
    ) -> None:
        """`on_module` gets each file with its defines, once."""
        self.capabilities, self.lanes = capabilities, lanes
        self.num_multiprocessors, self.max_shared_bytes = num_multiprocessors, max_shared_bytes
        self._on_module = on_module
        self._noted = set[tuple[str, tuple[str, ...]]]()
        self._memory = np.empty(0, np.uint8)

    def module(self, file: str, defines: Defines) -> _Nothing:
        key = file, define_options(defines)
        if key not in self._noted:
            self._noted.add(key)
            self._on_module(file, defines)
        return _NOTHING

    def launch(self, *_: Any, **__: Any) -> None:
        """Nothing runs."""

    start = launch

    def capture(self, launch: Callable[[], None]) -> _Nothing:
        launch()
        return _NOTHING

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        sizes = (shape,) if isinstance(shape, int) else shape
        num_bytes = prod(sizes) * np.dtype(dtype).itemsize
        if num_bytes > self._memory.size:
            self._memory = np.empty(num_bytes, np.uint8)
        return self._memory[:num_bytes].view(dtype).reshape(sizes)

    zeros = empty

    def in_blocks(self, num_bytes: int) -> None:
        """None: it runs nothing."""

    def upload(self, array: AnyArray) -> AnyArray:
        return self.empty(array.shape, array.dtype)

    def download(self, array: DeviceArray) -> AnyArray:
        return np.zeros(array.shape, array.dtype)

    def write(self, destination: DeviceArray, source: object) -> None:
        """Nothing is written."""

    copy = write

    def map_host(self, array: AnyArray) -> _NotedMapping:
        return _NotedMapping(address(array))

    def mark(self) -> _Nothing:
        return _NOTHING

    new_stream = mark

    def side_stream(self, name: str) -> _Nothing:
        return _NOTHING

    def use(self) -> None:
        """There is no driver."""

    trim = use

    def synchronize(self, deadline_s: float | None = None) -> None:
        """Nothing runs."""

    def export_memory(self, num_bytes: int) -> NoReturn:
        raise DeviceUnavailable("it is not there")

    def import_memory(self, handle: bytes, num_bytes: int) -> NoReturn:
        self.export_memory(num_bytes)

    def compile_ahead(self, *_: object) -> None:
        """Nothing is compiled."""
