"""A fake GPU driver, and the part of CuPy that we use; records the calls."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from dflash_runtime.compute.gpu.device.capabilities import Vendor
from dflash_runtime.compute.gpu.device.driver import Driver

_SOURCE = Path(__file__).with_name("fake_driver.c")


class Setting(IntEnum):
    """Values that the driver reports; mirrors fake_driver.c."""

    NUM_DEVICES = 0
    FREE = 1
    TOTAL = 2
    INTEGRATED = 3
    MAJOR = 4
    MINOR = 5
    PARAMETER_BYTES = 6
    VERSION = 7
    BUSY = 8
    """Number of queries of a stream that report it busy."""
    SHOWN = 9
    """Bytes of the memory that another process exports."""
    TIMEOUT = 10
    """Whether long kernels are stopped."""
    BLOCK = 11
    """Bytes of a block behind a range of addresses; 0: there are none."""


class FakeDriver:
    """One library with the functions of both vendors. It has one state per process."""

    def __init__(self) -> None:
        self.library = _library()
        self.library.fake_reset()

    def open(self, vendor: Vendor) -> Driver:
        """A Driver that calls this library."""
        return Driver(vendor, self.library)

    def set(self, setting: Setting, value: int) -> None:
        """Set a value that the driver reports."""
        self.library.fake_set(int(setting), ctypes.c_int64(value))

    def fail(self, name: str, status: int) -> None:
        """Make one function fail, by our name for it; "": none."""
        self.library.fake_fail(name.encode(), status)

    def take_notes(self) -> list[str]:
        """The calls since the last time, without those that select a device."""
        lines = self.library.fake_notes().decode().splitlines()
        taken = self._num_taken if len(lines) >= self._num_taken else 0
        self._num_taken = len(lines)
        return [line for line in lines[taken:] if not line.startswith(("set_context", "set_dev"))]

    _num_taken = 0


@cache
def _library() -> ctypes.CDLL:
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler is not None, "the fake driver needs gcc"
    with tempfile.TemporaryDirectory(prefix="dflash-fake-") as folder:
        path = f"{folder}/fake_driver.so"
        command = (compiler, "-std=gnu11", "-O1", "-Wall", "-Werror", "-shared", "-fPIC")
        subprocess.run((*command, str(_SOURCE), "-o", path), check=True, timeout=120)
        library = ctypes.CDLL(path)
    library.fake_notes.restype = ctypes.c_char_p
    return library


class FakeOutOfMemory(Exception):
    """cupy.cuda.memory.OutOfMemoryError."""


def _memory(num_bytes: int) -> SimpleNamespace:
    """cupy.cuda.Memory, in host memory."""
    buffer = np.full(max(num_bytes, 1), 0xFF, np.uint8)
    return SimpleNamespace(ptr=buffer.ctypes.data, buffer=buffer)


def _unowned(place: int, num_bytes: int, owner: object, index: int) -> SimpleNamespace:
    """cupy.cuda.UnownedMemory; what is written goes to memory of the host."""
    return SimpleNamespace(ptr=place, buffer=np.zeros(num_bytes, np.uint8), owner=owner)


class _Pool:
    """cupy.cuda.MemoryPool, of limited size."""

    limit_bytes = 1 << 20

    def __init__(self) -> None:
        self.num_freed = 0
        self.held_bytes = 0

    def malloc(self, num_bytes: int) -> SimpleNamespace:
        if num_bytes > self.limit_bytes:
            raise FakeOutOfMemory
        return _memory(num_bytes)

    def free_all_blocks(self) -> None:
        self.num_freed += 1

    def used_bytes(self) -> int:
        return 0  # the host's

    def total_bytes(self) -> int:
        return self.held_bytes


class _Array:
    """cupy.ndarray: not a numpy array, but with its attributes."""

    def __init__(self, shape: Any, dtype: Any, *, memptr: SimpleNamespace) -> None:
        self.data = memptr
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._host = memptr.buffer[:size].view(dtype).reshape(shape)

    def get(self) -> Any:
        return self._host.copy()

    def reshape(self, *shape: Any) -> _Array:
        return self._part(self._host.reshape(*shape))

    def view(self, dtype: Any) -> _Array:
        return self._part(self._host.view(dtype))

    def __getitem__(self, key: Any) -> _Array:
        return self._part(self._host[key])

    def _part(self, host: Any) -> _Array:
        part = object.__new__(_Array)
        part._host, part.data = host, SimpleNamespace(ptr=host.ctypes.data, whole=self.data)
        return part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


class _Device:
    """cupy.cuda.Device."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def fake_cupy(*, is_hip: bool = False) -> ModuleType:
    """The module that ``import cupy`` gives."""
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(is_hip=is_hip),
        memory=SimpleNamespace(OutOfMemoryError=FakeOutOfMemory),
        MemoryPool=_Pool,
        Memory=_memory,
        UnownedMemory=_unowned,
        MemoryPointer=lambda memory, offset_bytes: memory,
        Device=_Device,
    )
    module = ModuleType("cupy")
    vars(module).update(cuda=cuda, ndarray=_Array)
    return module
