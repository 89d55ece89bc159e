"""Products in float32: close to float64, and the same bits however many are computed at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from dflash_adapters.quant import TensorType, dequantise
from dflash_protocol.ids import F32Array, I32Array, U8Array
from dflash_runtime.compute.cpu.weights import float_tile
from dflash_runtime.compute.cpu.weights.rows import (
    COLUMNS,
    EXPAND,
    EXPANDED_TYPES,
    MULTIPLY,
    ROW_BYTES,
    expand_function,
)

PLAIN = {
    TensorType.F32: float_tile.F32,
    TensorType.F16: float_tile.F16,
    TensorType.BF16: float_tile.BF16,
}
TYPES = EXPANDED_TYPES
NUM_ROWS = [0, 1, 3, 6, 37]
NUM_VECTORS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 32, 33]
GUARD = 7.0

Multiply = Callable[..., F32Array]


@dataclass(frozen=True)
class Rows:
    """Stored rows and their values."""

    tensor_type: TensorType
    data: U8Array
    values: F32Array


def random_rows(tensor_type: TensorType, num_rows: int, columns: int) -> Rows:
    """Random quants, with scales that do not make values infinite."""
    rng = np.random.default_rng([int(tensor_type), num_rows, columns])
    row_bytes = tensor_type.row_bytes(columns)
    if tensor_type in PLAIN:
        values = rng.standard_normal((num_rows, columns)).astype(np.float32)
        if tensor_type is TensorType.F32:
            data = values.view(np.uint8)
        elif tensor_type is TensorType.F16:
            data = values.astype(np.float16).view(np.uint8)
        else:
            data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        data = data.reshape(-1).copy()
    elif tensor_type is TensorType.F64:
        data = rng.standard_normal((num_rows, columns)).view(np.uint8).reshape(-1)
    else:
        # No byte above 0x5B: no half and no E8M0 scale is then so large that products overflow.
        data = rng.integers(0, 0x5C, num_rows * row_bytes, dtype=np.uint8)
    return Rows(tensor_type, data, dequantise(data, tensor_type, (num_rows, columns)))


def columns_of(tensor_type: TensorType) -> int:
    """An odd number of blocks; for plain numbers, a row that ends inside a vector."""
    elements = tensor_type.layout.block_elements
    return 213 if elements == 1 else 3 * elements


def aligned(values: F32Array, offset: int = 0) -> F32Array:
    """A copy that starts `offset` bytes after a multiple of 64, with NaNs behind it."""
    buffer = np.full(values.size + 64, np.nan, np.float32)
    start = (offset - buffer.ctypes.data) % 64 // 4
    copied = buffer[start : start + values.size].reshape(values.shape)
    copied[:] = values
    return copied


@pytest.fixture(scope="module")
def multiply() -> Multiply:
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 10)
    functions = {
        kind: prototype(float_tile.float_rows(kind).address) for kind in (None, *PLAIN.values())
    }

    def multiply(rows: Rows, x: F32Array, indices: I32Array | None = None) -> F32Array:
        """Result [vectors, rows], computed into an array with a guard beyond each vector's."""
        num_rows, columns = rows.values.shape
        num_vectors = x.shape[0] if indices is None else indices.size
        scratch = np.full(float_tile.scratch_bytes(columns) + 8, 0xFF, np.uint8)
        scratch[-8:] = 1
        out = np.full((num_vectors + 1, num_rows + 1), GUARD, np.float32)
        expand, layout = PLAIN.get(rows.tensor_type), np.zeros(MULTIPLY, np.int64)
        layout[ROW_BYTES], layout[COLUMNS] = rows.tensor_type.row_bytes(columns), columns
        layout[EXPAND] = expand_function(rows.tensor_type).address if expand is None else expand
        functions[expand](
            layout.ctypes.data,
            rows.data.ctypes.data,
            num_rows,
            x.ctypes.data,
            x.strides[0],
            0 if indices is None else indices.ctypes.data,
            num_vectors,
            out.ctypes.data,
            out.strides[0],
            scratch.ctypes.data,
        )
        products = out[:num_vectors, :num_rows].copy()
        out[:num_vectors, :num_rows] = GUARD
        assert (out == GUARD).all()
        assert (scratch[-8:] == 1).all()
        return products

    return multiply


def assert_close(got: F32Array, rows: Rows, x: F32Array) -> None:
    weights, vectors = rows.values.astype(np.float64), x.astype(np.float64)
    tolerance = 1e-6 * (np.abs(vectors) @ np.abs(weights).T) + 1e-44
    assert (np.abs(got - vectors @ weights.T) <= tolerance).all()


@pytest.mark.wide(1)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)
def test_products_of_every_type(multiply: Multiply, tensor_type: TensorType, num_rows: int) -> None:
    rows = random_rows(tensor_type, num_rows, columns_of(tensor_type))
    rng = np.random.default_rng(num_rows)
    for num_vectors in NUM_VECTORS:
        x = rng.standard_normal((num_vectors, rows.values.shape[1])).astype(np.float32)
        assert_close(multiply(rows, x), rows, x)


@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)
def test_bits_depend_on_row_and_vector_alone(multiply: Multiply, tensor_type: TensorType) -> None:
    columns = columns_of(tensor_type)
    rows = random_rows(tensor_type, 19, columns)
    x = np.random.default_rng(2).standard_normal((33, columns)).astype(np.float32)
    whole = multiply(rows, x)
    for first, end in ((0, 1), (32, 33), (0, 2), (5, 8), (6, 10), (9, 14), (3, 9), (1, 12)):
        np.testing.assert_array_equal(multiply(rows, x[first:end]), whole[first:end])
    row_bytes = tensor_type.row_bytes(columns)
    for first, end in ((0, 1), (18, 19), (3, 9)):
        part = Rows(tensor_type, rows.data[first * row_bytes :], rows.values[first:end])
        for num_vectors in (1, 33):
            got = multiply(part, x[:num_vectors])
            np.testing.assert_array_equal(got, whole[:num_vectors, first:end])


@pytest.mark.parametrize("tensor_type", PLAIN, ids=lambda t: t.name)
def test_bits_do_not_depend_on_the_type_that_holds_the_values(
    multiply: Multiply, tensor_type: TensorType
) -> None:
    """Rows of halves converted while multiplied or before, or stored as F32."""
    rows = random_rows(tensor_type, 21, 213)
    stored = np.ascontiguousarray(rows.values).view(np.uint8).reshape(-1)
    as_f32 = Rows(TensorType.F32, stored, rows.values)
    x = np.random.default_rng(3).standard_normal((8, 213)).astype(np.float32)
    for num_vectors in (1, 2, 8):
        got = multiply(rows, x[:num_vectors])
        np.testing.assert_array_equal(got, multiply(as_f32, x[:num_vectors]))


@pytest.mark.wide(1)
@pytest.mark.parametrize(
    "columns", [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 97, 1000]
)
@pytest.mark.parametrize("tensor_type", PLAIN, ids=lambda t: t.name)
def test_rows_of_any_length(multiply: Multiply, tensor_type: TensorType, columns: int) -> None:
    rows = random_rows(tensor_type, 5, columns)
    # NaNs follow the last row and the last vector and must not leak into a sum.
    buffer = np.full(rows.data.size + 4096, 0xFF, np.uint8)
    buffer[: rows.data.size] = rows.data
    rows = Rows(tensor_type, buffer, rows.values)
    x = np.random.default_rng(columns).standard_normal((9, columns)).astype(np.float32)
    for num_vectors in (1, 3, 9):
        copied = aligned(x[:num_vectors])
        assert_close(multiply(rows, copied), rows, copied)


def test_the_order_of_a_sum(multiply: Multiply) -> None:
    """16 lanes take the columns in turn and are folded by halves."""
    rng = np.random.default_rng(4)
    row, x = (rng.integers(-1000, 1000, (1, 39)).astype(np.float32) for _ in range(2))
    row[0, 5], x[0, 5] = 2.0**20, 2.0**21  # a lane in which small products are rounded
    products = np.zeros((3, 16), np.float64)
    products.reshape(-1)[:39] = row[0].astype(np.float64) * x[0]
    total = np.zeros(16, np.float32)
    for step in products:
        # Exact: the products and sums have fewer bits than a float64, so this is one rounding.
        total = (total + step).astype(np.float32)
    while total.size > 1:
        total = total[: total.size // 2] + total[total.size // 2 :]
    rows = Rows(TensorType.F32, row.view(np.uint8).reshape(-1), row)
    assert multiply(rows, x)[0, 0] == total[0]


@pytest.mark.parametrize("offset", [0, 4, 16, 32])
@pytest.mark.parametrize("tensor_type", [TensorType.F32, TensorType.BF16, TensorType.TQ2_0])
def test_vectors_are_found_by_index_wherever_they_lie(
    multiply: Multiply, tensor_type: TensorType, offset: int
) -> None:
    columns = 256
    rows = random_rows(tensor_type, 6, columns)
    x = np.random.default_rng(5).standard_normal((11, columns)).astype(np.float32)
    expected = multiply(rows, x)
    placed = aligned(x, offset)
    np.testing.assert_array_equal(multiply(rows, placed), expected)
    for indices in ([10], [3, 3, 0], [0, 10, 2, 9, 9, 1, 4, 5, 6, 7, 8, 0, 3]):
        got = multiply(rows, placed, np.array(indices, np.int32))
        np.testing.assert_array_equal(got, expected[indices])


@pytest.mark.parametrize("tensor_type", [TensorType.F32, TensorType.F16, TensorType.IQ1_S])
@pytest.mark.parametrize("offset", [0, 16])
def test_rows_and_vectors_that_do_not_fit_the_scratch_at_once(
    multiply: Multiply, tensor_type: TensorType, offset: int
) -> None:
    columns = 16 * 256
    rows = random_rows(tensor_type, 45, columns)
    x = np.random.default_rng(6).standard_normal((40, columns)).astype(np.float32)
    got = multiply(rows, aligned(x, offset))
    assert_close(got, rows, x)
    for token in (0, 17, 18, 39):
        np.testing.assert_array_equal(multiply(rows, x[token : token + 1])[0], got[token])


@pytest.mark.parametrize("bits", [0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF])
def test_extreme_halves(multiply: Multiply, bits: int) -> None:
    """Zeros, subnormals, the smallest normal and the largest."""
    data = np.full(3 * 77, bits, np.uint16).view(np.uint8)
    rows = Rows(TensorType.F16, data, dequantise(data, TensorType.F16, (3, 77)))
    x = np.random.default_rng(7).standard_normal((7, 77)).astype(np.float32)
    for num_vectors in (1, 7):
        assert_close(multiply(rows, x[:num_vectors]), rows, x[:num_vectors])


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-130, 2.0**100])
def test_extreme_vectors(multiply: Multiply, scale: float) -> None:
    """Subnormal values count, and nothing overflows before the result does."""
    rows = random_rows(TensorType.F32, 5, 100)
    x = np.random.default_rng(8).integers(-8, 8, (8, 100)).astype(np.float32)
    x = (x.astype(np.float64) * scale).astype(np.float32)
    for num_vectors in (1, 8):
        got = multiply(rows, x[:num_vectors])
        exact = x[:num_vectors].astype(np.float64) @ rows.values.T.astype(np.float64)
        magnitude = np.abs(x[:num_vectors]).astype(np.float64) @ np.abs(rows.values).T
        # A subnormal sum loses up to half of the smallest number with each column.
        assert (np.abs(got - exact) <= 1e-6 * magnitude + 100 * 2.0**-149).all()
        assert got.any()
