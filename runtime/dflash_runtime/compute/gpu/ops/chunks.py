"""Products and routed experts of a chunk of a prompt, of more tokens than a step.

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
from dflash_protocol.batch import RoutedBatch
from dflash_protocol.ids import Phase
from dflash_runtime.compute.gpu.chunk_room import group_bytes
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.launch.layouts import DeviceMatrix
from dflash_runtime.compute.gpu.launch.prefill_dense import DensePrefill, DenseProduct
from dflash_runtime.compute.gpu.launch.prefill_experts import ExpertPrefill
from dflash_runtime.compute.gpu.launch.prefill_groups import ExpertGroups
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
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.layers.rows import Input, Norm, Rows
from dflash_runtime.compute.gpu.ops.choice_notes import ChoiceNotes
from dflash_runtime.compute.gpu.ops.kernels import ExpertChoice, RoutedRows
from dflash_runtime.compute.gpu.transfers.payload import PayloadMover


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

    def __init__(
        self, device: KernelDevice, notes: ChoiceNotes, *, max_chunk: int, scratch_bytes: int
    ) -> None:
        self.max_chunk = max_chunk
        self._notes = notes
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

    def expect_group(self, num_bytes: int) -> None:
        """Matrices of so many bytes as halves, of one expert, will be converted at once."""
        if self._scratch is None:
            self.scratch_bytes = max(self.scratch_bytes, num_bytes)

    def expect_floats(self, columns: int) -> None:
        """Rows of so many columns will be normalised, and read as floats."""
        self._columns.setdefault(columns, _Columns()).wants_floats = True

    def reserve(self) -> None:
        """Take the memory for chunks of what is expected. Raises: DeviceOutOfMemory."""
        assert self.scratch
        for columns, known in self._columns.items():
            preparer = self._preparer(columns, known)
            if known.wants_floats:
                preparer.reserve_floats()

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
        return self._notes.add(self.predicted(logits, rule, bias))

    def predicted(self, logits: Rows, rule: RoutingRule, bias: DeviceArray | None) -> ExpertChoice:
        """The same, of which no note is taken."""
        shape = logits.num_tokens, rule.num_experts_used
        ids, weights = self._device.empty(shape, np.int32), self._device.empty(shape, np.float32)
        self._choose.launch(rule, logits.array, bias=bias, ids=ids, weights=weights)
        return ExpertChoice(ids, weights, rule)

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
        preparer = self._preparer(rows.columns, known)
        if norm is None:
            known.prepared = known.prepared_of = None
            return preparer.prepare(rows.array)
        known.prepared_of = x
        known.prepared = preparer.prepare(
            rows.array, norm=norm.weight, eps=norm.eps, wants_floats=known.wants_floats
        )
        return known.prepared

    def _preparer(self, columns: int, known: _Columns) -> RowPreparer:
        if known.preparer is None:
            known.preparer = RowPreparer(
                self._device, columns=columns, max_rows=self.max_chunk, parts=known.parts
            )
        return known.preparer


class ChunkExperts:
    """Launches of a chunk's experts that are on this device. One serves a whole model."""

    def __init__(self, chunks: ChunkKernels, payload: PayloadMover) -> None:
        """`payload` brings rows of batches to its device, which is that of `chunks`."""
        self._chunks = chunks
        self._payload = payload
        self._device = payload.device
        self._groups: dict[tuple[int, int], ExpertGroups] = {}
        self._experts: dict[tuple[int, int, int], ExpertPrefill] = {}

    def expect(self, resident: ResidentLayer) -> None:
        """Experts of this layer will be computed."""
        for projection in resident.layer.projections[:2]:
            self._chunks.expect(projection.tensor_type, projection.columns)
        self._chunks.expect_group(group_bytes(resident.layer))

    def reserve(self, resident: ResidentLayer) -> None:
        """Take the memory for chunks of this layer, and compile what it needs.

        Raises: DeviceOutOfMemory, SettingsError.
        """
        self._groups_for(resident)
        self._kernels(resident)

    def add(self, resident: ResidentLayer, routed: RoutedRows, residual: Rows) -> None:
        """Add a layer's experts, all of which are here, to the residual."""
        self._run(resident, routed, residual=residual.array)

    def local_sums(
        self,
        resident: ResidentLayer,
        routed: RoutedRows,
        before: DeviceArray | None = None,
        *,
        mean_rows: float | None = None,
    ) -> DeviceArray:
        """Sums of those experts that are here, added to those `before`, which they then are.

        `mean_rows`: see ExpertPrefill.run. Shapes: result, before [T, H] float64.
        """
        if before is not None:
            self._run(resident, routed, mean_rows, sums=before, out_sums=before)
            return before
        here = self._device.empty(routed.x.rows.array.shape, np.float64)
        self._run(resident, routed, mean_rows, out_sums=here)
        return here

    def sums_of_batch(self, resident: ResidentLayer, batch: RoutedBatch) -> DeviceArray:
        """A batch's weighted sums, of experts that it names as `resident` does.

        Shapes: result [T, H] float64. Raises: SettingsError if there is no room for it.
        """
        hidden = Input(Rows(self._payload.array_of(batch.rows)))
        groups = self._groups_for(resident).load(batch)  # put together while rows are on their way
        out = self._device.empty(batch.hidden_shape, np.float64)
        prepared = self._chunks.prepare(hidden)
        self._kernels(resident).run(prepared, groups, resident.experts, out_sums=out)
        return out

    def _run(
        self,
        resident: ResidentLayer,
        routed: RoutedRows,
        mean_rows: float | None = None,
        **places: DeviceArray,
    ) -> None:
        """`places` are what ExpertPrefill.run adds to and writes."""
        prepared, choice = self._chunks.prepare(routed.x), routed.choice
        groups = self._groups_for(resident).group_chosen(
            choice.ids,
            choice.weights,
            slot_of_expert=resident.experts.slot_of_expert,
            num_resident=resident.num_resident,
            selections=resident.counted_in(Phase.PREFILL),
        )
        kernels = self._kernels(resident)
        kernels.run(prepared, groups, resident.experts, mean_rows=mean_rows, **places)

    def _groups_for(self, resident: ResidentLayer) -> ExpertGroups:
        num_experts = resident.layer.num_experts
        max_pairs = self._chunks.max_chunk * resident.layer.num_experts_used
        key = num_experts, max_pairs
        if key not in self._groups:
            self._groups[key] = ExpertGroups(
                self._device,
                num_experts=num_experts,
                max_pairs=max_pairs,
                tile_rows=self._chunks.products.tile_rows,
            )
        return self._groups[key]

    def _kernels(self, resident: ResidentLayer) -> ExpertPrefill:
        layer = resident.layer
        max_pairs = self._chunks.max_chunk * layer.num_experts_used
        key = layer.hidden_size, layer.ffn_size, max_pairs
        if key not in self._experts:
            self._experts[key] = ExpertPrefill(
                self._device,
                hidden_size=layer.hidden_size,
                ffn_size=layer.ffn_size,
                max_pairs=max_pairs,
                products=self._chunks.products,
                scratch=self._chunks.scratch,
            )
        self._experts[key].prepare(resident.experts)
        return self._experts[key]
