"""Products and experts of a chunk of a prompt, of more tokens than a step.

Matrices are multiplied as halves that are made of them in scratch memory, on tensor cores where
there are some. Memory for the largest chunk is taken once, when the first chunk comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_adapters.ops import RoutingRule
from dflash_adapters.quant import TensorType
from dflash_protocol.batch import RoutedBatch
from dflash_runtime.compute.gpu.device.buffers import Buffer
from dflash_runtime.compute.gpu.device.device import DeviceArray, address
from dflash_runtime.compute.gpu.launch.prefill_dense import DensePrefill, DenseProduct
from dflash_runtime.compute.gpu.launch.prefill_experts import ExpertPrefill
from dflash_runtime.compute.gpu.launch.prefill_groups import ExpertGroups
from dflash_runtime.compute.gpu.launch.prefill_rows import PreparedRows, RowPreparer
from dflash_runtime.compute.gpu.launch.prefill_tiles import activation_parts, products_of
from dflash_runtime.compute.gpu.launch.prefill_weights import WeightScratch
from dflash_runtime.compute.gpu.launch.row_kernels import ChooseExperts
from dflash_runtime.compute.gpu.layers.matrix import DeviceMatrix
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.layers.values import (
    Chosen,
    ExpertInputs,
    ExpertSums,
    F32Rows,
    Normed,
)
from dflash_runtime.compute.gpu.transfers.payload import PayloadMover


@dataclass(slots=True)
class _Columns:
    """What rows of so many columns are multiplied by."""

    parts: int = 0
    wants_floats: bool = False
    preparer: RowPreparer | None = None
    prepared: PreparedRows | None = None
    prepared_of: object = field(default=None)
    """The value whose rows were prepared last; others have overwritten those before."""


class Chunks:
    """Launches of chunks. One serves a whole model."""

    def __init__(self, payload: PayloadMover, *, max_chunk: int, scratch_bytes: int) -> None:
        """`payload` brings rows of batches to its device, which is the one."""
        device = payload.device
        self.max_chunk = max_chunk
        self._payload = payload
        self._device = device
        self._products = products_of(device)
        self._scratch_bytes = scratch_bytes
        self._scratch_memory: WeightScratch | None = None
        self._dense: DensePrefill | None = None
        self._columns: dict[int, _Columns] = {}
        self._groups: dict[tuple[int, int], ExpertGroups] = {}
        self._experts: dict[tuple[int, int, int], ExpertPrefill] = {}
        self._choose = ChooseExperts(device)

    @property
    def has_worked(self) -> bool:
        """Whether memory for chunks has been taken."""
        return self._scratch_memory is not None

    def expect(self, tensor_type: TensorType, columns: int) -> None:
        """Rows of so many columns will be multiplied by matrices of this type."""
        known = self._columns.setdefault(columns, _Columns())
        parts = activation_parts((tensor_type,))
        known.wants_floats |= parts == 0
        if parts > known.parts:
            known.parts = parts
            known.preparer = known.prepared = known.prepared_of = None

    def expect_experts(self, resident: ResidentLayer) -> None:
        """The same of a layer's experts."""
        for projection in resident.layer.projections[:2]:
            self.expect(projection.tensor_type, projection.columns)

    def rows(self, num_tokens: int, columns: int) -> F32Rows:
        """New rows, with anything in them."""
        return F32Rows(self._device.empty((num_tokens, columns), np.float32))

    def project(
        self,
        x: Normed | F32Rows,
        matrices: Sequence[DeviceMatrix],
        *,
        add_to: F32Rows | None = None,
    ) -> list[F32Rows]:
        """``x @ matrix.T`` of each; with `add_to`, which is then the result, added to it."""
        prepared = self.prepare(x)
        outs = [add_to or self.rows(prepared.num_rows, matrix.rows) for matrix in matrices]
        if self._dense is None:
            self._dense = DensePrefill(
                self._device, products=self._products, scratch=self._scratch()
            )
        self._dense.run(
            prepared,
            [
                DenseProduct(
                    tensor_type=matrix.tensor_type,
                    rows=matrix.rows,
                    columns=matrix.columns,
                    weights_address=address(matrix.weights),
                    out=out.array,
                    add=None if add_to is None else add_to.array,
                )
                for matrix, out in zip(matrices, outs, strict=True)
            ],
        )
        if add_to is not None:
            add_to.version += 1
        return outs

    def route(
        self, logits: F32Rows, rule: RoutingRule, bias: DeviceArray | None = None
    ) -> tuple[Chosen, Chosen]:
        """Experts chosen from logits."""
        both = self._device.empty((2, logits.num_tokens, rule.num_experts_used), np.int32)
        ids, weights = Buffer(both[0]), Buffer(both[1].view(np.float32))
        self._choose.launch(rule, logits.array, bias=bias, ids=ids.array, weights=weights.array)
        return Chosen(ids, both=both), Chosen(weights, both=both)

    def add_experts(self, sums: ExpertSums, residual: F32Rows) -> None:
        """Add a layer's experts, all of which are here, to the residual."""
        self._run_experts(sums, residual=residual.array, out=residual.array)
        residual.version += 1

    def local_sums(self, sums: ExpertSums, before: Buffer | None = None) -> Buffer:
        """Sums of those experts that are here, added to those `before`, which they then are.

        Shapes: result, before [T, H] float64.
        """
        if before is not None:
            self._run_experts(sums, sums=before.array, out_sums=before.array)
            return before
        here = Buffer(self._device.empty(sums.shape, np.float64))
        self._run_experts(sums, out_sums=here.array)
        return here

    def sums_of_batch(self, resident: ResidentLayer, batch: RoutedBatch) -> DeviceArray:
        """A batch's weighted sums, of experts that it names as `resident` does.

        Shapes: result [T, H] float64. Raises: SettingsError if there is no room for it.
        """
        hidden = F32Rows(self._payload.array_of(batch.rows))
        groups = self._groups_of(resident).load(batch)  # put together while rows are on their way
        out = self._device.empty(batch.hidden_shape, np.float64)
        self._experts_of(resident).run(self.prepare(hidden), groups, resident.prefill, out_sums=out)
        return out

    def _run_experts(self, chosen: ExpertSums, **places: DeviceArray) -> None:
        """`places` are what ExpertPrefill.run adds to and writes."""
        resident = chosen.layer
        assert resident is not None
        prepared = self.prepare(chosen.x)
        groups = self._groups_of(resident).group_chosen(
            chosen.topk_ids.array,
            chosen.topk_weights.array,
            slot_of_expert=resident.decode.slot_of_expert,
            num_resident=resident.num_resident,
            selections=resident.selections,
        )
        self._experts_of(resident).run(prepared, groups, resident.prefill, **places)

    def normed_rows(self, x: ExpertInputs) -> F32Rows:
        """The rows themselves, normalised if they are to be, with the bits that products have
        multiplied.

        They hold until other rows of so many columns are prepared.
        """
        if isinstance(x, F32Rows):
            return x
        known = self._columns.setdefault(x.rows.columns, _Columns())
        if not known.wants_floats:
            known.wants_floats = True
            known.prepared_of = None
        return F32Rows(self.prepare(x).floats)

    def copy_of_normed(self, x: ExpertInputs) -> F32Rows:
        """A copy of the rows, in a buffer of its own."""
        if isinstance(x, F32Rows):
            return x
        copy = self.rows(x.num_tokens, x.rows.columns)
        self._device.copy(copy.array, self.normed_rows(x).array)
        return copy

    def prepare(self, x: Normed | F32Rows) -> PreparedRows:
        """Rows as products read them; those of the last value are there already."""
        rows = x if isinstance(x, F32Rows) else x.rows
        known = self._columns.setdefault(rows.columns, _Columns())
        if isinstance(x, Normed):
            x.require_unchanged()
            if known.prepared_of is x and known.prepared is not None:
                return known.prepared
        if known.preparer is None:
            known.preparer = RowPreparer(
                self._device, columns=rows.columns, max_rows=self.max_chunk, parts=known.parts
            )
        if isinstance(x, F32Rows):
            known.prepared = known.prepared_of = None
            return known.preparer.prepare(rows.array)
        known.prepared_of = x
        known.prepared = known.preparer.prepare(
            rows.array, norm=x.weight, eps=x.eps, wants_floats=known.wants_floats
        )
        return known.prepared

    def _groups_of(self, resident: ResidentLayer) -> ExpertGroups:
        num_experts = resident.layer.num_experts
        max_pairs = self.max_chunk * resident.layer.num_experts_used
        key = num_experts, max_pairs
        if key not in self._groups:
            self._groups[key] = ExpertGroups(
                self._device,
                num_experts=num_experts,
                max_pairs=max_pairs,
                tile_rows=self._products.tile_rows,
            )
        return self._groups[key]

    def _experts_of(self, resident: ResidentLayer) -> ExpertPrefill:
        layer = resident.layer
        max_pairs = self.max_chunk * layer.num_experts_used
        key = layer.hidden_size, layer.ffn_size, max_pairs
        if key not in self._experts:
            self._experts[key] = ExpertPrefill(
                self._device,
                hidden_size=layer.hidden_size,
                ffn_size=layer.ffn_size,
                max_pairs=max_pairs,
                products=self._products,
                scratch=self._scratch(),
            )
        self._experts[key].prepare(resident.prefill)
        return self._experts[key]

    def _scratch(self) -> WeightScratch:
        if self._scratch_memory is None:
            self._scratch_memory = WeightScratch(self._device, self._scratch_bytes)
        return self._scratch_memory
