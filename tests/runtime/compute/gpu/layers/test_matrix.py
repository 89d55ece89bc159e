"""Rows of files on a device: the same bytes, whether the driver or threads copy them."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_adapters.quant import TensorType
from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import U8Array
from dflash_runtime.compute.cpu import compile_ahead
from dflash_runtime.compute.gpu.launch.layouts import is_native, row_bytes
from dflash_runtime.compute.gpu.layers import matrix
from dflash_runtime.compute.gpu.layers.matrix import Uploader
from dflash_runtime.compute.gpu.transfers import file_copier
from support.emulated_device import EmulatedDevice

COLUMNS = 256
SIZES = (1, 7, 64, 3, 200)
"""Rows of runs; together more than a stage has room for."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    monkeypatch.setattr(matrix, "STAGED_BYTES", 2 * 50 * TensorType.Q4_K.row_bytes(COLUMNS))
    monkeypatch.setattr(compile_ahead, "are_compiled", lambda jobs: True)
    monkeypatch.setattr(matrix, "_LEAST_COPIED_BYTES", 2000)
    return EmulatedDevice()


def filled(
    uploader: Uploader, device: EmulatedDevice, tensor_type: TensorType, seed: int
) -> tuple[U8Array, list[U8Array]]:
    """What is on the device behind `fill_all`, and the runs that were uploaded."""
    random = np.random.default_rng(seed)
    native = tensor_type.row_bytes(COLUMNS)
    raws = [random.integers(0, 256, rows * native, np.uint8) for rows in SIZES]
    size = row_bytes(tensor_type, COLUMNS)
    weights = device.zeros(2 * sum(SIZES) * size, np.uint8)
    runs, first = [], 0
    for raw, rows in zip(raws, SIZES, strict=True):
        runs.append((weights[first * size : (first + rows) * size], raw))
        first += 2 * rows
    uploader.fill_all(runs, tensor_type, columns=COLUMNS)
    return device.download(weights), raws


@pytest.mark.parametrize("tensor_type", [TensorType.Q4_K, TensorType.F32, TensorType.Q8_0])
def test_threads_copy_what_the_driver_does(device: EmulatedDevice, tensor_type: TensorType) -> None:
    uploader = Uploader(device)
    plain, raws = filled(uploader, device, tensor_type, 1)
    with uploader.copying():
        for seed in (1, 2, 1):
            found, _ = filled(uploader, device, tensor_type, seed)
        with uploader.copying():
            again, _ = filled(uploader, device, tensor_type, 1)
        assert uploader._copier is not None
        assert uploader._copier.num_bytes > 0
    assert uploader._copier is None
    assert (found == plain).all()
    assert (again == plain).all()
    if is_native(tensor_type, COLUMNS):
        assert (plain[: raws[0].size] == raws[0]).all()


def test_without_locked_memory_the_driver_copies(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise DeviceUnavailable("no memory can be locked")

    uploader = Uploader(device)
    plain, _ = filled(uploader, device, TensorType.Q4_K, 1)
    monkeypatch.setattr(file_copier, "FileCopier", refuse)
    with uploader.copying():
        found, _ = filled(uploader, device, TensorType.Q4_K, 1)
    assert (found == plain).all()
