"""Devices that take the emulation's place in its tests: numpy reads and writes their arrays, which
kernels are given all the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dflash_runtime.compute.gpu.device import cupy_device
from dflash_runtime.compute.gpu.device.device import KernelDevice, address
from dflash_runtime.compute.gpu.launch.row_kernels import Elementwise
from support import on_gpu
from support.fake_driver.fake_driver import FakeDriver, fake_cupy


@pytest.fixture(params=["like a gpu", "fake driver"])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KernelDevice]:
    if request.param == "like a gpu":
        yield on_gpu.LikeGpu()
        return
    monkeypatch.setattr(cupy_device, "open_driver", FakeDriver().open)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    device = on_gpu.GpuInPlaceOfEmulation(lanes=32, runs_backward=True, num_multiprocessors=4)
    yield device
    device.close()
    on_gpu._opened.remove(device)


def test_numpy_reads_and_writes_arrays(device: KernelDevice) -> None:
    array: Any = device.upload(np.arange(12, dtype=np.float32).reshape(3, 4))
    assert not isinstance(array, np.ndarray)
    assert (array.shape, array.dtype, array.size, array.nbytes) == ((3, 4), np.float32, 12, 48)
    np.testing.assert_array_equal(array[1:], [[4, 5, 6, 7], [8, 9, 10, 11]])
    part = array[1]
    assert (part.tolist(), array[1, 2], len(part)) == ([4, 5, 6, 7], 6, 4)
    assert address(part) == address(array) + 16
    part[1:3] = 50
    array[:, 0] = -1
    assert device.download(array).tolist() == [[-1, 1, 2, 3], [-1, 50, 50, 7], [-1, 9, 10, 11]]
    assert ((array * 2)[0] == [-2, 2, 4, 6]).all()
    assert array.reshape(-1).view(np.int32).shape == (12,)
    assert not np.asarray(device.zeros(3, np.int32)).any()


def test_results_are_poisoned(device: KernelDevice) -> None:
    assert np.isnan(np.asarray(device.empty((2, 3), np.float32))).all()
    assert device.empty(0, np.int32).nbytes == 0


def test_what_is_launched_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "_launched", set())
    device = on_gpu.LikeGpu()
    rows: Any = device.upload(np.ones((1, 4), np.float32))
    Elementwise(device).add_rows(rows, rows, rows)
    assert rows.tolist() == [[2, 2, 2, 2]]
    assert on_gpu._launched == {("add_sums.cu", "add_rows")}
