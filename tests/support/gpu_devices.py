"""The GPU that tests run on, if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dflash_protocol.device import Device, DeviceKind
from dflash_protocol.errors import DflashError
from dflash_runtime.compute.gpu.device.cupy_device import CupyDevice
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.device.devices import VENDORS, memory_of
from dflash_runtime.compute.gpu.device.driver import open_driver
from support.emulated_device import EmulatedDevice

EMULATED = "emulated"
EMULATED_AND_GPU = (EMULATED, pytest.param("gpu", marks=pytest.mark.gpu))
"""Parameters of a test that runs in the emulation, and with `-m gpu` on a GPU."""


def first_gpu() -> Device:
    """The first GPU of either vendor; skips the test if CuPy cannot use one."""
    reasons = []
    for kind in (DeviceKind.CUDA, DeviceKind.HIP):
        device = Device(kind, 0)
        try:
            CupyDevice(device).close()
        except DflashError as error:
            reasons.append(str(error))
        else:
            return device
    pytest.skip("; ".join(reasons))


def two_gpus() -> tuple[Device, Device]:
    """Two GPUs of one vendor; skips the test if there are fewer."""
    first = first_gpu()
    second = Device(first.kind, first.index + 1)
    try:
        CupyDevice(second).close()
    except DflashError as error:
        pytest.skip(f"two GPUs are needed: {error}")
    return first, second


def used_bytes(device: Device) -> int:
    """Bytes of a GPU's memory in use by all processes, as the driver counts."""
    memory = memory_of(open_driver(VENDORS[device.kind]), device.index)
    return memory.total_bytes - memory.free_bytes


@contextmanager
def opened_device(which: str) -> Iterator[KernelDevice]:
    """Open a device; `which` is one of EMULATED_AND_GPU."""
    if which == EMULATED:
        yield EmulatedDevice()
        return
    device = CupyDevice(first_gpu())
    try:
        yield device
    finally:
        device.close()
