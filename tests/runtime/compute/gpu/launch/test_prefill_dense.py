"""Products of rows with dense matrices, and rows that are prepared for them, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dflash_adapters.quant import TensorType, dequantise
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import F32Array, F64Array
from dflash_runtime.compute.gpu.device.device import DeviceArray, Grid, address
from dflash_runtime.compute.gpu.launch.layouts import FIELDS, DeviceMatrix
from dflash_runtime.compute.gpu.launch.prefill_dense import DensePrefill, DenseProduct
from dflash_runtime.compute.gpu.launch.prefill_operands import (
    TENSOR_PRODUCTS,
    ProductKind,
    Products,
    RowPreparer,
    Tile,
    WeightScratch,
    activation_parts,
    half_row_bytes,
    products_of,
)
from support.device_layout import repack
from support.emulated_device import EmulatedDevice
from support.llama_oracle import quantise
from support.prefill_rig import SMALL_HALF, SMALL_TENSOR

COLUMNS = 96
F32, F16, BF16, Q8_0, Q4_0 = (
    TensorType.F32,
    TensorType.F16,
    TensorType.BF16,
    TensorType.Q8_0,
    TensorType.Q4_0,
)


class StoredMatrix:
    """A random matrix on a device; `values` is what it stands for. [rows, columns]"""

    def __init__(
        self, device: EmulatedDevice, tensor_type: TensorType, rows: int, columns: int = COLUMNS
    ) -> None:
        rng = np.random.default_rng([int(tensor_type), rows])
        raw = quantise(rng.standard_normal((rows, columns), dtype=np.float32), tensor_type.name)
        raw = raw.reshape(-1).view(np.uint8)
        self.tensor_type = tensor_type
        self.rows, self.columns = rows, columns
        self.values: F64Array = dequantise(raw, tensor_type, (rows, columns)).astype(np.float64)
        self.weights = device.upload(repack(tensor_type, raw, rows=rows, columns=columns))

    def product(self, out: DeviceArray, *, adds: bool = False) -> DenseProduct:
        matrix = DeviceMatrix(self.rows, self.columns, self.tensor_type, self.weights)
        return DenseProduct(matrix, out, adds)


def random_rows(num_rows: int, columns: int = COLUMNS) -> F32Array:
    return np.random.default_rng(num_rows).standard_normal((num_rows, columns), dtype=np.float32)


def relative_error(found: F32Array, wanted: F64Array) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize(
    ("products", "lanes"), [(SMALL_TENSOR, 32), (SMALL_HALF, 64)], ids=["tensor", "fma"]
)
@pytest.mark.parametrize("num_rows", [1, 40])
def test_several_matrices_at_once(products: Products, lanes: int, num_rows: int) -> None:
    device = EmulatedDevice(lanes=lanes, runs_backward=True)
    x = random_rows(num_rows)
    rows = RowPreparer(device, columns=COLUMNS, max_rows=70, parts=2).prepare(device.upload(x))
    # Room for 50 rows of halves: one of the matrices is cut, none is alone with its neighbours.
    scratch = WeightScratch(device, 50 * half_row_bytes(COLUMNS))
    dense = DensePrefill(device, products=products, scratch=scratch)
    types = (Q8_0, F16, Q4_0, F32, Q8_0, BF16, Q8_0, F32, Q8_0, Q8_0)
    sizes = (9, 70, 130, 33, 2, 8, 1, 70, 3, 5)
    matrices = [StoredMatrix(device, *each) for each in zip(types, sizes, strict=True)]
    outs = [device.empty((num_rows, matrix.rows), np.float32) for matrix in matrices]
    residuals = [random_rows(num_rows, matrix.rows) for matrix in matrices[:3]]
    outs[:3] = [device.upload(each) for each in residuals]  # added in place
    products_wanted = [
        matrix.product(out, adds=index < 3)
        for index, (matrix, out) in enumerate(zip(matrices, outs, strict=True))
    ]
    dense.run(rows, products_wanted)
    for index, (matrix, out) in enumerate(zip(matrices, outs, strict=True)):
        wanted = x.astype(np.float64) @ matrix.values.T
        if index < 3:
            wanted += residuals[index]
        bound = 2e-6 if activation_parts((matrix.tensor_type,)) != 1 else 1e-3
        assert relative_error(out, wanted) <= bound, matrix.tensor_type
    alone = device.upload(residuals[2])
    dense.run(rows, [matrices[2].product(alone, adds=True)])
    np.testing.assert_array_equal(alone, outs[2], strict=True)


@pytest.mark.parametrize("products", [SMALL_TENSOR, SMALL_HALF], ids=["tensor", "fma"])
@pytest.mark.parametrize("tensor_type", [F32, F16, Q8_0], ids=lambda each: each.name)
def test_bits_of_a_row_are_its_own(products: Products, tensor_type: TensorType) -> None:
    device = EmulatedDevice()
    preparer = RowPreparer(device, columns=COLUMNS, max_rows=70, parts=2)
    dense = DensePrefill(device, products=products, scratch=WeightScratch(device, 1 << 16))
    matrix = StoredMatrix(device, tensor_type, 33)
    x = random_rows(70)

    def multiply(part: F32Array) -> F32Array:
        out = device.empty((part.shape[0], 33), np.float32)
        dense.run(preparer.prepare(device.upload(part)), [matrix.product(out)])
        return device.download(out)

    together = multiply(x)
    for chosen in (slice(0, 1), slice(31, 34), slice(69, 30, -1)):
        part = np.ascontiguousarray(x[chosen])
        np.testing.assert_array_equal(multiply(part), together[chosen], strict=True)


def test_what_was_launched_before_does_not_matter() -> None:
    """The same matrices again: of more rows and fewer, beside others, to other places."""
    device = EmulatedDevice()
    preparers = [RowPreparer(device, columns=COLUMNS, max_rows=70, parts=2) for _ in range(2)]
    types = (Q8_0, F32, F16)
    matrices = [StoredMatrix(device, each, 33) for each in types]

    def new() -> DensePrefill:
        return DensePrefill(
            device, products=SMALL_TENSOR, scratch=WeightScratch(device, 20 * half_row_bytes(96))
        )

    def multiply(dense: DensePrefill, num_rows: int, preparer: RowPreparer) -> list[F32Array]:
        rows = preparer.prepare(device.upload(random_rows(num_rows)))
        outs = [device.upload(random_rows(num_rows, 33)) for _ in matrices]
        several = zip(matrices, outs, (False, True, True), strict=True)
        dense.run(rows, [matrix.product(out, adds=adds) for matrix, out, adds in several])
        return [device.download(out) for out in outs]

    used = new()
    for num_rows, preparer in ((40, 0), (40, 0), (7, 0), (40, 1), (40, 0), (70, 1)):
        found = multiply(used, num_rows, preparers[preparer])
        wanted = multiply(new(), num_rows, preparers[preparer])
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other, strict=True)


class CountingDevice(EmulatedDevice):
    """Notes how many threads a block of each product has."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks: list[int] = []

    def launch(self, kernel: Any, grid: Grid, block: int, *args: Any, **options: Any) -> None:
        if kernel.name == "gemm_dense":
            self.blocks.append(block)
        super().launch(kernel, grid, block, *args, **options)


def test_small_tiles_where_large_ones_would_be_few_have_the_same_bits() -> None:
    few = Tile(rows=16, columns=32, warps_m=1, warps_n=2, stages=3)
    products = replace(SMALL_TENSOR, few_tile=few)
    x, results = random_rows(70), []
    for num_multiprocessors, tile in ((6, SMALL_TENSOR.half_tile), (7, few)):
        device = CountingDevice(num_multiprocessors=num_multiprocessors)
        preparer = RowPreparer(device, columns=COLUMNS, max_rows=70, parts=1)
        dense = DensePrefill(device, products=products, scratch=WeightScratch(device, 1 << 16))
        matrix, out = StoredMatrix(device, Q8_0, 70), device.empty((70, 70), np.float32)
        dense.run(preparer.prepare(device.upload(x)), [matrix.product(out)])  # in 3 x 2 large ones
        results.append(device.download(out))
        assert device.blocks == [tile.num_threads]
    np.testing.assert_array_equal(results[0], results[1], strict=True)


def test_small_tiles_of_floats_have_the_same_bits() -> None:
    x, results = random_rows(70), []
    threads = [SMALL_TENSOR.of_dense(0, is_few=is_few)[1].num_threads for is_few in (False, True)]
    assert threads[0] != threads[1]
    for num_multiprocessors, of_block in zip((8, 9), threads, strict=True):
        device = CountingDevice(num_multiprocessors=num_multiprocessors)
        preparer = RowPreparer(device, columns=COLUMNS, max_rows=70, parts=0)
        scratch = WeightScratch(device, 1 << 16)
        dense = DensePrefill(device, products=SMALL_TENSOR, scratch=scratch)
        matrix, out = StoredMatrix(device, F32, 70), device.empty((70, 70), np.float32)
        dense.run(preparer.prepare(device.upload(x)), [matrix.product(out)])  # in 2 x 2 usual ones
        results.append(device.download(out))
        assert device.blocks == [of_block]
    np.testing.assert_array_equal(results[0], results[1], strict=True)


@pytest.mark.parametrize("tensor_type", sorted(set(FIELDS) - {F32}), ids=lambda each: each.name)
def test_every_type_is_dequantised(tensor_type: TensorType) -> None:
    device = EmulatedDevice()
    # Rows that end within a unit of 64, where blocks are smaller; else several blocks.
    columns = {64: 448, 256: 512}.get(tensor_type.layout.block_elements, COLUMNS)
    matrix = StoredMatrix(device, tensor_type, 37, columns)
    scratch = WeightScratch(device, 37 * half_row_bytes(columns))
    fill, _ = scratch.fill(tensor_type, rows=37, columns=columns, weights=address(matrix.weights))
    device.start([fill])
    halves = device.download(scratch.memory).view(np.float16).reshape(37, -1)
    np.testing.assert_allclose(halves[:, :columns], matrix.values, rtol=2.0**-11, atol=1e-7)
    assert (halves[:, columns:] == 0).all()


@pytest.mark.parametrize("lanes", [32, 64])
@pytest.mark.parametrize("parts", [0, 1, 2])
def test_rows_are_normalised_and_kept_from_overflow(lanes: int, parts: int) -> None:
    device = EmulatedDevice(lanes=lanes, runs_backward=lanes == 64)
    preparer = RowPreparer(device, columns=2080, max_rows=9, parts=parts)
    x = random_rows(7, 2080)
    x[2] *= np.float32(1e30)
    x[3] *= np.float32(1e-4)
    x[5, 11] = np.nan
    norm = random_rows(1, 2080)[0]
    finite = [0, 1, 2, 3, 4, 6]
    for given in (None, norm):
        weight = None if given is None else device.upload(given)
        source = x.copy()
        if given is not None:
            source[2] = x[0]  # the squares of the large one are too large
        rows = preparer.prepare(device.upload(source), norm=weight, eps=1e-6, wants_floats=True)
        wanted = source.astype(np.float64)
        if given is not None:
            wanted = given * wanted / np.sqrt(np.mean(wanted**2, axis=1, keepdims=True) + 1e-6)
        floats = device.download(rows.floats)
        np.testing.assert_allclose(floats[finite], wanted[finite], rtol=1e-5)
        assert np.isnan(floats[5]).any()
        if not parts:
            continue
        scales = device.download(rows.scales)[:7]
        halves = device.download(rows.halves).view(np.float16)[:, :7].astype(np.float64)
        assert np.isfinite(halves[:, finite]).all()
        found = halves.sum(axis=0) * scales[:, None]
        size = np.abs(wanted[finite]).max(axis=1, keepdims=True)
        bound = 2.0**-11 if parts == 1 else 2.0**-20
        assert (np.abs(found[finite] - wanted[finite]) <= bound * size).all()
        assert np.isnan(found[5]).any()


def test_wrong_shapes_are_refused() -> None:
    device = EmulatedDevice()
    preparer = RowPreparer(device, columns=COLUMNS, max_rows=4, parts=1)
    with pytest.raises(SettingsError, match="room for"):
        preparer.prepare(device.upload(random_rows(5)))
    with pytest.raises(SettingsError, match="float32"):
        preparer.prepare(device.upload(random_rows(2).astype(np.float64)))
    with pytest.raises(SettingsError, match="a norm"):
        preparer.prepare(device.upload(random_rows(2)), norm=device.empty(32, np.float32))
    rows = preparer.prepare(device.upload(random_rows(2)))
    scratch = WeightScratch(device, 16)
    dense = DensePrefill(device, products=SMALL_TENSOR, scratch=scratch)
    matrix = StoredMatrix(device, Q8_0, 9)
    out = device.empty((2, 9), np.float32)
    with pytest.raises(SettingsError, match="wanted"):
        dense.run(rows, [matrix.product(device.empty((3, 9), np.float32))])
    with pytest.raises(SettingsError, match=r"\bfit\b"):
        dense.run(rows, [matrix.product(out)])
    with pytest.raises(SettingsError, match=r"multiplied\b.*\b2\b"):
        dense.run(rows, [StoredMatrix(device, F16, 9).product(out)])
    with pytest.raises(SettingsError, match=r"multiple\b.*\b32\b"):
        RowPreparer(device, columns=100, max_rows=4, parts=1)


def test_a_device_gets_the_largest_tiles_that_fit() -> None:
    needed = [
        each.half_tile.shared_bytes * each.half_tile.blocks_per_sm for each in TENSOR_PRODUCTS
    ]
    assert needed == sorted(needed, reverse=True)
    for products, num_bytes in zip(TENSOR_PRODUCTS, needed, strict=True):
        assert products_of(EmulatedDevice(max_shared_bytes=num_bytes)) == products
    small = EmulatedDevice(max_shared_bytes=needed[-1] - 1)
    assert products_of(small).half is ProductKind.HALF
    assert products_of(EmulatedDevice(lanes=64, max_shared_bytes=1 << 18)).half is ProductKind.HALF
    with pytest.raises(SettingsError, match="shared memory"):
        products_of(EmulatedDevice(max_shared_bytes=16384))
