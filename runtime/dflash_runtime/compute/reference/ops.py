"""Ops in plain numpy: what every other backend is compared with.

Knows nothing of speed. Matrices are dequantised once, when they are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.moe_spec import KvLayer
from dflash_adapters.ops import KvCache, KvType, Matrix, RoutingRule
from dflash_adapters.quant.reference import dequantise
from dflash_adapters.rope import RopePairing, RopeTable
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.reference.kv_cache import CachedRows, cached_rows

_SMALLEST_NORMAL_HALF = np.float32(6.103515625e-05)


@dataclass(frozen=True, slots=True, eq=False)
class DenseMatrix:
    """A weight expanded to float32 [rows, columns]."""

    values: F32Array

    @property
    def rows(self) -> int:
        return int(self.values.shape[0])

    @property
    def columns(self) -> int:
        return int(self.values.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class HostKvCache:
    """Keys and values of every layer."""

    keys: list[CachedRows]
    values: list[CachedRows]
    capacity: int


class ReferenceOps:
    """Implements ops.Ops over numpy arrays."""

    def load_vector(self, file: GgufFile, tensor_name: str) -> F32Array:
        tensor = file.tensor(tensor_name)
        return dequantise(file.tensor_bytes(tensor_name), tensor.tensor_type, tensor.shape)

    def load_matrix(self, file: GgufFile, tensor_name: str) -> DenseMatrix:
        return DenseMatrix(self.load_vector(file, tensor_name))

    def new_kv_cache(
        self, layers: tuple[KvLayer, ...], capacity: int, kv_type: KvType
    ) -> HostKvCache:
        return HostKvCache(
            keys=[
                cached_rows(kv_type, capacity, num_heads=kv.num_heads, dim=kv.key_dim)
                for kv in layers
            ],
            values=[
                cached_rows(kv_type, capacity, num_heads=kv.num_heads, dim=kv.value_dim)
                for kv in layers
            ],
            capacity=capacity,
        )

    def embed(self, table: Matrix, token_ids: I32Array, out: F32Array | None = None) -> F32Array:
        values = _dense(table)
        if out is None:
            out = np.empty((token_ids.size, values.shape[1]), np.float32)
        np.take(values, token_ids, axis=0, out=out)
        return out

    def rms_norm(
        self, x: F32Array, weight: F32Array, eps: float, out: F32Array | None = None
    ) -> F32Array:
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        scaled: F32Array = np.multiply(x / np.sqrt(mean_square + np.float32(eps)), weight, out=out)
        return scaled

    def linear(
        self,
        x: F32Array,
        matrix: Matrix,
        out: F32Array | None = None,
        *,
        add: F32Array | None = None,
    ) -> F32Array:
        product: F32Array = np.matmul(x, _dense(matrix).T)
        if add is not None:
            product += add
        if out is None:
            return product
        out[:] = product
        return out

    def project(self, x: F32Array, matrices: Sequence[Matrix]) -> list[F32Array]:
        return [self.linear(x, matrix) for matrix in matrices]

    def split_heads(self, x: F32Array, num_heads: int) -> F32Array:
        return x.reshape(x.shape[0], num_heads, -1)

    def merge_heads(self, x: F32Array) -> F32Array:
        return x.reshape(x.shape[0], x.shape[1] * x.shape[2])

    def norm_and_rotate(
        self,
        q: F32Array,
        k: F32Array,
        positions: I32Array,
        table: RopeTable,
        *,
        q_weight: F32Array | None = None,
        k_weight: F32Array | None = None,
        eps: float = 0.0,
    ) -> None:
        for heads, weight in ((q, q_weight), (k, k_weight)):
            if weight is not None:
                self.rms_norm(heads, weight, eps, out=heads)
            _rotate(heads, positions, table)

    def attention(
        self,
        q: F32Array,
        k: F32Array,
        v: F32Array,
        cache: KvCache,
        cache_layer: int,
        positions: I32Array,
        scale: float,
        out: F32Array | None = None,
    ) -> F32Array:
        assert isinstance(cache, HostKvCache)
        keys, values = cache.keys[cache_layer], cache.values[cache_layer]
        num_tokens, num_heads, _ = q.shape
        if out is None:
            out = np.empty((num_tokens, num_heads, v.shape[2]), np.float32)
        if num_tokens == 0:
            return out
        keys.store(positions, k)
        values.store(positions, v)
        num_visible = int(positions[-1]) + 1
        group = num_heads // k.shape[1]
        hidden_from = np.arange(num_visible)[None, :] > positions[:, None]
        for head in range(num_heads):
            head_keys = keys.load(num_visible, head // group)
            head_values = values.load(num_visible, head // group)
            scores = (q[:, head] @ head_keys.T) * np.float32(scale)
            scores[hidden_from] = -np.inf
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            out[:, head] = (scores @ head_values) / scores.sum(axis=1, keepdims=True)
        return out

    def route(self, logits: F32Array, rule: RoutingRule) -> tuple[I32Array, F32Array]:
        probabilities = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        # Stable, so that equal scores go to the lower id.
        order = np.argsort(-probabilities, axis=1, kind="stable")
        ids = order[:, : rule.num_experts_used].astype(np.int32)
        weights = np.take_along_axis(probabilities, ids, axis=1)
        if rule.normalise:
            weights /= np.maximum(weights.sum(axis=1, keepdims=True), _SMALLEST_NORMAL_HALF)
        return ids, weights

    def add(self, x: F32Array, y: F32Array, out: F32Array | None = None) -> F32Array:
        return np.add(x, y, out=out)


def _rotate(heads: F32Array, positions: I32Array, table: RopeTable) -> None:
    """In place. Shapes: heads [T, heads, D]; positions [T]."""
    angles = positions[:, None].astype(np.float64) * table.inv_freq
    cos = (np.cos(angles) * table.scale).astype(np.float32)[:, None, :]
    sin = (np.sin(angles) * table.scale).astype(np.float32)[:, None, :]
    half = table.num_rotated // 2
    if table.pairing is RopePairing.HALF_SPLIT:
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = heads[..., first].copy(), heads[..., second].copy()
    heads[..., first] = a * cos - b * sin
    heads[..., second] = a * sin + b * cos


def _dense(matrix: Matrix) -> F32Array:
    assert isinstance(matrix, DenseMatrix)
    return matrix.values
