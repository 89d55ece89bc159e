"""A plugin for pytest: tests that open an EmulatedDevice get a GPU, whose results are poisoned and
whose arrays are each an allocation of their own, so that compute-sanitizer sees their bounds.

With ``--like-a-gpu`` it is still the emulation, with arrays that look like a GPU's.
At the end it prints ``launched <kernel file> <kernel>`` for each kernel that was launched.

Example:
  python -m pytest -p support.on_gpu tests/runtime/compute/gpu/test_mma.py
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike

import support.emulated_device
from dflash_protocol.device import DeviceKind
from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.cupy_device import CupyDevice
from dflash_runtime.compute.gpu.device.device import DeviceArray, address
from dflash_runtime.compute.gpu.device.kernel_sources import Defines
from support.emulated_device import EmulatedDevice
from support.gpu_devices import first_gpu
from support.readable_arrays import ReadableArray

_MISTAKES = Path(__file__).with_name("sanitizer_mistakes.cu")

_launched: set[tuple[str, str]] = set()
_opened: list[GpuInPlaceOfEmulation] = []


class _Notes:
    """Mixin of devices that records the kernels it launches."""

    def module(self, file: str | Path, defines: Defines) -> Any:
        module = super().module(str(file), defines)  # type: ignore[misc]
        return _Module(module, Path(file).name)

    def launch(self, kernel: Any, *args: Any, **options: Any) -> None:
        _launched.add((kernel.file, kernel.kernel.name))
        super().launch(kernel.kernel, *args, **options)  # type: ignore[misc]

    start = EmulatedDevice.start  # by `launch`, on a GPU too


class _Module:
    def __init__(self, module: Any, file: str) -> None:
        self._module, self._file = module, file

    def kernel(self, name: str, args: Any) -> SimpleNamespace:
        return SimpleNamespace(file=self._file, kernel=self._module.kernel(name, args), name=name)


class GpuInPlaceOfEmulation(_Notes, CupyDevice):
    """A GPU with the constructor of EmulatedDevice; options that do not apply are ignored."""

    def __init__(self, *, lanes: int = 32, **_: Any) -> None:
        gpu = first_gpu()
        super().__init__(gpu, lanes=64 if lanes == 64 and gpu.kind is DeviceKind.CUDA else None)
        memory = self._memory
        memory._pool = _NoPool(memory._cupy)
        _opened.append(self)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
        array = ReadableArray(self, super().empty(shape, dtype))
        if array.nbytes:
            poison = np.full(array.nbytes, 0xFF, np.uint8)
            self.write(array, poison.view(array.dtype).reshape(array.shape))
        return array


class _NoPool:
    """Replaces cupy.cuda.MemoryPool: every array is its own allocation."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def malloc(self, num_bytes: int) -> Any:
        memory = self._cupy.cuda.Memory(num_bytes)
        return self._cupy.cuda.MemoryPointer(memory, 0)

    def free_all_blocks(self) -> None:
        """Nothing is kept."""

    def total_bytes(self) -> int:
        return 0


class LikeGpu(_Notes, EmulatedDevice):
    """The emulation, with arrays that are not numpy arrays."""

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
        return ReadableArray(self, _Raw(super().empty(shape, dtype)))

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
        return self.upload(np.zeros(shape, dtype))

    def upload(self, array: AnyArray) -> Any:
        copy = self.empty(array.shape, array.dtype)
        self.write(copy, array)
        return copy

    def write(self, destination: DeviceArray, source: AnyArray) -> None:
        super().write(_host_array(destination), source)

    def download(self, array: DeviceArray) -> AnyArray:
        return super().download(_host_array(array))

    def prepared(self, kernel: Any, *args: Any, **options: Any) -> Any:
        """Records launches of side streams too."""
        if isinstance(kernel, SimpleNamespace):
            _launched.add((kernel.file, kernel.kernel.name))
            kernel = kernel.kernel
        return super().prepared(kernel, *args, **options)


class _Raw:
    """A numpy array with the interface of CuPy's."""

    device = SimpleNamespace()  # without an id, as the emulation has none

    def __init__(self, host: Any) -> None:
        self.host = host
        self.shape, self.dtype, self.flags = host.shape, host.dtype, host.flags
        self.size, self.nbytes = host.size, host.nbytes
        self.data = SimpleNamespace(ptr=host.ctypes.data)

    def reshape(self, *shape: Any) -> _Raw:
        return _Raw(self.host.reshape(*shape))

    def view(self, dtype: DTypeLike) -> _Raw:
        return _Raw(self.host.view(dtype))

    def __getitem__(self, key: Any) -> _Raw:
        return _Raw(np.atleast_1d(self.host[key]))


def _host_array(array: Any) -> Any:
    return array.raw.host if isinstance(array, ReadableArray) else array


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--like-a-gpu", action="store_true", help="the emulation, disguised")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Replace the emulation before anything imports it."""
    is_emulated = early_config.known_args_namespace.like_a_gpu
    device = LikeGpu if is_emulated else GpuInPlaceOfEmulation
    for module in (support.emulated_device, support.emulated_device.emulated_device):
        vars(module)["EmulatedDevice"] = device


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for file, kernel in sorted(_launched):
        terminalreporter.write_line(f"launched {file} {kernel}")


def pytest_unconfigure() -> None:
    for device in _opened:
        device.close()


class MistakeArgs(ctypes.Structure):
    """Mirrors sanitizer_mistakes.cu."""

    _fields_ = (("out", ctypes.c_void_p), ("size", ctypes.c_int))


def main() -> None:
    """Launch a kernel with a mistake, which only compute-sanitizer detects reliably."""
    device = GpuInPlaceOfEmulation()
    kernel = device.module(str(_MISTAKES), {}).kernel(sys.argv[1], MistakeArgs)
    out = device.empty(128, np.float32)
    device.launch(kernel, (1, 1, 1), 128, MistakeArgs(address(out), out.size))
    with suppress(DeviceUnavailable):
        device.synchronize()
    device.close()


if __name__ == "__main__":
    main()
