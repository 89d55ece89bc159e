"""Weights on the device: layouts, repacking, and what kernels unpack from them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.quant import TensorType, dequantise
from dflash_runtime.compute.gpu.device.device import address
from dflash_runtime.compute.gpu.device.kernel_sources import kernel_path
from dflash_runtime.compute.gpu.launch.decode_tokens import Embed, Repack
from dflash_runtime.compute.gpu.launch.layouts import (
    FIELDS,
    is_native,
    row_bytes,
)
from dflash_runtime.compute.step_order import FLOAT_TYPES
from support.device_layout import formats_table, repack
from support.device_weights import random_weights
from support.emulated_device import EmulatedDevice

QUANTISED = [kind for kind in FIELDS if kind not in FLOAT_TYPES]
COLUMNS = {32: 96, 64: 192, 256: 768}
"""By elements of a block: an odd number of them, and for 32 half a unit at the end."""


class UnpackRowsArgs(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("type", ctypes.c_int),
        ("num_rows", ctypes.c_int),
    )


def test_kernels_have_the_table_of_layouts() -> None:
    text = kernel_path("formats_table.cuh").read_text()
    assert text == formats_table()


@pytest.mark.parametrize("tensor_type", FIELDS)
def test_fields_are_a_whole_block(tensor_type: TensorType) -> None:
    places = [
        byte
        for field in FIELDS[tensor_type]
        for byte in range(field.native_offset, field.native_offset + field.num_bytes)
    ]
    assert sorted(places) == list(range(tensor_type.layout.block_bytes))


def test_rows_that_are_aligned_stay_as_they_are() -> None:
    assert is_native(TensorType.Q4_K, 2048)
    assert is_native(TensorType.Q5_K, 256)
    assert is_native(TensorType.F32, 64)
    assert not is_native(TensorType.F32, 100)
    assert not is_native(TensorType.Q6_K, 2048)
    rng = np.random.default_rng(1)
    weights = random_weights(rng, TensorType.Q4_K, 3, 512)
    np.testing.assert_array_equal(weights.packed, weights.native)


@pytest.mark.parametrize("tensor_type", FIELDS)
def test_rows_are_whole_lines_of_16_bytes(tensor_type: TensorType) -> None:
    columns = COLUMNS.get(tensor_type.layout.block_elements, 100)
    assert row_bytes(tensor_type, columns) % 16 == 0
    assert row_bytes(tensor_type, columns) >= tensor_type.row_bytes(columns)


def test_what_has_no_layout_or_no_whole_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layout\b.*IQ2_XXS"):
        row_bytes(TensorType.IQ2_XXS, 256)
    with pytest.raises(ValueError, match=r"multiple\b.*Q4_0"):
        row_bytes(TensorType.Q4_0, 100)
    with pytest.raises(ValueError, match=r"\b35\b.*\buint8\b.*\b1 rows\b.*\b64 Q4_0"):
        repack(TensorType.Q4_0, np.zeros(35, np.uint8), rows=1, columns=64)


@pytest.fixture(scope="module", params=[32, 64])
def device(request: pytest.FixtureRequest) -> EmulatedDevice:
    return EmulatedDevice(lanes=request.param, runs_backward=True)


@pytest.mark.wide(1)
@pytest.mark.parametrize("tensor_type", QUANTISED)
def test_unpacked_weights_are_the_files_values(
    device: EmulatedDevice, tensor_type: TensorType
) -> None:
    columns = COLUMNS[tensor_type.layout.block_elements]
    rng = np.random.default_rng(int(tensor_type))
    weights = random_weights(rng, tensor_type, 20, columns)
    rows, out = device.upload(weights.packed), device.empty((20, columns), np.float32)
    module = device.module(Path(__file__).with_name("unpack_rows.cu"), {})
    kernel = module.kernel("unpack_rows", UnpackRowsArgs)
    args = UnpackRowsArgs(address(rows), address(out), int(tensor_type), 20)
    device.launch(kernel, (1, 1, 1), device.lanes, args)
    np.testing.assert_array_equal(out, weights.values)


def test_every_scale_of_the_4_bit_floats(device: EmulatedDevice) -> None:
    rng = np.random.default_rng(3)
    for tensor_type, columns, places in (
        (TensorType.MXFP4, 96, (0,)),
        (TensorType.NVFP4, 192, (0, 1, 2, 3)),
    ):
        layout = tensor_type.layout
        blocks = rng.integers(0, 256, (3 * 86, layout.block_bytes), np.uint8)
        for place in places:
            blocks[:, place] = np.arange(3 * 86) % 256
        wanted = dequantise(blocks.reshape(-1), tensor_type, (86, columns))
        rows = device.upload(repack(tensor_type, blocks.reshape(-1), rows=86, columns=columns))
        out = device.empty(wanted.shape, np.float32)
        module = device.module(Path(__file__).with_name("unpack_rows.cu"), {})
        kernel = module.kernel("unpack_rows", UnpackRowsArgs)
        args = UnpackRowsArgs(address(rows), address(out), int(tensor_type), 86)
        device.launch(kernel, (1, 1, 1), device.lanes, args)
        np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize(
    ("tensor_type", "columns"),
    [
        *((TensorType.Q3_K, 768), (TensorType.MXFP4, 96)),
        pytest.param(TensorType.F16, 100, marks=pytest.mark.slow),
    ],
)
def test_the_device_repacks_as_numpy_does(
    device: EmulatedDevice, tensor_type: TensorType, columns: int
) -> None:
    weights = random_weights(np.random.default_rng(5), tensor_type, 7, columns)
    native = device.upload(weights.native.reshape(-1))
    out = device.empty(weights.packed.size, np.uint8)
    Repack(device, tensor_type, columns=columns).launch(native, out)
    np.testing.assert_array_equal(out.reshape(7, -1), weights.packed)


@pytest.mark.parametrize(
    ("tensor_type", "columns"), [(TensorType.Q6_K, 512), (TensorType.BF16, 100)]
)
def test_rows_of_an_embedding(
    device: EmulatedDevice, tensor_type: TensorType, columns: int
) -> None:
    weights = random_weights(np.random.default_rng(7), tensor_type, 5, columns)
    table, out = device.upload(weights.packed), device.empty((4, columns), np.float32)
    token_ids = device.upload(np.array([4, 0, 5, -1], np.int32))
    Embed(device, tensor_type, rows=5, columns=columns).launch(table, token_ids, out)
    np.testing.assert_array_equal(out[:2], weights.values[[4, 0]])
    assert np.isnan(out[2:]).all()
