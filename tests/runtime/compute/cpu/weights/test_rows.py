"""Rows of every type against the gguf package: exact as values, close and repeatable in products.

Quantised rows are multiplied by int8 activations, so the float64 reference gets those too.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from dflash_adapters.quant import TensorType, dequantise
from dflash_protocol.ids import F32Array, F64Array, U8Array
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.cpu.weights.matrix import CpuMatrix, as_matrix
from dflash_runtime.compute.cpu.weights.repacked.formats import FORMATS
from dflash_runtime.compute.cpu.weights.rows import EXPANDED_TYPES
from support.block_scales import SCALE_OFFSETS
from support.int8_activations import as_int8, half_steps

TYPES = EXPANDED_TYPES
PLAIN = [TensorType.F64, TensorType.F32, TensorType.F16, TensorType.BF16]
QUANTISED = [tensor_type for tensor_type in TYPES if tensor_type in FORMATS]
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


@pytest.fixture(scope="module")
def ops_by_threads() -> Iterator[dict[int, CpuOps]]:
    backends = {num_threads: CpuBackend(num_threads=num_threads) for num_threads in (1, 2, 3)}
    yield {num_threads: backend.ops for num_threads, backend in backends.items()}
    for backend in backends.values():
        backend.close()


@pytest.fixture(scope="module")
def ops(ops_by_threads: dict[int, CpuOps]) -> CpuOps:
    return ops_by_threads[1]


def random_rows(tensor_type: TensorType, rows: int, columns: int, scale: float = 0.01) -> U8Array:
    """Every bit of every quant random, scales of either sign about `scale`."""
    rng = np.random.default_rng([int(tensor_type), rows, columns])
    if tensor_type.layout.block_elements == 1:
        values = rng.standard_normal((rows, columns)) * scale
        if tensor_type is TensorType.F64:
            return values.view(np.uint8).reshape(-1)
        return as_stored(values.astype(np.float32), tensor_type)
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
    if tensor_type is TensorType.IQ1_M:
        blocks[:, 55] &= 0x1F  # the upper bits of a scale that is spread over four words
    return blocks.reshape(-1)


def as_stored(values: F32Array, tensor_type: TensorType) -> U8Array:
    if tensor_type is TensorType.F32:
        return np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    stored = quantize(values, GGMLQuantizationType(int(tensor_type)))
    return np.ascontiguousarray(stored).view(np.uint8).reshape(-1)


def columns_of(tensor_type: TensorType) -> int:
    """An odd number of blocks; for plain numbers, a row that ends inside a vector."""
    return {1: 213, 32: 7 * 32, 64: 5 * 64, 256: 3 * 256}[tensor_type.layout.block_elements]


def all_rows(ops: CpuOps, matrix: CpuMatrix) -> F32Array:
    return ops.embed(matrix, np.arange(matrix.rows, dtype=np.int32))


def as_multiplied(x: F32Array, tensor_type: TensorType) -> F64Array:
    """Activations as rows of a type are multiplied by."""
    return as_int8(x) if tensor_type in FORMATS else x.astype(np.float64)


def assert_same_values(got: F32Array, expected: F32Array) -> None:
    """Equal bit for bit, except for the payload of NaNs."""
    both_nan = np.isnan(got) & np.isnan(expected)
    np.testing.assert_array_equal(
        np.where(both_nan, 0, got.view(np.uint32)), np.where(both_nan, 0, expected.view(np.uint32))
    )


@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)
def test_rows_expand_to_the_reference_values(ops: CpuOps, tensor_type: TensorType) -> None:
    columns = columns_of(tensor_type)
    data = random_rows(tensor_type, 5, columns)
    matrix = as_matrix(data, tensor_type, 5, columns)
    assert_same_values(all_rows(ops, matrix), dequantise(data, tensor_type, (5, columns)))


@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)
def test_any_bytes_expand_to_the_reference_values(ops: CpuOps, tensor_type: TensorType) -> None:
    columns = columns_of(tensor_type)
    rng = np.random.default_rng(int(tensor_type))
    data = rng.integers(0, 256, 40 * tensor_type.row_bytes(columns), dtype=np.uint8)
    matrix = as_matrix(data, tensor_type, 40, columns)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = dequantise(data, tensor_type, (40, columns))
    assert_same_values(all_rows(ops, matrix), expected)


@pytest.mark.parametrize("tensor_type", SCALE_OFFSETS, ids=lambda t: t.name)
def test_extreme_scales(ops: CpuOps, tensor_type: TensorType) -> None:
    """Zero of both signs, the smallest and largest subnormal, the smallest normal, the largest."""
    columns = columns_of(tensor_type)
    blocks = random_rows(tensor_type, 2, columns).reshape(-1, tensor_type.layout.block_bytes)
    x = np.random.default_rng(1).standard_normal((2, columns)).astype(np.float32)
    multiplied = as_multiplied(x, tensor_type)
    for bits in (0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF):
        for offset in SCALE_OFFSETS[tensor_type]:
            blocks[:, offset : offset + 2] = np.array([bits], np.uint16).view(np.uint8)
        data = blocks.reshape(-1)
        matrix = as_matrix(data, tensor_type, 2, columns)
        expected = dequantise(data, tensor_type, (2, columns))
        assert_same_values(all_rows(ops, matrix), expected)
        weights = expected.astype(np.float64)
        tolerance = 1e-6 * np.abs(weights).sum(axis=1).max()
        for num_tokens in (1, 2):
            error = ops.linear(x[:num_tokens], matrix) - multiplied[:num_tokens] @ weights.T
            assert np.abs(error).max() <= tolerance, hex(bits)


@pytest.mark.parametrize("exponent", [0, 1, 2, 127, 254])
def test_mxfp4_extreme_exponents(ops: CpuOps, exponent: int) -> None:
    data = random_rows(TensorType.MXFP4, 3, 32)
    data[::17] = exponent
    got = all_rows(ops, as_matrix(data, TensorType.MXFP4, 3, 32))
    assert_same_values(got, dequantise(data, TensorType.MXFP4, (3, 32)))


@pytest.mark.wide(1)
@pytest.mark.parametrize("rows", [1, 3, 37])
@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)
def test_linear(ops: CpuOps, tensor_type: TensorType, rows: int) -> None:
    columns = columns_of(tensor_type)
    data = random_rows(tensor_type, rows, columns)
    matrix = as_matrix(data, tensor_type, rows, columns)
    weights = dequantise(data, tensor_type, (rows, columns)).astype(np.float64)
    rng = np.random.default_rng(rows)
    for num_tokens in (0, 1, 2, 4, 7, 8, 9, 70):
        x = rng.standard_normal((num_tokens, columns)).astype(np.float32)
        got = ops.linear(x, matrix)
        assert got.shape == (num_tokens, rows)
        assert got.dtype == np.float32
        multiplied = as_multiplied(x, tensor_type)
        tolerance = 1e-6 * (np.abs(multiplied) @ np.abs(weights).T)
        assert (np.abs(got - multiplied @ weights.T) <= tolerance).all(), num_tokens
        if tensor_type in FORMATS:
            tolerance += half_steps(x) @ np.abs(weights).T
        assert (np.abs(got - x.astype(np.float64) @ weights.T) <= tolerance).all(), num_tokens


@pytest.mark.parametrize("tensor_type", QUANTISED, ids=lambda t: t.name)
def test_int8_activations_cost_less_than_a_hundredth(ops: CpuOps, tensor_type: TensorType) -> None:
    data = random_rows(tensor_type, 64, 2048)
    weights = dequantise(data, tensor_type, (64, 2048)).astype(np.float64)
    x = np.random.default_rng(6).standard_normal((16, 2048)).astype(np.float32)
    exact = x.astype(np.float64) @ weights.T
    got = ops.linear(x, as_matrix(data, tensor_type, 64, 2048))
    assert np.linalg.norm(got - exact) < 0.01 * np.linalg.norm(exact)


@pytest.mark.parametrize("tensor_type", QUANTISED, ids=lambda t: t.name)
def test_blocks_of_activations_keep_their_own_scale(ops: CpuOps, tensor_type: TensorType) -> None:
    """Every block has another magnitude; some are zeros."""
    columns = columns_of(tensor_type)
    data = random_rows(tensor_type, 17, columns)
    weights = dequantise(data, tensor_type, (17, columns)).astype(np.float64)
    matrix = as_matrix(data, tensor_type, 17, columns)
    rng = np.random.default_rng(7)
    for num_tokens in (1, 3, 9):
        blocks = rng.standard_normal((num_tokens, columns // 32, 32))
        sizes = 10.0 ** rng.integers(-30, 30, (num_tokens, columns // 32, 1))
        x = (blocks * sizes).astype(np.float32).reshape(num_tokens, columns)
        x[:, :32] = 0
        multiplied = as_int8(x)
        tolerance = 1e-6 * (np.abs(multiplied) @ np.abs(weights).T)
        assert (np.abs(ops.linear(x, matrix) - multiplied @ weights.T) <= tolerance).all()
        for block in range(columns // 32):  # beside the largest, small ones count for nothing
            one = np.zeros_like(x)
            one[:, 32 * block : 32 * block + 32] = x[:, 32 * block : 32 * block + 32]
            multiplied = as_int8(one)
            tolerance = 1e-6 * (np.abs(multiplied) @ np.abs(weights).T)
            assert (np.abs(ops.linear(one, matrix) - multiplied @ weights.T) <= tolerance).all()


@pytest.mark.wide(1)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)
def test_what_is_no_number_does_not_become_one(
    ops: CpuOps, tensor_type: TensorType, bad: float
) -> None:
    columns = columns_of(tensor_type)
    matrix = as_matrix(random_rows(tensor_type, 3, columns), tensor_type, 3, columns)
    x = np.random.default_rng(8).standard_normal((9, columns)).astype(np.float32)
    clean = ops.linear(x, matrix)
    x[4, 40] = bad
    for first, end in ((0, 9), (4, 5)):
        got = ops.linear(x[first:end], matrix)
        assert not np.isfinite(got[4 - first]).any()
        np.testing.assert_array_equal(
            np.delete(got, 4 - first, 0), np.delete(clean[first:end], 4 - first, 0)
        )


@pytest.mark.parametrize("tensor_type", QUANTISABLE, ids=lambda t: t.name)
def test_quantised_weights_stay_close_to_the_original(ops: CpuOps, tensor_type: TensorType) -> None:
    rng = np.random.default_rng(5)
    weights = rng.standard_normal((48, 512)).astype(np.float32)
    x = rng.standard_normal((3, 512)).astype(np.float32)
    got = ops.linear(x, as_matrix(as_stored(weights, tensor_type), tensor_type, 48, 512))
    exact = x.astype(np.float64) @ weights.astype(np.float64).T
    assert np.linalg.norm(got - exact) < 0.2 * np.linalg.norm(exact)


@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)
def test_a_products_bits_do_not_depend_on_its_batch_or_threads(
    ops_by_threads: dict[int, CpuOps], tensor_type: TensorType
) -> None:
    """Parts of a set of tokens larger than any group and than the number of totals kept."""
    columns = columns_of(tensor_type)
    matrix = as_matrix(random_rows(tensor_type, 67, columns), tensor_type, 67, columns)
    x = np.random.default_rng(2).standard_normal((300, columns)).astype(np.float32)
    whole = ops_by_threads[1].linear(x, matrix)
    parts = [(0, 1), (0, 3), (5, 12), (6, 14), (6, 15), (1, 17), (3, 20), (299, 300), (7, 300)]
    parts += [(0, 256), (44, 300), (20, 277), (0, 300)]
    for ops in ops_by_threads.values():
        for first, end in parts:
            np.testing.assert_array_equal(ops.linear(x[first:end], matrix), whole[first:end])


@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)
def test_a_products_bits_do_not_depend_on_the_rows_around_it(
    ops: CpuOps, tensor_type: TensorType
) -> None:
    columns = columns_of(tensor_type)
    data = random_rows(tensor_type, 67, columns)
    x = np.random.default_rng(3).standard_normal((9, columns)).astype(np.float32)
    whole = ops.linear(x, as_matrix(data, tensor_type, 67, columns))
    by_rows = data.reshape(67, -1)
    for first, end in ((0, 1), (66, 67), (15, 17), (1, 17), (5, 38)):
        part = as_matrix(by_rows[first:end].reshape(-1), tensor_type, end - first, columns)
        for num_tokens in (1, 9):
            got = ops.linear(x[:num_tokens], part)
            np.testing.assert_array_equal(got, whole[:num_tokens, first:end])


@pytest.mark.wide(1)
@pytest.mark.parametrize("columns", [1, 2, 31, 32, 33, 52, 63, 64, 65, 96, 97, 1000])
@pytest.mark.parametrize("tensor_type", PLAIN, ids=lambda t: t.name)
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


@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)
def test_rows_at_unaligned_addresses(ops: CpuOps, tensor_type: TensorType) -> None:
    columns = columns_of(tensor_type)
    data = random_rows(tensor_type, 19, columns)
    shifted = np.zeros(data.size + 3, np.uint8)[3:]
    shifted[:] = data
    x = np.random.default_rng(0).standard_normal((2, columns)).astype(np.float32)
    matrices = [as_matrix(each, tensor_type, 19, columns) for each in (shifted, data)]
    for num_tokens in (1, 2):
        got, expected = (ops.linear(x[:num_tokens], matrix) for matrix in matrices)
        np.testing.assert_array_equal(got, expected)
    assert_same_values(*(all_rows(ops, matrix) for matrix in matrices))


@contextmanager
def between_guards(data: U8Array, *, at_end: bool) -> Iterator[U8Array]:
    """A copy with unreadable memory at one end."""
    page = mmap.PAGESIZE
    num_inner = -(-data.size // page) * page
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    whole = np.frombuffer(mmap.mmap(-1, num_inner + 2 * page), np.uint8)
    start = page + (num_inner - data.size if at_end else 0)
    copy = whole[start : start + data.size]
    copy[:] = data
    guards = [ctypes.c_void_p(whole[first:].ctypes.data) for first in (0, page + num_inner)]
    for guard in guards:
        assert protect(guard, ctypes.c_size_t(page), 0) == 0
    try:
        yield copy
    finally:
        for guard in guards:
            assert protect(guard, ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE) == 0


@pytest.mark.wide(1)
@pytest.mark.parametrize("at_end", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)
def test_nothing_is_read_outside_of_a_matrix(
    ops: CpuOps, tensor_type: TensorType, at_end: bool
) -> None:
    """It may be the end of the file. A read outside ends this process."""
    columns = columns_of(tensor_type)
    x = np.random.default_rng(0).standard_normal((9, columns)).astype(np.float32)
    for rows in (3, 16, 32):
        data = random_rows(tensor_type, rows, columns)
        expected = ops.linear(x, as_matrix(data, tensor_type, rows, columns))
        with between_guards(data, at_end=at_end) as copy:
            matrix = as_matrix(copy, tensor_type, rows, columns)
            got = [ops.linear(x[:num_tokens], matrix) for num_tokens in (1, 9)]
            assert all_rows(ops, matrix).shape == (rows, columns)
        for result in got:
            np.testing.assert_array_equal(result, expected[: result.shape[0]])


def test_a_matrix_needs_exactly_its_bytes() -> None:
    data = random_rows(TensorType.Q8_0, 2, 64)
    with pytest.raises(ValueError, match=r"\b136\b.*bytes"):
        as_matrix(data[:-1], TensorType.Q8_0, 2, 64)
    with pytest.raises(ValueError, match="multiple"):
        as_matrix(data, TensorType.Q8_0, 2, 33)
    with pytest.raises(ValueError, match="contiguous"):
        as_matrix(np.repeat(data, 2)[::2], TensorType.Q8_0, 2, 64)
