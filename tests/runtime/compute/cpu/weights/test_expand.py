"""Expand functions against the gguf package: every type that holds weights, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_adapters.quant import TensorType, dequantise
from dflash_protocol.ids import F32Array, U8Array
from dflash_runtime.compute.cpu.compile.compiling import Kernel, compile_kernel
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import i64
from dflash_runtime.compute.cpu.weights.rows import EXPANDED_TYPES, expand_function

TYPES = EXPANDED_TYPES
ROWS = 40
# Where a block's scales lie that are halves.
HALF_SCALES = {
    TensorType.IQ2_XXS: 0,
    TensorType.IQ2_XS: 0,
    TensorType.IQ2_S: 0,
    TensorType.IQ3_XXS: 0,
    TensorType.IQ3_S: 0,
    TensorType.IQ1_S: 0,
    TensorType.TQ1_0: 52,
    TensorType.TQ2_0: 64,
}


def _expand(function: int, row: int, columns: int, out: int) -> None:
    v.call_expand(function, row, columns, out)


@pytest.fixture(scope="module")
def expand() -> Kernel:
    return compile_kernel(_expand, *[i64] * 4)


def expanded(expand: Kernel, data: U8Array, tensor_type: TensorType, columns: int) -> F32Array:
    """Every row, checking that nothing was written outside of it."""
    row_bytes = tensor_type.row_bytes(columns)
    num_rows = data.size // row_bytes
    function = expand_function(tensor_type)
    out = np.full((num_rows, columns + 64), 7, np.float32)
    for r in range(num_rows):
        place = out[r, 32:].ctypes.data
        expand(function.address, data.ctypes.data + r * row_bytes, columns, place)
    assert (out[:, :32] == 7).all()
    assert (out[:, columns + 32 :] == 7).all()
    return out[:, 32 : columns + 32]


def assert_same_values(got: F32Array, expected: F32Array) -> None:
    """Equal bit for bit, except for the payload of NaNs."""
    both_nan = np.isnan(got) & np.isnan(expected)
    np.testing.assert_array_equal(
        np.where(both_nan, 0, got.view(np.uint32)), np.where(both_nan, 0, expected.view(np.uint32))
    )


def test_every_type_of_weights_has_an_expand_function() -> None:
    assert set(TYPES) == {tensor_type for tensor_type in TensorType if not tensor_type.is_integer}


@pytest.mark.wide(1)
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)
def test_any_bytes_expand_to_the_reference_values(
    expand: Kernel, tensor_type: TensorType, blocks: int
) -> None:
    elements = tensor_type.layout.block_elements
    columns = elements * blocks if elements > 1 else 71 * blocks
    rng = np.random.default_rng([int(tensor_type), blocks])
    data = rng.integers(0, 256, ROWS * tensor_type.row_bytes(columns), dtype=np.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = dequantise(data, tensor_type, (ROWS, columns))
    assert_same_values(expanded(expand, data, tensor_type, columns), expected)


def test_doubles_are_rounded_to_the_nearest_even_float(expand: Kernel) -> None:
    exact = [0.0, -0.0, 1 + 2.0**-24, 1 + 3 * 2.0**-24, -1 - 2.0**-24 - 2.0**-50, 2.0**-149]
    extreme = [2.0**-150, 1.5 * 2.0**-150, -(2.0**-200), 3.4028235677973366e38, -1e39, 5e-324]
    values = np.array([exact + extreme + [np.inf, -np.inf]])
    with np.errstate(over="ignore"):
        expected = values.astype(np.float32)
    got = expanded(expand, values.view(np.uint8).reshape(-1), TensorType.F64, values.size)
    assert_same_values(got, expected)


@pytest.mark.parametrize("tensor_type", HALF_SCALES, ids=lambda t: t.name)
def test_extreme_scales(expand: Kernel, tensor_type: TensorType) -> None:
    """Zero of both signs, subnormals, the smallest normal, the largest, infinity."""
    scales = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00]
    block_bytes = tensor_type.layout.block_bytes
    rng = np.random.default_rng(int(tensor_type))
    blocks = rng.integers(0, 256, (len(scales), block_bytes), dtype=np.uint8)
    offset = HALF_SCALES[tensor_type]
    blocks[:, offset : offset + 2] = np.array(scales, np.uint16)[:, None].view(np.uint8)
    expected = dequantise(blocks.reshape(-1), tensor_type, (len(scales), 256))
    assert_same_values(expanded(expand, blocks.reshape(-1), tensor_type, 256), expected)


@pytest.mark.wide(1)
@pytest.mark.parametrize("quants", [0x00, 0xFF])
@pytest.mark.parametrize("tensor_type", [t for t in TYPES if t.layout.block_elements > 1])
def test_extreme_quants(expand: Kernel, tensor_type: TensorType, quants: int) -> None:
    """The first and the last entry of every codebook and table."""
    columns = tensor_type.layout.block_elements
    data = np.full(tensor_type.row_bytes(columns), quants, np.uint8)
    expected = dequantise(data, tensor_type, (1, columns))
    assert_same_values(expanded(expand, data, tensor_type, columns), expected)


def test_every_scale_of_nvfp4(expand: Kernel) -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (64, 36), dtype=np.uint8)
    blocks[:, :4] = np.arange(256).reshape(64, 4)
    expected = dequantise(blocks.reshape(-1), TensorType.NVFP4, (64, 64))
    assert_same_values(expanded(expand, blocks.reshape(-1), TensorType.NVFP4, 64), expected)


@pytest.mark.parametrize(
    "tensor_type", [TensorType.IQ2_S, TensorType.IQ3_XXS, TensorType.IQ1_S, TensorType.TQ1_0]
)
def test_rows_at_odd_addresses(expand: Kernel, tensor_type: TensorType) -> None:
    columns = 512
    data = np.random.default_rng(1).integers(
        0, 256, 3 * tensor_type.row_bytes(columns), dtype=np.uint8
    )
    shifted = np.zeros(data.size + 1, np.uint8)[1:]
    shifted[:] = data
    expected = dequantise(data, tensor_type, (3, columns))
    assert_same_values(expanded(expand, shifted, tensor_type, columns), expected)
