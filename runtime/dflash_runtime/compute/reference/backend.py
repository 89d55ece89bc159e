"""Expert FFNs in plain numpy, and the backend that joins them with ReferenceOps.

Each (token, expert) pair is computed by itself with elementwise products and a pairwise sum along
each weight row, never by a matrix product: BLAS picks kernels by shape, and then a token's bits
would depend on who else is in its batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial

import numpy as np

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.moe_spec import Activation, MoeLayer
from dflash_adapters.quant import TensorType
from dflash_adapters.quant.reference import dequantise
from dflash_protocol.ids import F32Array, F64Array, I32Array
from dflash_protocol.routed_batch import RoutedBatch
from dflash_runtime.compute.reference.ops import ReferenceOps

_CACHE_BYTES = 256 << 20

ExpertMatrices = tuple[F32Array, F32Array, F32Array]


class ReferenceBackend:
    """Implements backend.ComputeBackend."""

    name = "reference"

    def __init__(self) -> None:
        self.ops = ReferenceOps()
        self._cache = _MatrixCache(_CACHE_BYTES)

    @property
    def numeric_class(self) -> str:
        return f"reference-1/numpy-{np.__version__}"

    def load_experts(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> ReferenceExpertBank:
        return ReferenceExpertBank(file, layer, global_expert_ids, self._cache)

    def warm_up(self, tensor_types: Iterable[TensorType]) -> None:
        """Nothing to compile; a type that cannot be dequantised is found here."""
        for tensor_type in tensor_types:
            layout = tensor_type.layout
            dequantise(
                np.zeros(layout.block_bytes, np.uint8), tensor_type, (layout.block_elements,)
            )

    def close(self) -> None:
        self._cache.clear()


class ReferenceExpertBank:
    """Implements backend.ExpertBank; experts are dequantised when first used."""

    def __init__(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array, cache: _MatrixCache
    ) -> None:
        self.layer = layer
        self._file = file
        self._global_expert_ids = global_expert_ids
        self._cache = cache

    @property
    def num_experts(self) -> int:
        return int(self._global_expert_ids.size)

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        for group, local_expert_id in enumerate(batch.expert_ids):
            global_expert_id = int(self._global_expert_ids[local_expert_id])
            matrices = self._cache.get(
                (self.layer.layer_id, global_expert_id), partial(self._load, global_expert_id)
            )
            for pair in range(batch.group_starts[group], batch.group_starts[group + 1]):
                token_idx = batch.token_indices[pair]
                term = expert_ffn(batch.hidden[token_idx], matrices, self.layer.activation)
                out[token_idx] += batch.weights[pair] * term

    def _load(self, global_expert_id: int) -> ExpertMatrices:
        gate, up, down = (
            dequantise(
                self._file.region(
                    projection.shard_index,
                    projection.offset_bytes + global_expert_id * projection.stride_bytes,
                    projection.num_bytes,
                ),
                projection.tensor_type,
                (projection.rows, projection.columns),
            )
            for projection in self.layer.projections
        )
        return gate, up, down


def expert_ffn(hidden: F32Array, matrices: ExpertMatrices, activation: Activation) -> F32Array:
    """One expert's output for one token.

    Shapes: hidden [H]; matrices gate [F, H], up [F, H], down [H, F]; result [H], all float32.
    Source: Shazeer 2020 (arXiv 2002.05202), SwiGLU.
    """
    assert activation is Activation.SWIGLU
    gate, up, down = matrices
    gated = _rows_dot(gate, hidden)
    with np.errstate(over="ignore"):  # exp overflows to inf for very negative gates: silu is 0
        silu = (gated / (np.float32(1) + np.exp(-gated))).astype(np.float32, copy=False)
    return _rows_dot(down, silu * _rows_dot(up, hidden))


def _rows_dot(matrix: F32Array, vector: F32Array) -> F32Array:
    result: F32Array = np.multiply(matrix, vector).sum(axis=1)
    return result


class _MatrixCache:
    """Dequantised experts, least recently used first out, bounded in bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._entries: OrderedDict[tuple[int, int], ExpertMatrices] = OrderedDict()

    def get(self, key: tuple[int, int], load: partial[ExpertMatrices]) -> ExpertMatrices:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = load()
            self._used_bytes += sum(matrix.nbytes for matrix in entry)
            while self._used_bytes > self._capacity_bytes and len(self._entries) > 1:
                _, dropped = self._entries.popitem(last=False)
                self._used_bytes -= sum(matrix.nbytes for matrix in dropped)
        else:
            self._entries.move_to_end(key)
        return entry

    def clear(self) -> None:
        self._entries.clear()
        self._used_bytes = 0
