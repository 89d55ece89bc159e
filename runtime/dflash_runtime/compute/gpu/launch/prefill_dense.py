"""Products of a prefill chunk's rows with dense matrices: q, k, v and output, router, head."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dflash_adapters.quant import TensorType
from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.gpu.device.device import (
    DeviceArray,
    Kernel,
    KernelDevice,
    PreparedLaunch,
    address,
)
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.layouts import DeviceMatrix, row_bytes
from dflash_runtime.compute.gpu.launch.prefill_operands import (
    AS_STORED,
    PreparedRows,
    Products,
    WeightScratch,
    activation_parts,
    check_type,
    half_row_bytes,
    product_row_bytes,
)

_MOST_KNOWN = 1024
"""Bound of the matrices that a model multiplies together."""

MAX_MATRICES = 4
"""Most matrices of one launch."""

DenseArgs = kernel_struct("gemm_dense.cu", "DenseArgs")


@dataclass(slots=True, eq=False)  # made for every launch, and frozen takes four times as long
class DenseProduct:
    """``out = x @ matrix.T``, or added to it. Shapes: out [T, rows] float32."""

    matrix: DeviceMatrix
    out: DeviceArray
    adds: bool = False


class _Piece(NamedTuple):
    """Rows of a matrix that share a launch with other matrices."""

    product_index: int
    matrix: DeviceMatrix
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class _Multiplication:
    """Prepared launches of products of rows with some matrices; destinations are filled in."""

    key: tuple[object, ...]
    launches: list[PreparedLaunch]
    results: list[tuple[ctypes.Structure, int, int]]
    """For each piece its entry in a launch's arguments, the product's index, and the offset of its
    columns in bytes."""


class DensePrefill:
    """Products of rows with any matrices; one serves a whole model."""

    def __init__(self, device: KernelDevice, *, products: Products, scratch: WeightScratch) -> None:
        self.products = products
        self._device = device
        self._scratch = scratch
        self._kernels: dict[tuple[int, int, bool], Kernel] = {}
        self._known: dict[tuple[tuple[int, TensorType, int, int], ...], _Multiplication] = {}

    def prepare(self, tensor_type: TensorType, columns: int) -> None:
        """Compile what such matrices need; before a capture, as nothing is compiled in one."""
        check_type(tensor_type, columns)
        if tensor_type not in AS_STORED:
            self._scratch.prepare(tensor_type, columns)
        self._kernel(columns, activation_parts((tensor_type,)))

    def run(self, rows: PreparedRows, products: Sequence[DenseProduct]) -> None:
        """Compute the products, small ones together, with the bits of each computed alone.

        Raises: SettingsError for other shapes or rows prepared in fewer parts than are needed.
        """
        matrices = tuple(
            (address(each.weights), each.tensor_type, each.rows, each.columns)
            for each in (product.matrix for product in products)
        )
        for product in products:
            self._check(rows, product)
        parts = sorted({activation_parts((each.matrix.tensor_type,)) for each in products})
        # Layers are multiplied repeatedly, by rows prepared at the same address.
        key = rows.num_rows, rows.columns, *(rows.addresses(each) for each in parts)
        known = self._known.get(matrices)
        if known is None or known.key != key:
            known = self._multiplication(rows, products, parts, key)
            if matrices not in self._known and len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[matrices] = known
        for entry, index, offset_bytes in known.results:
            product = products[index]
            entry.out = address(product.out, offset_bytes)
            entry.add = entry.out if product.adds else 0
        self._device.start(known.launches)

    def _multiplication(
        self,
        rows: PreparedRows,
        products: Sequence[DenseProduct],
        all_parts: Sequence[int],
        key: tuple[object, ...],
    ) -> _Multiplication:
        made = _Multiplication(key, [], [])
        for parts in all_parts:
            chosen = [
                (index, each.matrix)
                for index, each in enumerate(products)
                if activation_parts((each.matrix.tensor_type,)) == parts
            ]
            for pieces in self._launches(chosen):
                self._multiply(rows, parts, pieces, made)
        return made

    def _check(self, rows: PreparedRows, product: DenseProduct) -> None:
        matrix, out = product.matrix, product.out
        check_type(matrix.tensor_type, matrix.columns)
        shape = rows.num_rows, matrix.rows
        if rows.columns != matrix.columns or out.shape != shape:
            raise SettingsError(
                f"{matrix.rows} x {matrix.columns} times rows of {rows.columns} gives "
                f"{out.shape}, {shape} wanted"
            )
        if out.dtype != np.float32:
            raise SettingsError("results must be float32")

    def _launches(self, matrices: Iterable[tuple[int, DeviceMatrix]]) -> Iterator[list[_Piece]]:
        """Split the matrices into groups of pieces that fit the scratch memory."""
        pieces: list[_Piece] = []
        free_bytes = self._scratch.num_bytes
        for index, matrix in matrices:
            needed = 0 if matrix.tensor_type in AS_STORED else half_row_bytes(matrix.columns)
            first = 0
            while first < matrix.rows:
                num_rows = matrix.rows - first
                if needed:
                    num_rows = min(num_rows, free_bytes // needed)
                # A part of a matrix begins a new launch: too little scratch memory is left.
                is_cut = num_rows < matrix.rows - first
                if len(pieces) == MAX_MATRICES or (pieces and is_cut):
                    yield pieces
                    pieces, free_bytes = [], self._scratch.num_bytes
                    continue
                if num_rows == 0:
                    raise SettingsError(
                        f"a row of {matrix.columns} columns does not fit into "
                        f"{self._scratch.num_bytes} bytes of scratch memory"
                    )
                pieces.append(_Piece(index, matrix, first, num_rows))
                free_bytes -= num_rows * needed
                first += num_rows
        if pieces:
            yield pieces

    def _multiply(
        self, rows: PreparedRows, parts: int, pieces: list[_Piece], made: _Multiplication
    ) -> None:
        """Prepare the launches for one group of pieces."""
        x, x_scales, part_bytes = rows.addresses(parts)
        is_few = self._is_few(rows.num_rows, parts, pieces)
        _, tile = self.products.of_dense(parts, is_few=is_few)
        args = DenseArgs(
            x=x,
            x_scales=x_scales,
            part_bytes=part_bytes,
            num_tokens=rows.num_rows,
            num_matrices=len(pieces),
        )
        num_tiles = offset_bytes = 0
        for entry, piece in zip(args.matrices, pieces, strict=False):
            matrix = piece.matrix
            first_byte = piece.first_row * row_bytes(matrix.tensor_type, matrix.columns)
            entry.weights = weights_address = address(matrix.weights, first_byte)
            if matrix.tensor_type not in AS_STORED:
                entry.weights = self._scratch.place(offset_bytes)
                fill, num_bytes = self._scratch.fill(
                    matrix.tensor_type,
                    rows=piece.num_rows,
                    columns=matrix.columns,
                    offset_bytes=offset_bytes,
                    weights=weights_address,
                )
                made.launches.append(fill)
                offset_bytes += num_bytes
            made.results.append((entry, piece.product_index, 4 * piece.first_row))
            entry.out_stride = matrix.rows
            entry.num_rows = piece.num_rows
            entry.first_tile = num_tiles
            num_tiles += -(-piece.num_rows // tile.columns)
        grid = num_tiles, -(-rows.num_rows // tile.rows), 1
        kernel = self._kernel(rows.columns, parts, is_few=is_few)
        made.launches.append(
            PreparedLaunch(kernel, grid, tile.num_threads, args, tile.shared_bytes)
        )

    def _is_few(self, num_tokens: int, parts: int, pieces: Sequence[_Piece]) -> bool:
        """Whether tiles as large as usual would leave multiprocessors idle."""
        _, tile = self.products.of_dense(parts)
        columns = sum(-(-piece.num_rows // tile.columns) for piece in pieces)
        num_tiles = columns * -(-num_tokens // tile.rows)
        # Of floats, whose small tiles read three times as much, half of them would have to be idle.
        return num_tiles * (1 if parts else 2) < self._device.num_multiprocessors

    def _kernel(self, columns: int, parts: int, *, is_few: bool = False) -> Kernel:
        """For both sizes of tiles as soon as one is wanted: chunks come in all lengths."""
        if (columns, parts, is_few) not in self._kernels:
            for each in (False, True):
                product, tile = self.products.of_dense(parts, is_few=each)
                defines = {
                    **tile.defines(product),
                    "NUM_COLUMNS": columns,
                    "NUM_PARTS": max(parts, 1),
                    "WEIGHT_ROW_BYTES": product_row_bytes(columns, parts),
                }
                module = self._device.module("gemm_dense.cu", defines)
                self._kernels[columns, parts, each] = module.kernel("gemm_dense", DenseArgs)
        return self._kernels[columns, parts, is_few]
