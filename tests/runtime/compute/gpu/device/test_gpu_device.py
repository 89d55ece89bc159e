"""A real GPU: what kernels have in common, launches that overlap, graphs, memory given back."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dflash_protocol.device import Device
from dflash_protocol.errors import DeviceOutOfMemory, DeviceUnavailable, SettingsError
from dflash_runtime.compute.gpu.device.binary_cache import BinaryCache
from dflash_runtime.compute.gpu.device.cupy_device import CupyDevice
from dflash_runtime.compute.gpu.device.device import address
from dflash_runtime.compute.gpu.device.devices import describe_gpus
from support.emulated_device.device_checks import (
    CASES,
    SumArgs,
    check_every_name,
    check_padding,
    check_sums,
)
from support.gpu_devices import first_gpu
from support.processes import ROOT, environment

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Device:
    return first_gpu()


@pytest.fixture(params=[None, 64], ids=["own lanes", "64 lanes"])
def device(gpu: Device, request: pytest.FixtureRequest) -> Iterator[CupyDevice]:
    device = CupyDevice(gpu, lanes=request.param)
    yield device
    device.close()


def test_every_name_means_what_common_cuh_says(device: CupyDevice) -> None:
    for value in (2.5, 1e-3, 65519.0, 65520.0, 6e-8, -0.5, 3e9, float("inf")):
        check_every_name(device, value=value)


def test_a_kernel_of_many_blocks_and_warps(device: CupyDevice) -> None:
    check_sums(device)


def test_arguments_are_padded_as_ctypes_pads_them(device: CupyDevice) -> None:
    check_padding(device)


def test_a_struct_of_another_size_is_refused_where_the_driver_can_tell(gpu: Device) -> None:
    class TooSmall(ctypes.Structure):
        _fields_ = (("pointer", ctypes.c_void_p),)

    device = CupyDevice(gpu)
    module = device.module(str(CASES), {})
    if device._driver.has("parameter_info"):
        with pytest.raises(SettingsError, match=r"sum_rows\b.*\b24\b.*TooSmall\b.*\b8\b"):
            module.kernel("sum_rows", TooSmall)
    with pytest.raises(DeviceUnavailable, match="not found"):
        module.kernel("nothing", TooSmall)
    device.close()


@pytest.mark.parametrize("overlaps_previous", [False, True])
def test_a_chain_of_kernels_sees_what_was_written_before(
    gpu: Device, overlaps_previous: bool
) -> None:
    """Each sums ten rows of what the one before wrote, in a graph that is replayed."""
    device = CupyDevice(gpu)
    kernel = device.module(str(CASES), {}).kernel("sum_rows", SumArgs)
    arrays = [device.zeros((10,), np.float32) for _ in range(101)]

    def record() -> None:
        for source, out in pairwise(arrays):
            args = SumArgs(address(source), address(out), 10, 1)
            device.launch(kernel, (10, 1, 1), 256, args, overlaps_previous=overlaps_previous)

    graph = device.capture(record)
    for number in range(3):
        values = np.arange(10, dtype=np.float32) + number
        device.write(arrays[0], values)
        graph.replay()
        np.testing.assert_array_equal(device.download(arrays[-1]), values)
    graph.close()
    device.close()


def test_an_exception_within_a_capture_leaves_a_stream_that_works(gpu: Device) -> None:
    device = CupyDevice(gpu)

    def record() -> None:
        device.empty(4, np.float32)

    with pytest.raises(DeviceUnavailable, match="cannot allocate"):
        device.capture(record)
    check_sums(device)
    device.close()


def test_kernels_see_memory_of_the_host(gpu: Device) -> None:
    device = CupyDevice(gpu)
    array = np.full(4096, 3, np.float32)
    mapping = device.map_host(array)
    out = device.empty(1, np.float32)
    kernel = device.module(str(CASES), {}).kernel("sum_rows", SumArgs)
    for value in (3, 5):
        array[:] = value
        args = SumArgs(mapping.device_address, address(out), 1, 4096)
        device.launch(kernel, (1, 1, 1), 256, args)
        assert device.download(out)[0] == 4096 * value
    mapping.close()
    device.close()


def test_loading_again_and_again_gives_back_every_byte(gpu: Device, tmp_path: Path) -> None:
    free = []
    for _ in range(22):
        device = CupyDevice(gpu, cache=BinaryCache(tmp_path))
        arrays = [device.upload(np.zeros(1 << 22, np.float32)) for _ in range(3)]
        with pytest.raises(DeviceOutOfMemory) as caught:
            device.empty(2 * device.memory().total_bytes, np.uint8)
        assert caught.value.num_bytes == 2 * caught.value.total_bytes > caught.value.free_bytes
        del caught
        check_sums(device)
        del arrays
        device.close()
        free.append(device.memory().free_bytes)
    assert len(set(free[2:])) == 1, free  # what the driver loads once stays


def test_the_device_is_described(gpu: Device) -> None:
    found, why_none = describe_gpus(gpu.kind)
    assert why_none is None
    assert found[0].device == gpu
    assert len(found[0].uuid) == 32
    assert 0 < found[0].memory.free_bytes <= found[0].memory.total_bytes
    assert Path("/sys/bus/pci/devices").is_dir()
    assert found[0].pci_bus_id.count(":") == 2


def test_what_a_kernel_does_wrong_is_told_in_the_drivers_words(gpu: Device) -> None:
    """In a process of its own, whose context is lost."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from support.emulated_device.device_checks import CASES, SumArgs\n"
        "from dflash_protocol.device import parse_device\n"
        "from dflash_protocol.errors import DeviceUnavailable\n"
        "from dflash_runtime.compute.gpu.device.cupy_device import CupyDevice\n"
        f"device = CupyDevice(parse_device('{gpu}'))\n"
        "kernel = device.module(str(CASES), {}).kernel('sum_rows', SumArgs)\n"
        "device.launch(kernel, (1, 1, 1), 256, SumArgs(8, 8, 1, 100))\n"
        "try: device.synchronize()\n"
        "except DeviceUnavailable as error: print(error)\n"
        "device.close()\n"
    )
    result = subprocess.run(
        (sys.executable, "-c", program),
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )
    assert "illegal" in result.stdout, result.stderr
    assert len(result.stdout.splitlines()) == 1
