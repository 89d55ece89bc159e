"""Products of a chunk of a prompt, of more tokens than a step.

Matrices are multiplied as halves that are made of them in scratch memory, on tensor cores where
there are some. Memory for the largest chunk is taken once, when the first chunk comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_adapters.layers import Gate
from dflash_adapters.quant import TensorType
from dflash_adapters.routing import RoutingRule
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.launch.layouts import DeviceMatrix
from dflash_runtime.compute.gpu.launch.prefill_dense import DensePrefill, DenseProduct
from dflash_runtime.compute.gpu.launch.prefill_operands import (
    PreparedRows,
    RowPreparer,
    WeightScratch,
    activation_parts,
    products_of,
)
from dflash_runtime.compute.gpu.launch.row_kernels import (
    ChooseExperts,
    ColumnsOf,
    Elementwise,
)
from dflash_runtime.compute.gpu.layers.rows import Input, Norm, Rows
from dflash_runtime.compute.gpu.ops.kernels import ExpertChoice


@dataclass(slots=True)
class _Columns:
    """What rows of so many columns are multiplied by."""

    parts: int = 0
    wants_floats: bool = False
    preparer: RowPreparer | None = None
    prepared: PreparedRows | None = None
    prepared_of: Input | None = None
    """Whose rows were prepared last: these have overwritten those before."""


class ChunkKernels:
    """Launches of chunks. Implements kernels.LayerKernels. One serves a whole model."""

    def __init__(self, device: KernelDevice, *, max_chunk: int, scratch_bytes: int) -> None:
        self.max_chunk = max_chunk
        self.products = products_of(device)
        self._device = device
        self.scratch_bytes = scratch_bytes
        self._scratch: WeightScratch | None = None
        self._dense: DensePrefill | None = None
        self._columns: dict[int, _Columns] = {}
        self._choose = ChooseExperts(device)
        self._elementwise = Elementwise(device)

    @property
    def has_worked(self) -> bool:
        """Whether memory for chunks has been taken."""
        return self._scratch is not None

    def expect(self, tensor_type: TensorType, columns: int) -> None:
        """Rows of so many columns will be multiplied by matrices of this type."""
        known = self._columns.setdefault(columns, _Columns())
        parts = activation_parts((tensor_type,))
        known.wants_floats |= parts == 0
        if parts > known.parts:
            known.parts = parts
            known.preparer = known.prepared = known.prepared_of = None

    @property
    def scratch(self) -> WeightScratch:
        """Memory for matrices as halves, taken when it is first needed."""
        if self._scratch is None:
            self._scratch = WeightScratch(self._device, self.scratch_bytes)
        return self._scratch

    # -- products ---------------------------------------------------------------------------------

    def rows(self, num_tokens: int, columns: int) -> Rows:
        """New rows, with anything in them."""
        return Rows(self._device.empty((num_tokens, columns), np.float32))

    def head_rows(self, num_tokens: int, columns: int, *, head_dim: int) -> Rows:
        """Never as int8."""
        return self.rows(num_tokens, columns)

    def normed(self, rows: Rows, norm: Norm) -> Rows:
        return self.copy_of(Input(rows, norm))

    def project(
        self, x: Input, matrices: Sequence[DeviceMatrix], *, add_to: Rows | None = None
    ) -> list[Rows]:
        """With `add_to`, which is then the result, added to it."""
        prepared = self.prepare(x)
        outs = [add_to or self.rows(prepared.num_rows, matrix.rows) for matrix in matrices]
        if self._dense is None:
            self._dense = DensePrefill(self._device, products=self.products, scratch=self.scratch)
        self._dense.run(
            prepared,
            [
                DenseProduct(matrix, out.array, adds=add_to is not None)
                for matrix, out in zip(matrices, outs, strict=True)
            ],
        )
        return outs

    def add_product(self, x: Input, matrix: DeviceMatrix, residual: Rows) -> None:
        self.project(x, (matrix,), add_to=residual)

    def swiglu_product(self, gate: Rows, up: Rows, matrix: DeviceMatrix) -> Rows:
        return self.project(self._activated(gate, up), (matrix,))[0]

    def add_swiglu(
        self, gate: Rows, up: Rows, matrix: DeviceMatrix, *, residual: Rows, share: Rows | None
    ) -> None:
        if share is None:
            self.add_product(self._activated(gate, up), matrix, residual)
            return
        product = self.swiglu_product(gate, up, matrix).array
        self._elementwise.gated(product, ColumnsOf.whole(share.array), Gate.SIGMOID, product)
        self._elementwise.add_rows(residual.array, product, residual.array)

    def _activated(self, gate: Rows, up: Rows) -> Input:
        """In the place of `up`."""
        self._elementwise.swiglu(gate.array, up.array, up.array)
        return Input(up)

    def router_logits(self, x: Input, matrix: DeviceMatrix) -> Rows:
        return self.project(x, (matrix,))[0]

    def logits(self, x: Input, matrix: DeviceMatrix) -> Rows:
        return self.project(x, (matrix,))[0]

    def scaled(self, x: Input, factors: ExpertChoice) -> Input:
        scaled = self.rows(x.rows.num_tokens, x.rows.columns)
        self._elementwise.scale_rows(self._floats(x), factors.weights, scaled.array)
        return Input(scaled)

    def choose(self, logits: Rows, rule: RoutingRule, bias: DeviceArray | None) -> ExpertChoice:
        """At once."""
        both = self._device.empty((2, logits.num_tokens, rule.num_experts_used), np.int32)
        ids, weights = both[0], both[1].view(np.float32)
        self._choose.launch(rule, logits.array, bias=bias, ids=ids, weights=weights)
        return ExpertChoice(ids, weights, rule, both=both)

    # -- rows as products read them ---------------------------------------------------------------

    def copy_of(self, x: Input) -> Rows:
        """Rows with the bits that products multiply; a copy, if there is a norm."""
        if x.norm is None:
            return x.rows
        copy = self.rows(x.rows.num_tokens, x.rows.columns)
        self._device.copy(copy.array, self._floats(x))
        return copy

    def _floats(self, x: Input) -> DeviceArray:
        """They hold until other rows of so many columns are prepared."""
        if x.norm is None:
            return x.rows.array
        known = self._columns.setdefault(x.rows.columns, _Columns())
        if not known.wants_floats:
            known.wants_floats = True
            known.prepared_of = None
        return self.prepare(x).floats

    def prepare(self, x: Input) -> PreparedRows:
        """Rows as products read them; normalised ones that were prepared last are there already."""
        rows, norm = x.rows, x.norm
        known = self._columns.setdefault(rows.columns, _Columns())
        if norm is not None and known.prepared_of is x and known.prepared is not None:
            return known.prepared
        if known.preparer is None:
            known.preparer = RowPreparer(
                self._device, columns=rows.columns, max_rows=self.max_chunk, parts=known.parts
            )
        if norm is None:
            known.prepared = known.prepared_of = None
            return known.preparer.prepare(rows.array)
        known.prepared_of = x
        known.prepared = known.preparer.prepare(
            rows.array, norm=norm.weight, eps=norm.eps, wants_floats=known.wants_floats
        )
        return known.prepared
