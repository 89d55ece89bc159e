"""Devices for tests of kernels, emulated ones and, where it says so, real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dflash_runtime.compute.gpu.device.device import KernelDevice
from support.emulated_device import EmulatedDevice
from support.gpu_devices import EMULATED_AND_GPU, opened_device


@pytest.fixture(params=[(32, False), (32, True), (64, True)], ids=str)
def device(request: pytest.FixtureRequest) -> EmulatedDevice:
    """For kernels of decode: both widths of a warp, both orders of blocks."""
    lanes, runs_backward = request.param
    return EmulatedDevice(lanes=lanes, runs_backward=runs_backward)


@pytest.fixture(params=[32, 64])
def backward_device(request: pytest.FixtureRequest) -> EmulatedDevice:
    return EmulatedDevice(lanes=request.param, runs_backward=True)


@pytest.fixture(params=EMULATED_AND_GPU)
def any_device(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    with opened_device(request.param) as device:
        yield device
