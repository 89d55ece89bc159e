"""A file's experts on a device and the kernels of a prompt chunk for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import ExpertProjection, MoeLayer
from dflash_protocol.ids import F32Array, F64Array, I32Array, U8Array
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.launch.layouts import (
    ResidentExperts,
    ResidentMatrices,
    row_bytes,
)
from dflash_runtime.compute.gpu.launch.prefill_experts import ExpertPrefill
from dflash_runtime.compute.gpu.launch.prefill_groups import ExpertGroups
from dflash_runtime.compute.gpu.launch.prefill_operands import (
    ProductKind,
    Products,
    RowPreparer,
    Tile,
    WeightScratch,
    half_row_bytes,
)
from support.device_layout import repack

SMALL_TILE = Tile(rows=32, columns=64, warps_m=2, warps_n=2, stages=2)
"""A tile so small that small shapes have several; warp tiles of 16 x 32."""
SMALL_TENSOR = Products(
    ProductKind.TENSOR,
    SMALL_TILE,
    float_tile=SMALL_TILE,
    stored_tile=Tile(rows=32, columns=128, warps_m=1, warps_n=4, stages=3),
)
SMALL_HALF = Products(ProductKind.HALF, SMALL_TILE, float_tile=SMALL_TILE)


class ExpertsOnDevice:
    """A layer's experts, uploaded by slot. `slots[e]` is expert e's; negative: not resident."""

    def __init__(
        self,
        device: KernelDevice,
        path: Path,
        layer: MoeLayer,
        slots: I32Array | None = None,
    ) -> None:
        self._device = device
        places = np.arange(layer.num_experts, dtype=np.int32) if slots is None else slots
        with GgufFile.open(path) as file:
            gate, up, down = (
                self._upload(file, projection, places) for projection in layer.projections
            )
        self.stored = ResidentExperts(
            gate=gate,
            up=up,
            down=down,
            slot_of_expert=device.upload(places),
            activation_limit=layer.activation_limit,
            activation_alpha=layer.activation_alpha,
            up_offset=layer.activation.up_offset,
        )

    def _upload(self, file: GgufFile, part: ExpertProjection, slots: I32Array) -> ResidentMatrices:
        bytes_of_row = row_bytes(part.tensor_type, part.columns)
        # Slots without an expert are NaN in most types, so that reading one by mistake shows.
        matrices = np.full((slots.max() + 1, part.rows, bytes_of_row), 0xFF, np.uint8)
        for expert, slot in enumerate(slots):
            if slot >= 0:
                stored = _read(file, part, part.num_bytes, expert)
                matrices[slot] = repack(
                    part.tensor_type, stored, rows=part.rows, columns=part.columns
                )
        weights = self._device.upload(matrices)
        vectors: list[DeviceArray | None] = []
        for vector in (part.bias, part.scale):
            if vector is None:
                vectors.append(None)
                continue
            rows = [
                file.region(
                    vector.shard_index,
                    vector.offset_bytes + e * vector.stride_bytes,
                    vector.num_bytes,
                ).view(np.float32)
                for e in range(slots.size)
            ]
            vectors.append(self._device.upload(np.array(rows)))
        return ResidentMatrices(
            tensor_type=part.tensor_type,
            weights=weights,
            bias=vectors[0],
            scale=vectors[1],
        )


def _read(file: GgufFile, part: ExpertProjection, num_bytes: int, expert: int) -> U8Array:
    return file.region(part.shard_index, part.offset_bytes + expert * part.stride_bytes, num_bytes)


@dataclass
class PrefillRig:
    """Everything that one layer's prefill needs, for up to `max_tokens` tokens."""

    device: KernelDevice
    layer: MoeLayer
    experts: ExpertsOnDevice
    products: Products
    max_tokens: int
    pairs_per_token: int
    scratch_experts: int = 2
    """Experts whose halves fit into the scratch memory together."""

    def __post_init__(self) -> None:
        layer, max_pairs = self.layer, self.max_tokens * self.pairs_per_token
        group_bytes = max(
            2 * layer.ffn_size * half_row_bytes(layer.hidden_size),
            layer.hidden_size * half_row_bytes(layer.ffn_size),
        )
        self.prefill = ExpertPrefill(
            self.device,
            hidden_size=layer.hidden_size,
            ffn_size=layer.ffn_size,
            max_pairs=max_pairs,
            products=self.products,
            scratch=WeightScratch(self.device, max(1, self.scratch_experts * group_bytes)),
        )
        self.prefill.prepare(self.experts.stored)
        self.rows = RowPreparer(
            self.device, columns=layer.hidden_size, max_rows=self.max_tokens, parts=2
        )
        self.groups = ExpertGroups(
            self.device,
            num_experts=layer.num_experts,
            max_pairs=max_pairs,
            tile_rows=self.products.tile_rows,
            chunk_pairs=16,
        )

    def group(self, topk_ids: I32Array, topk_weights: F32Array) -> None:
        """Group the pairs of a routing by expert. Shapes: [T, K]."""
        upload = self.device.upload
        self.grouped = self.groups.group_chosen(
            upload(topk_ids),
            upload(topk_weights),
            slot_of_expert=self.experts.stored.slot_of_expert,
        )

    def sums(self, hidden: F32Array, mean_rows: float | None = None) -> F64Array:
        """Sums of the grouped pairs. Shapes: hidden, result [T, H]."""
        out_sums = self.device.empty(hidden.shape, np.float64)
        rows = self.rows.prepare(self.device.upload(hidden))
        stored = self.experts.stored
        self.prefill.run(rows, self.grouped, stored, mean_rows=mean_rows, out_sums=out_sums)
        return self.device.download(out_sums)


def choose(
    rng: np.random.Generator, num_tokens: int, num_experts: int, num_used: int
) -> tuple[I32Array, F32Array]:
    """A random routing: distinct experts per token, in random order. Shapes: [T, K]."""
    ids = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :num_used]
    return ids.astype(np.int32), rng.random((num_tokens, num_used), dtype=np.float32)
