"""Sums of experts and of rows that are added on the device."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_runtime.compute.gpu.launch.row_kernels import AddRows, AddSums
from support.emulated_device import EmulatedDevice

SIZES = 3, 100
"""More elements than a block has threads, and no multiple of them."""


@pytest.fixture(params=[(32, False), (64, True)], ids=str)
def device(request: pytest.FixtureRequest) -> EmulatedDevice:
    lanes, runs_backward = request.param
    return EmulatedDevice(lanes=lanes, runs_backward=runs_backward)


@pytest.mark.parametrize("has_more", [False, True])
def test_sums_are_rounded_once_and_added_to_the_residual(
    device: EmulatedDevice, has_more: bool
) -> None:
    rng = np.random.default_rng(1)
    residual = rng.standard_normal(SIZES).astype(np.float32)
    sums, more = rng.standard_normal(SIZES), rng.standard_normal(SIZES)
    out = device.upload(residual)
    AddSums(device).launch(out, device.upload(sums), device.upload(more) if has_more else None)
    wanted = residual + (sums + more if has_more else sums).astype(np.float32)
    np.testing.assert_array_equal(out, wanted)


def test_rows_are_added_in_place_or_elsewhere(device: EmulatedDevice) -> None:
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((2, *SIZES)).astype(np.float32)
    add = AddRows(device)
    ours, theirs, out = device.upload(x), device.upload(y), device.empty(SIZES, np.float32)
    add.launch(ours, theirs, out)
    np.testing.assert_array_equal(out, x + y)
    add.launch(ours, theirs, ours)
    np.testing.assert_array_equal(ours, x + y)
    with pytest.raises(ValueError, match=r"\by\b.* float32"):
        add.launch(ours, theirs[:2], out)
