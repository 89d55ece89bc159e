"""What a GPU is, and how fast its memory is copied and read: what kernels are measured by.

Knows nothing of models.
"""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench.gpu_parts import Result, say
from bench.sides import Side

from dflash_protocol.device import Device, parse_device
from dflash_runtime.compute.gpu.device.cupy_device import CupyDevice
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice, address
from dflash_runtime.compute.gpu.device.devices import describe_gpus

READ_FILE = str(Path(__file__).with_name("read_memory.cu"))
THREADS, DEPTH = 256, 8
_BLOCKS_PER_MULTIPROCESSOR = 8
_LOAD_BYTES = 16
_BYTES = 2 << 30
"""Many times what a cache holds."""
_REPEATS = 4
_ROUNDS = 8
_ON_THE_DEVICE = 3  # cudaMemcpyDeviceToDevice


class ReadMemoryArgs(ctypes.Structure):
    """Mirrors read_memory.cu."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("num_words", ctypes.c_int64),
    )


class ReadMemory:
    """The kernel, ready to read arrays of `num_bytes`."""

    def __init__(self, device: KernelDevice, num_bytes: int) -> None:
        self._device = device
        self._num_words = num_bytes // _LOAD_BYTES
        assert num_bytes % (_LOAD_BYTES * THREADS * DEPTH) == 0
        most = device.num_multiprocessors * _BLOCKS_PER_MULTIPROCESSOR
        self._num_blocks = min(most, self._num_words // (THREADS * DEPTH))
        module = device.module(READ_FILE, {"THREADS": THREADS, "DEPTH": DEPTH})
        self._kernel = module.kernel("read_memory", ReadMemoryArgs)
        self.sums = device.zeros(self._num_blocks * THREADS, np.uint32)

    def launch(self, array: DeviceArray) -> None:
        """Read it once. Shapes: array [num_bytes] uint8."""
        args = ReadMemoryArgs(
            words=address(array), sums=address(self.sums), num_words=self._num_words
        )
        self._device.launch(self._kernel, (self._num_blocks, 1, 1), THREADS, args)


class GpuFacts:
    """One GPU of this machine, opened."""

    def __init__(self, name: str) -> None:
        """Raises: DeviceUnavailable."""
        self._which = parse_device(name)
        self._device = CupyDevice(self._which)

    def describe(self) -> dict[str, Any]:
        """What it is called, how much of everything it has, and which GPUs there are."""
        gpus, _ = describe_gpus(self._which.kind)
        found = next(gpu for gpu in gpus if gpu.device == self._which)
        return {
            "device": str(self._which),
            "gpus": [gpu.name for gpu in gpus],
            "name": found.name,
            "architecture": self._device.capabilities.architecture,
            "driver": driver_version(self._which),
            "multiprocessors": self._device.num_multiprocessors,
            "memory_bytes": found.memory.total_bytes,
            "free_bytes": found.memory.free_bytes,
        }

    def copy_bytes_per_s(self) -> float:
        """Rate of a large copy on the device, read plus written bytes: the best of several."""
        import cupy

        source, copy = (self._device.zeros(_BYTES, np.uint8) for _ in range(2))
        stream = self._device.stream

        def run() -> None:
            cupy.cuda.runtime.memcpyAsync(
                address(copy), address(source), _BYTES, _ON_THE_DEVICE, stream
            )

        return 2 * _BYTES / best_seconds(self._device, run)

    def read_bytes_per_s(self) -> float:
        """Rate of a kernel that reads memory and sums it: the best of several."""
        array = self._device.zeros(_BYTES, np.uint8)
        read = ReadMemory(self._device, _BYTES)
        return _BYTES / best_seconds(self._device, lambda: read.launch(array))


def measure_device(result: Result, until_s: float, *, device: str) -> None:
    """Fill `result` with what GpuFacts tells."""
    with Side(device, GpuFacts, device, until_s=until_s) as side:
        result |= side.call("describe")
        for name in ("copy_bytes_per_s", "read_bytes_per_s"):
            result[name] = side.call(name)
            say(f"{name}: {result[name] / 1e12:.2f} T")


def best_seconds(device: KernelDevice, run: Callable[[], None]) -> float:
    """Shortest time of one of several in a row, of a few rounds; the first warms up."""
    best = float("inf")
    for number in range(_ROUNDS + 1):
        device.synchronize()
        started_s = time.perf_counter()
        for _ in range(_REPEATS):
            run()
        device.synchronize()
        if number:
            best = min(best, (time.perf_counter() - started_s) / _REPEATS)
    return best


def driver_version(device: Device) -> str:
    """As the vendor's tool reports it; empty without the tool."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            [*command, "-i", str(device.index)], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
