"""Routed experts of a chunk of a prompt.

Memory for the largest chunk is taken once, when the first chunk comes.
"""

from __future__ import annotations

import numpy as np

from dflash_protocol.batch import RoutedBatch
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.launch.prefill_experts import ExpertPrefill
from dflash_runtime.compute.gpu.launch.prefill_groups import ExpertGroups
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.layers.rows import Input, Rows
from dflash_runtime.compute.gpu.ops.chunks import ChunkKernels
from dflash_runtime.compute.gpu.ops.kernels import RoutedRows
from dflash_runtime.compute.gpu.transfers.payload import PayloadMover


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

    def add(self, resident: ResidentLayer, routed: RoutedRows, residual: Rows) -> None:
        """Add a layer's experts, all of which are here, to the residual."""
        self._run(resident, routed, residual=residual.array)

    def local_sums(
        self, resident: ResidentLayer, routed: RoutedRows, before: DeviceArray | None = None
    ) -> DeviceArray:
        """Sums of those experts that are here, added to those `before`, which they then are.

        Shapes: result, before [T, H] float64.
        """
        if before is not None:
            self._run(resident, routed, sums=before, out_sums=before)
            return before
        here = self._device.empty(routed.x.rows.array.shape, np.float64)
        self._run(resident, routed, out_sums=here)
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

    def _run(self, resident: ResidentLayer, routed: RoutedRows, **places: DeviceArray) -> None:
        """`places` are what ExpertPrefill.run adds to and writes."""
        prepared, choice = self._chunks.prepare(routed.x), routed.choice
        groups = self._groups_for(resident).group_chosen(
            choice.ids,
            choice.weights,
            slot_of_expert=resident.experts.slot_of_expert,
            num_resident=resident.num_resident,
            selections=resident.selections,
        )
        self._kernels(resident).run(prepared, groups, resident.experts, **places)

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
