"""Row kernels against the gguf package: expanding is exact, multiplying is close and repeatable."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from dflash_adapters.quant import TensorType
from dflash_adapters.quant.reference import dequantise
from dflash_protocol.ids import F32Array, U8Array
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.matrix import CpuMatrix, as_matrix
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.cpu.rows import is_native

NATIVE = [tensor_type for tensor_type in TensorType if is_native(tensor_type)]
QUANTISABLE = [
    TensorType.F16,
    TensorType.BF16,
    TensorType.Q4_0,
    TensorType.Q4_1,
    TensorType.Q5_0,
    TensorType.Q5_1,
    TensorType.Q8_0,
    TensorType.MXFP4,
]
# Where the halves that scale a block lie, so that random blocks can be given sane ones.
SCALE_OFFSETS = {
    TensorType.Q4_0: (0,),
    TensorType.Q4_1: (0, 2),
    TensorType.Q5_0: (0,),
    TensorType.Q5_1: (0, 2),
    TensorType.Q8_0: (0,),
    TensorType.IQ4_NL: (0,),
    TensorType.Q2_K: (80, 82),
    TensorType.Q3_K: (108,),
    TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2),
    TensorType.Q6_K: (208,),
    TensorType.IQ4_XS: (0,),
}


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuBackend(num_threads=1).ops


def random_rows(tensor_type: TensorType, rows: int, columns: int, scale: float = 0.01) -> U8Array:
    """Every bit of every quant random, scales of either sign about `scale`."""
    rng = np.random.default_rng([int(tensor_type), rows, columns])
    if tensor_type.layout.block_elements == 1:
        values = (rng.standard_normal((rows, columns)) * scale).astype(np.float32)
        return as_stored(values, tensor_type)
    blocks = rng.integers(
        0,
        256,
        (rows * columns // tensor_type.layout.block_elements, tensor_type.layout.block_bytes),
        dtype=np.uint8,
    )
    for offset in SCALE_OFFSETS.get(tensor_type, ()):
        scales = (rng.standard_normal((blocks.shape[0], 1)) * scale).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    if tensor_type is TensorType.MXFP4:
        blocks[:, 0] = rng.integers(110, 130, blocks.shape[0])
    return blocks.reshape(-1)


def as_stored(values: F32Array, tensor_type: TensorType) -> U8Array:
    if tensor_type is TensorType.F32:
        return np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    stored = quantize(values, GGMLQuantizationType(int(tensor_type)))
    return np.ascontiguousarray(stored).view(np.uint8).reshape(-1)


def columns_of(tensor_type: TensorType) -> int:
    """An odd number of blocks; for plain numbers, a row that ends inside a vector."""
    return {1: 213, 32: 7 * 32, 256: 3 * 256}[tensor_type.layout.block_elements]


def all_rows(ops: CpuOps, matrix: CpuMatrix) -> F32Array:
    return ops.embed(matrix, np.arange(matrix.rows, dtype=np.int32))


def assert_same_values(got: F32Array, expected: F32Array) -> None:
    """Equal bit for bit, but for the payload of NaNs."""
    both_nan = np.isnan(got) & np.isnan(expected)
    np.testing.assert_array_equal(
        np.where(both_nan, 0, got.view(np.uint32)), np.where(both_nan, 0, expected.view(np.uint32))
    )


@pytest.mark.parametrize("tensor_type", NATIVE, ids=lambda t: t.name)
def test_rows_expand_to_the_reference_values(ops: CpuOps, tensor_type: TensorType) -> None:
    columns = columns_of(tensor_type)
    data = random_rows(tensor_type, 5, columns)
    matrix = as_matrix(data, tensor_type, 5, columns)
    assert_same_values(all_rows(ops, matrix), dequantise(data, tensor_type, (5, columns)))


@pytest.mark.parametrize("tensor_type", NATIVE, ids=lambda t: t.name)
def test_any_bytes_expand_to_the_reference_values(ops: CpuOps, tensor_type: TensorType) -> None:
    columns = columns_of(tensor_type)
    rng = np.random.default_rng(int(tensor_type))
    data = rng.integers(0, 256, 40 * tensor_type.row_bytes(columns), dtype=np.uint8)
    matrix = as_matrix(data, tensor_type, 40, columns)
    assert_same_values(all_rows(ops, matrix), dequantise(data, tensor_type, (40, columns)))


@pytest.mark.parametrize("bits", [0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF])
@pytest.mark.parametrize("tensor_type", SCALE_OFFSETS, ids=lambda t: t.name)
def test_extreme_scales(ops: CpuOps, tensor_type: TensorType, bits: int) -> None:
    """Zero of both signs, the smallest and largest subnormal, the smallest normal, the largest."""
    columns = columns_of(tensor_type)
    blocks = random_rows(tensor_type, 2, columns).reshape(-1, tensor_type.layout.block_bytes)
    for offset in SCALE_OFFSETS[tensor_type]:
        blocks[:, offset : offset + 2] = np.array([bits], np.uint16).view(np.uint8)
    data = blocks.reshape(-1)
    matrix = as_matrix(data, tensor_type, 2, columns)
    expected = dequantise(data, tensor_type, (2, columns))
    assert_same_values(all_rows(ops, matrix), expected)
    x = np.random.default_rng(1).standard_normal((1, columns)).astype(np.float32)
    error = ops.linear(x, matrix)[0] - expected.astype(np.float64) @ x[0]
    assert np.abs(error).max() <= 1e-6 * np.abs(expected).sum(axis=1).max()


@pytest.mark.parametrize("exponent", [0, 1, 2, 127, 254])
def test_mxfp4_extreme_exponents(ops: CpuOps, exponent: int) -> None:
    data = random_rows(TensorType.MXFP4, 3, 32)
    data[::17] = exponent
    got = all_rows(ops, as_matrix(data, TensorType.MXFP4, 3, 32))
    assert_same_values(got, dequantise(data, TensorType.MXFP4, (3, 32)))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 4, 7, 70])
@pytest.mark.parametrize("rows", [1, 3, 37])
@pytest.mark.parametrize("tensor_type", NATIVE, ids=lambda t: t.name)
def test_linear(ops: CpuOps, tensor_type: TensorType, rows: int, num_tokens: int) -> None:
    columns = columns_of(tensor_type)
    data = random_rows(tensor_type, rows, columns)
    weights = dequantise(data, tensor_type, (rows, columns)).astype(np.float64)
    x = np.random.default_rng(rows).standard_normal((num_tokens, columns)).astype(np.float32)
    got = ops.linear(x, as_matrix(data, tensor_type, rows, columns))
    assert got.shape == (num_tokens, rows)
    assert got.dtype == np.float32
    tolerance = 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(weights).T)
    assert (np.abs(got - x.astype(np.float64) @ weights.T) <= tolerance).all()


@pytest.mark.parametrize("tensor_type", QUANTISABLE, ids=lambda t: t.name)
def test_quantised_weights_stay_close_to_the_original(ops: CpuOps, tensor_type: TensorType) -> None:
    rng = np.random.default_rng(5)
    weights = rng.standard_normal((48, 512)).astype(np.float32)
    x = rng.standard_normal((3, 512)).astype(np.float32)
    got = ops.linear(x, as_matrix(as_stored(weights, tensor_type), tensor_type, 48, 512))
    exact = x.astype(np.float64) @ weights.astype(np.float64).T
    assert np.linalg.norm(got - exact) < 0.2 * np.linalg.norm(exact)


@pytest.mark.parametrize("tensor_type", NATIVE, ids=lambda t: t.name)
def test_a_products_bits_do_not_depend_on_its_batch(ops: CpuOps, tensor_type: TensorType) -> None:
    columns = columns_of(tensor_type)
    matrix = as_matrix(random_rows(tensor_type, 19, columns), tensor_type, 19, columns)
    x = np.random.default_rng(2).standard_normal((70, columns)).astype(np.float32)
    whole = ops.linear(x, matrix)
    for first, end in ((0, 1), (0, 3), (5, 12), (69, 70), (6, 70)):
        np.testing.assert_array_equal(ops.linear(x[first:end], matrix), whole[first:end])


@pytest.mark.parametrize("columns", [1, 2, 31, 32, 33, 52, 63, 64, 65, 96, 97, 1000])
@pytest.mark.parametrize("tensor_type", [TensorType.F32, TensorType.F16, TensorType.BF16])
def test_rows_of_any_length(ops: CpuOps, tensor_type: TensorType, columns: int) -> None:
    data = random_rows(tensor_type, 3, columns, scale=1.0)
    # The last row ends where readable memory might: what follows must not leak into a sum.
    buffer = np.full(data.size + 4096, 0xFF, np.uint8)
    buffer[: data.size] = data
    matrix = as_matrix(buffer[: data.size], tensor_type, 3, columns)
    weights = dequantise(data, tensor_type, (3, columns)).astype(np.float64)
    x = np.random.default_rng(columns).standard_normal((6, columns)).astype(np.float32)
    for num_tokens in (1, 6):
        got = ops.linear(x[:num_tokens], matrix)
        np.testing.assert_allclose(got, x[:num_tokens] @ weights.T, rtol=1e-4, atol=1e-5)


def test_rows_at_unaligned_addresses(ops: CpuOps) -> None:
    data = random_rows(TensorType.Q8_0, 3, 96)
    shifted = np.zeros(data.size + 3, np.uint8)[3:]
    shifted[:] = data
    x = np.random.default_rng(0).standard_normal((2, 96)).astype(np.float32)
    np.testing.assert_array_equal(
        ops.linear(x, as_matrix(shifted, TensorType.Q8_0, 3, 96)),
        ops.linear(x, as_matrix(data, TensorType.Q8_0, 3, 96)),
    )


def test_a_type_without_kernel_is_expanded_when_loaded(
    ops: CpuOps, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 64, TensorType.TQ2_0.row_bytes(256) * 3, dtype=np.uint8)
    with caplog.at_level("WARNING"):
        matrices = [as_matrix(data, TensorType.TQ2_0, 3, 256) for _ in range(2)]
    assert sum("TQ2_0" in message for message in caplog.messages) <= 1
    expected = dequantise(data, TensorType.TQ2_0, (3, 256))
    for matrix in matrices:
        assert_same_values(all_rows(ops, matrix), expected)


def test_a_matrix_needs_exactly_its_bytes() -> None:
    data = random_rows(TensorType.Q8_0, 2, 64)
    with pytest.raises(ValueError, match="expected 136 contiguous bytes"):
        as_matrix(data[:-1], TensorType.Q8_0, 2, 64)
    with pytest.raises(ValueError, match="multiple"):
        as_matrix(data, TensorType.Q8_0, 2, 33)
    with pytest.raises(ValueError, match="contiguous"):
        as_matrix(np.repeat(data, 2)[::2], TensorType.Q8_0, 2, 64)
