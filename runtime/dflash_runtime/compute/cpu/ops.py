"""Dense operations on the CPU: what adapters call, forwarded to kernel launchers.

Launchers check everything that reaches a kernel; compiled signatures refuse the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Gate
from dflash_adapters.loading import Matrix
from dflash_adapters.quant import dequantise
from dflash_adapters.rope import RopeTable
from dflash_adapters.routing import RoutingRule
from dflash_adapters.spec import KvLayer, RecurrentLayer
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.cpu.attention import CpuAttention
from dflash_runtime.compute.cpu.dense import Dense, result_array
from dflash_runtime.compute.cpu.kernels.linear_kernel import embed_kernel
from dflash_runtime.compute.cpu.kv_cache import CpuKvCache
from dflash_runtime.compute.cpu.linear import DenseProducts
from dflash_runtime.compute.cpu.recurrent import Recurrent
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.cpu.weights.matrix import CpuMatrix, load_matrix
from dflash_runtime.compute.cpu.weights.rows import ROW_BYTES, expand_function
from dflash_runtime.compute.host_ops import DeltaInputs
from dflash_runtime.compute.kv_cache import KvCache, KvType
from dflash_runtime.compute.trees import attend_segments


class CpuOps:
    """Implements host_ops.Ops."""

    def __init__(self, workers: Workers, scratch: Scratch) -> None:
        self._linear = DenseProducts(workers, scratch)
        self._attention = CpuAttention(workers, scratch)
        self._dense = Dense(workers, scratch)
        self._recurrent = Recurrent(workers, scratch)
        self._embed = embed_kernel()
        self._dense.compile()

    def load_vector(self, file: GgufFile, tensor_name: str) -> F32Array:
        tensor = file.tensor(tensor_name)
        values = dequantise(file.tensor_bytes(tensor_name), tensor.tensor_type, tensor.shape)
        return np.array(values, np.float32)

    def load_matrix(self, file: GgufFile, tensor_name: str) -> CpuMatrix:
        return load_matrix(file, tensor_name)

    def new_kv_cache(
        self,
        layers: tuple[KvLayer, ...],
        capacity: int,
        kv_type: KvType,
        recurrent: tuple[RecurrentLayer, ...] = (),
    ) -> CpuKvCache:
        self._attention.compile(kv_type)
        if recurrent:
            self._recurrent.compile()
        return CpuKvCache(layers, capacity, kv_type, recurrent)

    def embed(self, table: Matrix, token_ids: I32Array, out: F32Array | None = None) -> F32Array:
        assert isinstance(table, CpuMatrix)
        out = result_array((token_ids.shape[0], table.columns), out)
        expand = expand_function(table.tensor_type).address
        row_bytes = int(table.layout[ROW_BYTES])
        bad = self._embed(token_ids, table.address, expand, row_bytes, table.rows, out)
        if bad >= 0:
            raise ValueError(f"token id {token_ids[bad]} is not within 0..{table.rows - 1}")
        return out

    def rms_norm(
        self, x: F32Array, weight: F32Array, eps: float, out: F32Array | None = None
    ) -> F32Array:
        return self._dense.rms_norm(x, weight, eps, out)

    def linear(
        self,
        x: F32Array,
        matrix: Matrix,
        out: F32Array | None = None,
        *,
        add: F32Array | None = None,
    ) -> F32Array:
        assert isinstance(matrix, CpuMatrix)
        shape = x.shape[0], matrix.rows
        out = result_array(shape, out)
        if add is None:
            self._linear(x, (matrix,), out.reshape(-1))
        else:
            if add.shape != shape:
                raise ValueError(f"cannot add {add.shape} to {shape}")
            self._linear(x, (matrix,), out.reshape(-1), add.reshape(-1))
        return out

    def project(self, x: F32Array, matrices: Sequence[Matrix]) -> list[F32Array]:
        several = tuple(matrix for matrix in matrices if isinstance(matrix, CpuMatrix))
        assert len(several) == len(matrices)
        num_tokens = x.shape[0]
        out = np.empty(num_tokens * sum(matrix.rows for matrix in several), np.float32)
        self._linear(x, several, out)
        outs, first = [], 0
        for matrix in several:
            end = first + num_tokens * matrix.rows
            outs.append(out[first:end].reshape(num_tokens, matrix.rows))
            first = end
        return outs

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
        self._dense.norm_and_rotate(
            q,
            k,
            positions,
            table,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
            norms_after=norms_after,
        )

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
        out: F32Array | None = None,
        sinks: F32Array | None = None,
    ) -> F32Array:
        assert isinstance(cache, CpuKvCache)
        layer, tree = cache.layers[cache_layer], cache.tree
        if tree is None:
            return self._attention(q, k, v, layer, positions, scale, out=out, sinks=sinks)
        out = result_array((*q.shape[:2], v.shape[2]), out)

        def attended(q: F32Array, k: F32Array, v: F32Array, positions: I32Array) -> F32Array:
            return self._attention(q, k, v, layer, positions, scale, sinks=sinks)

        def keep(path: I32Array) -> None:
            self._attention.store(k[path], v[path], layer, tree.positions[path])

        attend_segments(tree, attended, out, q=q, k=k, v=v)
        tree.keep(keep)
        return out

    def route(
        self, logits: F32Array, rule: RoutingRule, *, bias: F32Array | None = None
    ) -> tuple[I32Array, F32Array]:
        return self._dense.route(logits, rule, bias)

    def gated(
        self, x: F32Array, gate: F32Array, kind: Gate, out: F32Array | None = None
    ) -> F32Array:
        return self._dense.gated(x, gate, kind, out)

    def causal_conv(
        self,
        x: F32Array,
        weight: F32Array,
        cache: KvCache,
        layer: int,
        positions: I32Array,
        out: F32Array | None = None,
    ) -> F32Array:
        assert isinstance(cache, CpuKvCache)
        state = cache.states[layer]
        if cache.tree is not None:
            return self._recurrent.tree_conv(x, weight, state, cache.tree, out)
        return self._recurrent.causal_conv(x, weight, state, positions, out)

    def delta_rule(
        self, inputs: DeltaInputs, cache: KvCache, layer: int, positions: I32Array
    ) -> F32Array:
        assert isinstance(cache, CpuKvCache)
        state = cache.states[layer]
        if cache.tree is not None:
            return self._recurrent.tree_delta(inputs, state, cache.tree)
        return self._recurrent.delta_rule(inputs, state, positions)
