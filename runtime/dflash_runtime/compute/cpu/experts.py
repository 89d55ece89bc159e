"""The experts of one layer on the CPU, read where the file is mapped."""

from __future__ import annotations

import numpy as np

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.moe_spec import Activation, ExpertProjection, MoeLayer
from dflash_adapters.quant import TensorType
from dflash_protocol.ids import AnyArray, F64Array, I32Array, I64Array, U8Array
from dflash_protocol.routed_batch import RoutedBatch
from dflash_runtime.compute.cpu.matrix import native_rows, row_layout
from dflash_runtime.compute.cpu.matrix_kernels import (
    DOWN,
    GATE_UP,
    ITEMS_AT_ONCE,
    expert_ffn_kernel,
)
from dflash_runtime.compute.cpu.rows import is_native
from dflash_runtime.compute.cpu.workers import Workers, share

PARALLEL_PRODUCTS = 1 << 20
"""Products below which handing work to other threads costs more than it saves."""


class CpuExpertBank:
    """Implements backend.ExpertBank.

    Owns: views of the mapping (or the expanded copy) that its addresses point into.
    """

    def __init__(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array, workers: Workers
    ) -> None:
        assert layer.activation is Activation.SWIGLU
        ids = global_expert_ids.astype(np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < layer.num_experts):
            raise ValueError(f"expert ids must lie within 0..{layer.num_experts - 1}")
        self.layer = layer
        self.num_experts = int(ids.size)
        self._workers = workers
        self._kernel = expert_ffn_kernel()
        self._addresses = np.zeros((self.num_experts, 3), np.int64)
        self._layouts = np.zeros((3, len(row_layout(TensorType.F32, 1))), np.int64)
        self._data: list[AnyArray] = []
        for index, projection in enumerate(layer.projections):
            if is_native(projection.tensor_type):
                data, offsets = _in_place(file, projection, ids)
                tensor_type = projection.tensor_type
            else:
                data, offsets = _expanded(file, projection, ids)
                tensor_type = TensorType.F32
            self._addresses[:, index] = data.ctypes.data + offsets
            self._layouts[index] = row_layout(tensor_type, projection.columns)
            self._data.append(data)

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        """See backend.ExpertBank; expert ids of the batch are local."""
        hidden, num_pairs = batch.hidden, batch.num_pairs
        hidden_size, ffn_size = self.layer.hidden_size, self.layer.ffn_size
        if hidden.shape != out.shape or hidden.shape[1:] != (hidden_size,):
            raise ValueError(f"hidden {hidden.shape}, out {out.shape}, expected [T, {hidden_size}]")
        if batch.weights.shape != batch.token_indices.shape:
            raise ValueError("a weight for every pair is needed")
        if batch.group_starts.shape != (batch.num_groups + 1,):
            raise ValueError("group_starts must have one element more than expert_ids")
        if num_pairs == 0:
            return
        activations = np.empty((2, num_pairs, ffn_size), np.float32)
        terms = np.empty((min(ITEMS_AT_ONCE, num_pairs), hidden_size), np.float32)
        scratch_size = max(hidden_size, ffn_size)

        def compute(stages: int, first_row: int, end_row: int, own_terms: AnyArray) -> None:
            is_sound = self._kernel(
                stages,
                hidden,
                batch.expert_ids,
                batch.group_starts,
                batch.token_indices,
                batch.weights,
                self._addresses,
                self._layouts,
                first_row,
                end_row,
                activations,
                own_terms,
                np.empty(scratch_size, np.float32),
                out,
            )
            if not is_sound:
                raise ValueError("the batch names experts, tokens or pairs that do not exist")

        num_products = 3 * num_pairs * hidden_size * ffn_size
        if num_products < PARALLEL_PRODUCTS or self._workers.num_threads == 1:
            compute(GATE_UP, 0, ffn_size, terms)
            compute(DOWN, 0, hidden_size, terms)
            return
        # No two parts write the same element, so nothing depends on how rows are shared out.
        self._workers.run(
            lambda part, parts: compute(GATE_UP, *share(ffn_size, part, parts), terms)
        )
        self._workers.run(
            lambda part, parts: compute(DOWN, *share(hidden_size, part, parts), terms)
        )


def _in_place(
    file: GgufFile, projection: ExpertProjection, global_expert_ids: I64Array
) -> tuple[U8Array, I64Array]:
    """The part of the mapping that holds these experts, and where in it each one begins."""
    if not global_expert_ids.size:
        return np.empty(0, np.uint8), np.empty(0, np.int64)
    first, last = int(global_expert_ids.min()), int(global_expert_ids.max())
    data = file.region(
        projection.shard_index,
        projection.offset_bytes + first * projection.stride_bytes,
        (last - first) * projection.stride_bytes + projection.num_bytes,
    )
    return data, (global_expert_ids - first) * projection.stride_bytes


def _expanded(
    file: GgufFile, projection: ExpertProjection, global_expert_ids: I64Array
) -> tuple[U8Array, I64Array]:
    """A float32 copy of these experts, for a type that no kernel reads."""
    rows, columns = projection.rows, projection.columns
    num_bytes = 4 * rows * columns
    data = np.empty((global_expert_ids.size, num_bytes), np.uint8)
    for local_expert_id, global_expert_id in enumerate(global_expert_ids):
        offset_bytes = projection.offset_bytes + int(global_expert_id) * projection.stride_bytes
        stored = file.region(projection.shard_index, offset_bytes, projection.num_bytes)
        expanded, _ = native_rows(stored, projection.tensor_type, rows, columns)
        data[local_expert_id] = expanded
    return data.reshape(-1), np.arange(global_expert_ids.size, dtype=np.int64) * num_bytes
