"""Memory in blocks, over a driver that is not there: what it is asked for, and what comes back."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_protocol.device import Device, DeviceKind
from dflash_protocol.errors import DeviceOutOfMemory
from dflash_runtime.compute.gpu.device import cupy_device
from dflash_runtime.compute.gpu.device.binary_cache import BinaryCache
from dflash_runtime.compute.gpu.device.cupy_device import CupyDevice
from dflash_runtime.compute.gpu.device.device import address
from support.emulated_device import EmulatedDevice
from support.emulated_device.device_checks import CASES, SumArgs
from support.emulated_device.emulated_device import KernelFailure
from support.fake_driver.fake_driver import FakeDriver, Setting, fake_cupy

BLOCK = 1 << 12
BEGIN = 1 << 30


class NoCompiler:
    """It is not asked for anything."""

    version = "none"

    def supports(self, architecture: str) -> bool:
        return True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    fake.set(Setting.BLOCK, BLOCK)
    fake.set(Setting.FREE, 1 << 20)
    fake.set(Setting.TOTAL, 1 << 22)
    monkeypatch.setattr(cupy_device, "open_driver", fake.open)
    monkeypatch.setattr(cupy_device, "runtime_compiler", lambda vendor, newest: NoCompiler())
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    return fake


@pytest.fixture
def device(fake: FakeDriver, tmp_path: Path) -> Iterator[CupyDevice]:
    device = CupyDevice(Device(DeviceKind.CUDA, 0), cache=BinaryCache(tmp_path))
    fake.take_notes()
    yield device
    device.close()


def free_bytes(device: CupyDevice) -> int:
    return device.memory().free_bytes


def test_blocks_are_asked_for_as_the_driver_wants_it(device: CupyDevice, fake: FakeDriver) -> None:
    blocks = device.in_blocks(BLOCK + 1)
    assert blocks is not None
    assert (address(blocks.array), blocks.array.nbytes) == (BEGIN, BLOCK + 1)
    assert fake.take_notes() == [
        f"reserve_addresses {2 * BLOCK}",
        *(
            line
            for number, begin in ((3, BEGIN), (4, BEGIN + BLOCK))
            for line in (
                f"create_block {BLOCK} type 1 of 1/0",
                f"map_block {begin:x} {BLOCK} of {number}",
                f"release_block {number}",
                f"allow_block {begin:x} {BLOCK}: 3 of 1/0, 1",
            )
        ),
    ]
    blocks.keep(BLOCK)
    assert fake.take_notes() == [f"unmap_block {BEGIN + BLOCK:x} {BLOCK}"]


@pytest.mark.parametrize("num_blocks", [2, 16, 37])
def test_the_end_is_given_back_and_taken_again(device: CupyDevice, num_blocks: int) -> None:
    before, num_bytes = free_bytes(device), num_blocks * BLOCK - 7
    blocks = device.in_blocks(num_bytes)
    assert blocks is not None
    assert before - free_bytes(device) == blocks.held_for(num_bytes) == num_blocks * BLOCK
    rng = np.random.default_rng(1)
    for size in [0, num_bytes, 1, *rng.integers(0, num_bytes, 20).tolist()]:
        blocks.keep(size)
        held_bytes = before - free_bytes(device)
        assert size <= held_bytes == blocks.held_for(size) <= size + BLOCK + num_blocks * BLOCK / 8
    blocks.keep(1)
    array = blocks.array[5:9]
    del blocks
    gc.collect()
    device.trim()
    assert free_bytes(device) < before
    del array  # the last that refers to it
    gc.collect()
    device.trim()
    assert free_bytes(device) == before


def test_memory_that_cannot_be_taken_leaves_all_as_it_was(
    device: CupyDevice, fake: FakeDriver
) -> None:
    blocks = device.in_blocks(8 * BLOCK)
    assert blocks is not None
    blocks.keep(2 * BLOCK)
    fake.set(Setting.FREE, 3 * BLOCK)
    with pytest.raises(DeviceOutOfMemory):
        blocks.keep(8 * BLOCK)
    assert free_bytes(device) == 3 * BLOCK
    with pytest.raises(DeviceOutOfMemory):
        device.in_blocks(4 * BLOCK)
    assert free_bytes(device) == 3 * BLOCK
    blocks.keep(5 * BLOCK)
    assert free_bytes(device) == 0


@pytest.mark.parametrize("name", ["reserve_addresses", "map_block", "allow_block"])
def test_a_device_without_blocks_has_plain_memory(
    device: CupyDevice, fake: FakeDriver, name: str
) -> None:
    before = free_bytes(device)
    fake.fail(name, 801)
    assert device.in_blocks(4 * BLOCK) is None
    fake.fail("", 0)
    assert device.in_blocks(4 * BLOCK) is None
    assert free_bytes(device) <= before
    assert device.in_blocks(0) is None


def test_few_bytes_are_no_blocks(device: CupyDevice) -> None:
    assert device.in_blocks(BLOCK) is None


def test_kernels_must_not_use_what_was_given_back() -> None:
    """Of the emulation, on which the tests of experts rely."""
    device = EmulatedDevice()
    device.block_bytes = 512
    blocks = device.in_blocks(2048)
    assert blocks is not None
    array = blocks.array.view(np.float32)
    array[:] = 1.0
    before = device.num_bytes
    blocks.keep(600)
    assert before - device.num_bytes == 1024
    out = device.zeros(1, np.float32)
    kernel = device.module(CASES, {}).kernel("sum_rows", SumArgs)

    def total(columns: int) -> float:
        args = SumArgs(address(array), address(out), 1, columns)
        device.launch(kernel, (1, 1, 1), 256, args)
        return float(device.download(out)[0])

    assert total(256) == 256.0
    with pytest.raises(KernelFailure):
        total(512)
    blocks.keep(2048)
    array[:] = 2.0
    assert total(512) == 1024.0
