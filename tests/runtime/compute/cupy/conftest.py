"""Emulated devices for kernels of decode: both widths of a warp, both orders of blocks."""

from __future__ import annotations

import pytest

from support.emulated_device import EmulatedDevice


@pytest.fixture(params=[(32, False), (32, True), (64, True)], ids=str)
def device(request: pytest.FixtureRequest) -> EmulatedDevice:
    lanes, runs_backward = request.param
    return EmulatedDevice(lanes=lanes, runs_backward=runs_backward)


@pytest.fixture(params=[32, 64])
def backward_device(request: pytest.FixtureRequest) -> EmulatedDevice:
    return EmulatedDevice(lanes=request.param, runs_backward=True)
