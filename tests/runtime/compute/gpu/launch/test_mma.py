"""The emulation of tensor cores and of copies that run on: fragments as mma.cuh draws them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from dflash_runtime.compute.gpu.device.device import address
from support.emulated_device import EmulatedDevice

CASES = str(Path(__file__).with_name("mma_cases.cu"))


class MmaArgs(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
        ("d", ctypes.c_uint64),
        ("is_transposed", ctypes.c_int),
    )


class CopyArgs(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_uint64),
        ("seen", ctypes.c_uint64),
        ("is_mistaken", ctypes.c_int),
    )


@pytest.mark.parametrize("is_transposed", [0, 1])
def test_product_of_fragments_is_that_of_matrices(is_transposed: int) -> None:
    device = EmulatedDevice()
    rng = np.random.default_rng(is_transposed)
    a = rng.standard_normal((16, 16)).astype(np.float16)
    b = rng.standard_normal((8, 16)).astype(np.float16)
    d = rng.standard_normal((16, 8)).astype(np.float32)
    stored_b = np.ascontiguousarray(b.T) if is_transposed else b
    arrays = [device.upload(each) for each in (a, stored_b, d)]
    kernel = device.module(CASES, {"COPY_EARLY": 0}).kernel("multiply", MmaArgs)
    device.launch(kernel, (1, 1, 1), 32, MmaArgs(*map(address, arrays), is_transposed))
    wanted = d + a.astype(np.float64) @ b.T.astype(np.float64)
    np.testing.assert_allclose(arrays[2], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_early", [0, 1])
@pytest.mark.parametrize("is_mistaken", [0, 1])
def test_copies_are_seen_once_they_were_waited_for(is_early: int, is_mistaken: int) -> None:
    device = EmulatedDevice()
    source = np.random.default_rng(3).integers(1, 1 << 31, (3, 32, 4), np.uint32)
    seen = device.empty(source.shape, np.uint32)
    module = device.module(CASES, {"COPY_EARLY": is_early})
    kernel = module.kernel("copy_in_groups", CopyArgs)
    uploaded = device.upload(source)
    args = CopyArgs(address(uploaded), address(seen), is_mistaken)
    device.launch(kernel, (1, 1, 1), 32, args)
    wanted = source.copy()
    for group in range(3):
        wanted[group, group::3] = 0
    is_right = (seen == wanted).all(axis=(1, 2)).tolist()
    # A wait that is missing shows where copies are done late.
    assert is_right == [True, is_early or not is_mistaken, True]
