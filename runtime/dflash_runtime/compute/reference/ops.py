"""Ops in plain numpy: what every other backend is compared with.

Written for clarity, not speed. Matrices are dequantised once, when they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Gate
from dflash_adapters.loading import Matrix
from dflash_adapters.rope import RopePairing, RopeTable
from dflash_adapters.routing import RoutingRule
from dflash_adapters.spec import KvLayer, RecurrentLayer
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.host_ops import DeltaInputs, ElementOps
from dflash_runtime.compute.kv_cache import KvCache, KvType
from dflash_runtime.compute.reference.attention import CachedRows, attend, cached_rows, store
from dflash_runtime.compute.reference.recurrent import (
    RecurrentState,
    causal_conv,
    delta_rule,
    tree_conv,
    tree_delta,
)
from dflash_runtime.compute.reference.routing import route
from dflash_runtime.compute.sequence_state import SequenceState
from dflash_runtime.compute.sliding_window import WindowRows
from dflash_runtime.compute.trees import Tree, attend_segments


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


class HostKvCache(SequenceState):
    """Keys and values of every layer, and states of recurrent ones."""

    def __init__(
        self,
        layers: Sequence[KvLayer],
        capacity: int,
        kv_type: KvType,
        *,
        recurrent: Iterable[RecurrentLayer],
    ) -> None:
        states = [RecurrentState(each) for each in recurrent]
        super().__init__(states, [WindowRows(kv.mask, capacity) for kv in layers])
        self.states = states
        self.capacity = capacity
        self.keys: list[CachedRows] = []
        self.values: list[CachedRows] = []
        for kv, window in zip(layers, self.windows, strict=True):
            for rows, dim in ((self.keys, kv.key_dim), (self.values, kv.value_dim)):
                rows.append(cached_rows(kv_type, window.num_rows, num_heads=kv.num_heads, dim=dim))
            window.arrays = *self.keys[-1].arrays, *self.values[-1].arrays

    @property
    def nbytes(self) -> int:
        return self.state_bytes + sum(
            each.nbytes for window in self.windows for each in window.arrays
        )


class ReferenceOps(ElementOps):
    """Implements host_ops.Ops."""

    def load_vector(self, file: GgufFile, tensor_name: str) -> F32Array:
        return file.floats(tensor_name)

    def load_matrix(self, file: GgufFile, tensor_name: str) -> DenseMatrix:
        return DenseMatrix(np.atleast_2d(self.load_vector(file, tensor_name)))

    def new_kv_cache(
        self,
        layers: tuple[KvLayer, ...],
        capacity: int,
        kv_type: KvType,
        recurrent: tuple[RecurrentLayer, ...] = (),
    ) -> HostKvCache:
        return HostKvCache(layers, capacity, kv_type, recurrent=recurrent)

    def embed(self, table: Matrix, token_ids: I32Array) -> F32Array:
        return np.take(_dense(table), token_ids, axis=0)

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
        norms_after: bool = False,
    ) -> None:
        for heads, weight in ((q, q_weight), (k, k_weight)):
            if weight is not None:
                self.rms_norm(heads, weight, eps, out=heads)
            _rotate(heads, positions, table)
            if norms_after:
                self.rms_norm(heads, np.ones(heads.shape[2], np.float32), eps, out=heads)

    def attention(
        self,
        q: F32Array,
        k: F32Array,
        v: F32Array,
        cache: KvCache,
        cache_layer: int,
        positions: I32Array,
        *,
        scale: float,
        sinks: F32Array | None = None,
        tree: Tree | None = None,
    ) -> F32Array:
        assert isinstance(cache, HostKvCache)
        rows = cache.keys[cache_layer], cache.values[cache_layer]
        window = cache.windows[cache_layer]
        attended = partial(attend, rows=rows, window=window, scale=scale, sinks=sinks)
        if tree is None:
            return attended(q, k, v, positions)
        out = np.empty((*q.shape[:2], v.shape[2]), np.float32)
        attend_segments(tree, attended, out, q=q, k=k, v=v)
        tree.keep(lambda path: store(positions[path], (k[path], v[path]), rows, window=window))
        return out

    def route(
        self, logits: F32Array, rule: RoutingRule, *, bias: F32Array | None = None
    ) -> tuple[I32Array, F32Array]:
        return route(logits, rule, bias)

    def gated(
        self, x: F32Array, gate: F32Array, kind: Gate, out: F32Array | None = None
    ) -> F32Array:
        factors = np.repeat(_gate_factors(gate, kind), x.shape[1] // gate.shape[1], axis=1)
        return np.multiply(x, factors, out=out)

    def causal_conv(
        self,
        x: F32Array,
        weight: F32Array,
        cache: KvCache,
        layer: int,
        positions: I32Array,
        *,
        tree: Tree | None = None,
    ) -> F32Array:
        assert isinstance(cache, HostKvCache)
        state = cache.states[layer]
        if tree is not None:
            return tree_conv(x, weight, state, tree=tree)
        return causal_conv(x, weight, state, positions)

    def delta_rule(
        self,
        inputs: DeltaInputs,
        cache: KvCache,
        layer: int,
        positions: I32Array,
        *,
        tree: Tree | None = None,
    ) -> F32Array:
        assert isinstance(cache, HostKvCache)
        state = cache.states[layer]
        if tree is not None:
            return tree_delta(inputs, state, tree)
        return delta_rule(inputs, state, positions)


def _gate_factors(gate: F32Array, kind: Gate) -> F32Array:
    if kind is Gate.SOFTPLUS:
        return np.logaddexp(gate, np.float32(0))
    with np.errstate(over="ignore"):  # very negative gates: exp is inf, the result 0
        shares: F32Array = np.float32(1) / (np.float32(1) + np.exp(-gate))
    return shares if kind is Gate.SIGMOID else gate * shares


def _rotate(heads: F32Array, positions: I32Array, table: RopeTable) -> None:
    """Rotate in place. Shapes: heads [T, heads, D]; positions [T]."""
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
