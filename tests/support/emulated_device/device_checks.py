"""Checks of `cases.cu` that hold on every device, emulated or not."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.device import KernelDevice, address

CASES = Path(__file__).parent / "cases.cu"
WRONG_GUESS = Path(__file__).parent / "wrong_guess.cu"


class SumArgs(ctypes.Structure):
    _fields_ = (
        ("input", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
    )


class NamesArgs(ctypes.Structure):
    _fields_ = (
        ("input", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        ("wide", ctypes.c_uint64),
        ("value", ctypes.c_float),
    )


class PaddedArgs(ctypes.Structure):
    _fields_ = (
        ("small", ctypes.c_uint8),
        ("wide", ctypes.c_uint64),
        ("half", ctypes.c_uint16),
        ("pointer", ctypes.c_void_p),
        ("tail", ctypes.c_int),
    )


class MistakeArgs(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("size", ctypes.c_int))


def check_sums(device: KernelDevice) -> None:
    """Sums of integers, which do not depend on the order."""
    values = np.random.default_rng(1).integers(-9, 9, (37, 1001)).astype(np.float32)
    kernel = device.module(str(CASES), {}).kernel("sum_rows", SumArgs)
    array, out = device.upload(values), device.empty(37, np.float32)
    device.launch(kernel, (37, 1, 1), 256, SumArgs(address(array), address(out), *values.shape))
    np.testing.assert_array_equal(device.download(out), values.sum(axis=1))


def check_padding(device: KernelDevice) -> None:
    """Every field of a padded struct arrives."""
    kernel = device.module(str(CASES), {}).kernel("padded", PaddedArgs)
    out = device.empty(4, np.float32)
    args = PaddedArgs(7, 1 << 40, 513, address(out), -3)
    device.launch(kernel, (1, 1, 1), 64, args)
    np.testing.assert_array_equal(device.download(out), [7, 1 << 40, 513, -3])


def check_every_name(device: KernelDevice, *, value: float = 2.5) -> AnyArray:
    """What `every_name` wrote, [19, 64], compared with what numpy makes of it."""
    raw = np.random.default_rng(2).integers(0, 256, 16, np.uint8)
    raw[3] &= 0x7B  # no NaN, no infinity
    array, counter = device.upload(raw), device.zeros(1, np.uint32)
    out = device.empty((19, 64), np.uint32)
    kernel = device.module(str(CASES), {}).kernel("every_name", NamesArgs)
    wide = 0xFEDCBA9876543210
    args = NamesArgs(address(array), address(out), address(counter), wide, value)
    device.launch(kernel, (1, 1, 1), 64, args, shared_bytes=256)
    found = device.download(out)
    threads, lanes = np.arange(64), np.arange(64) % device.lanes
    signed = raw.view(np.int8).astype(np.int64)
    last = wide + device.lanes - 1
    number = np.float32(value)
    with np.errstate(all="ignore"):
        floats = found.view(np.float32)
        if np.isfinite(number) and abs(number) < 80:
            np.testing.assert_allclose(floats[8], np.exp(number), rtol=1e-5)
        if 1e-30 < number < 1e30:
            np.testing.assert_allclose(floats[9], 1 / np.sqrt(number), rtol=1e-6)
            np.testing.assert_allclose(floats[10], 1 / number, rtol=1e-6)
        half = number.astype(np.float16).view(np.uint16)
        rounded = np.clip(np.rint(np.float64(number)), -(2**31), 2**31 - 1)
    expected = {
        0: (63 - threads) * 3,
        1: threads ^ (device.lanes // 2),
        2: last >> 32,
        3: last & 0xFFFFFFFF,
        4: (int(signed[:4] @ signed[4:8]) + 7) % 2**32,
        5: raw[2:4].view(np.float16).astype(np.float32).view(np.uint32),
        7: 0 if np.isnan(number) else int(rounded) % 2**32,
        11: raw[3],
        12: 7,
        13: 0,
        14: np.float32(device.lanes - 0.5).view(np.uint32),
        15: device.lanes + (lanes // 8 * 64 + 28),
        16: 0x40490000,
        17: 1,
        18: 1,
    }
    if not np.isnan(number):
        expected[6] = half
    for row, values in expected.items():
        np.testing.assert_array_equal(found[row], np.broadcast_to(values, 64), err_msg=str(row))
    assert device.download(counter)[0] == 64
    return found
