"""Expert FFNs in plain numpy.

Each (token, expert) pair is computed separately with elementwise products and a pairwise sum along
each weight row, never by a matrix product: BLAS chooses kernels by shape, and a token's bits would
then depend on the other tokens of its batch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType, dequantise
from dflash_adapters.spec import ExpertProjection, ExpertVector, MoeLayer
from dflash_protocol.batch import RoutedBatch
from dflash_protocol.ids import F32Array, F64Array, I32Array
from dflash_runtime.compute.backend import ExpertStage


def activate(layer: MoeLayer, gate: F32Array, up: F32Array) -> F32Array:
    """The input of an expert's down projection by the layer's activation and its parameters: the
    formula that all kernels must match.

    Shapes: gate, up and result [F] float32.
    Source: see spec.Activation, whose forms are this one with other numbers.
    """
    limit, alpha = np.float32(layer.activation_limit), np.float32(layer.activation_alpha)
    gate = np.minimum(gate, limit)
    up = np.clip(up, -limit, limit)
    with np.errstate(over="ignore"):  # very negative gates: exp is inf, SiLU 0
        swish = gate / (np.float32(1) + np.exp(-alpha * gate))
    result: F32Array = swish * (up + np.float32(layer.activation.up_offset))
    return result


@dataclass(frozen=True, slots=True, eq=False)
class DenseProjection:
    """One projection of one expert. Shapes: matrix [rows, columns]; bias [rows]; scale [1]."""

    matrix: F32Array
    bias: F32Array | None
    scale: F32Array | None

    def apply(self, vector: F32Array) -> F32Array:
        """``scale * (matrix @ vector) + bias``. Shapes: vector [columns]; result [rows]."""
        result: F32Array = np.multiply(self.matrix, vector).sum(axis=1)
        if self.scale is not None:
            result *= self.scale
        if self.bias is not None:
            result += self.bias
        return result

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.matrix, self.bias, self.scale) if part is not None)


DenseExpert: TypeAlias = tuple[DenseProjection, DenseProjection, DenseProjection]
"""Gate, up and down of one expert."""


class ReferenceExpertBank:
    """Implements backend.ExpertBank; experts are dequantised on first use."""

    def __init__(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array, *, cache: ExpertCache
    ) -> None:
        self.layer = layer
        self._file = file
        self._global_expert_ids = global_expert_ids.copy()
        self._cache = cache

    @property
    def num_experts(self) -> int:
        return int(self._global_expert_ids.size)

    def replace(
        self,
        file: GgufFile,
        local_expert_ids: I32Array,
        global_expert_ids: I32Array,
        *,
        stage: ExpertStage | None = None,
    ) -> None:
        self._global_expert_ids[local_expert_ids] = global_expert_ids

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        for group, local_expert_id in enumerate(batch.expert_ids):
            expert = self._cache.get(
                self._file, self.layer, int(self._global_expert_ids[local_expert_id])
            )
            for pair in range(batch.group_starts[group], batch.group_starts[group + 1]):
                token_idx = batch.token_indices[pair]
                term = expert_ffn(self.layer, expert, batch.hidden[token_idx])
                out[token_idx] += batch.weights[pair] * term


def expert_ffn(layer: MoeLayer, expert: DenseExpert, hidden: F32Array) -> F32Array:
    """One expert's output for one token. Shapes: hidden and result [H] float32."""
    gate, up, down = expert
    return down.apply(activate(layer, gate.apply(hidden), up.apply(hidden)))


class ExpertCache:
    """An LRU cache of dequantised experts, bounded in bytes.

    Thread-safe: a daemon drops experts while it computes others.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._entries: OrderedDict[tuple[GgufFile, int, int], DenseExpert] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def get(self, file: GgufFile, layer: MoeLayer, global_expert_id: int) -> DenseExpert:
        key = file, layer.layer_id, global_expert_id
        with self._lock:
            expert = self._entries.get(key)
            if expert is None:
                expert = self._entries[key] = _load_expert(file, layer, global_expert_id)
                self._used_bytes += _num_bytes(expert)
                while self._used_bytes > self._capacity_bytes and len(self._entries) > 1:
                    _, dropped = self._entries.popitem(last=False)
                    self._used_bytes -= _num_bytes(dropped)
            else:
                self._entries.move_to_end(key)
            return expert

    def drop(self, file: GgufFile, layer: MoeLayer, global_expert_id: int) -> None:
        """Remove an expert, if present."""
        with self._lock:
            expert = self._entries.pop((file, layer.layer_id, global_expert_id), None)
            if expert is not None:
                self._used_bytes -= _num_bytes(expert)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._used_bytes = 0


def _num_bytes(expert: DenseExpert) -> int:
    return sum(projection.num_bytes for projection in expert)


def _load_expert(file: GgufFile, layer: MoeLayer, global_expert_id: int) -> DenseExpert:
    def values(
        part: ExpertProjection | ExpertVector, tensor_type: TensorType, *shape: int
    ) -> F32Array:
        stored = file.region(*part.place_of(global_expert_id), part.num_bytes)
        return dequantise(stored, tensor_type, shape)

    def vector(part: ExpertVector | None) -> F32Array | None:
        return None if part is None else values(part, TensorType.F32, part.length)

    gate, up, down = (
        DenseProjection(
            matrix=values(part, part.tensor_type, part.rows, part.columns),
            bias=vector(part.bias),
            scale=vector(part.scale),
        )
        for part in layer.projections
    )
    return gate, up, down
