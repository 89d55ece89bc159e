"""The dense operations on the CPU: guards and buffers around the kernels.

Everything that reaches a kernel is checked here or refused by the kernel's own signature, which
accepts C-contiguous arrays of one element type and rank only.
"""

from __future__ import annotations

import numpy as np

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.moe_spec import KvLayer
from dflash_adapters.ops import Gating, KvCache, KvType, Matrix, RoutingRule
from dflash_adapters.quant.reference import dequantise
from dflash_adapters.rope import RopePairing, RopeTable
from dflash_protocol.errors import ContextExceeded
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.cpu.attention_kernel import attention_kernel, scratch_size
from dflash_runtime.compute.cpu.dense_kernels import rms_norm_kernel, rope_kernel, route_kernel
from dflash_runtime.compute.cpu.kv_cache import CpuKvCache
from dflash_runtime.compute.cpu.matrix import CpuMatrix, load_matrix
from dflash_runtime.compute.cpu.matrix_kernels import embed_kernel, linear_kernel
from dflash_runtime.compute.cpu.workers import Workers, share

PARALLEL_PRODUCTS = 1 << 20
"""Products below which handing work to other threads costs more than it saves."""


class CpuOps:
    """Implements ops.Ops over numpy arrays."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._linear = linear_kernel()
        self._embed = embed_kernel()
        self._rms_norm = rms_norm_kernel()
        self._rope = rope_kernel()
        self._route = route_kernel()
        self._angles = _AngleCache()

    def load_vector(self, file: GgufFile, tensor_name: str) -> F32Array:
        tensor = file.tensor(tensor_name)
        values = dequantise(file.tensor_bytes(tensor_name), tensor.tensor_type, tensor.shape)
        return np.array(values, np.float32)

    def load_matrix(self, file: GgufFile, tensor_name: str) -> CpuMatrix:
        return load_matrix(file, tensor_name)

    def new_kv_cache(
        self, layers: tuple[KvLayer, ...], capacity: int, kv_type: KvType
    ) -> CpuKvCache:
        attention_kernel(kv_type)
        return CpuKvCache(layers, capacity, kv_type)

    def embed(self, table: Matrix, token_ids: I32Array, out: F32Array | None = None) -> F32Array:
        assert isinstance(table, CpuMatrix)
        out = _result((token_ids.shape[0], table.columns), out)
        bad = self._embed(
            token_ids, table.address, table.expand_address, table.row_bytes, table.rows, out
        )
        if bad >= 0:
            raise ValueError(f"token id {token_ids[bad]} is not within 0..{table.rows - 1}")
        return out

    def rms_norm(
        self, x: F32Array, weight: F32Array, eps: float, out: F32Array | None = None
    ) -> F32Array:
        columns = x.shape[-1]
        if weight.shape != (columns,):
            raise ValueError(f"weight is {weight.shape} for rows of {columns}")
        out = _result(x.shape, out)
        if x.ndim == 2:
            self._rms_norm(x, weight, eps, out)
        else:
            # A view, since _result guarantees that `out` is contiguous.
            self._rms_norm(x.reshape(-1, columns), weight, eps, out.reshape(-1, columns))
        return out

    def linear(self, x: F32Array, matrix: Matrix, out: F32Array | None = None) -> F32Array:
        assert isinstance(matrix, CpuMatrix)
        num_tokens, columns = x.shape
        rows = matrix.rows
        if columns != matrix.columns:
            raise ValueError(f"x is {x.shape}, the matrix has {matrix.columns} columns")
        out = _result((num_tokens, rows), out)
        result = out
        if self._workers.num_threads == 1 or num_tokens * rows * columns < PARALLEL_PRODUCTS:
            scratch = np.empty(columns, np.float32)
            self._linear(x, matrix.address, matrix.layout, 0, rows, result, scratch)
            return out

        def part(part_idx: int, num_parts: int) -> None:
            first, end = share(rows, part_idx, num_parts)
            scratch = np.empty(columns, np.float32)
            self._linear(x, matrix.address, matrix.layout, first, end, result, scratch)

        self._workers.run(part)
        return out

    def split_heads(self, x: F32Array, num_heads: int) -> F32Array:
        return x.reshape(x.shape[0], num_heads, x.shape[1] // num_heads)

    def merge_heads(self, x: F32Array) -> F32Array:
        return x.reshape(x.shape[0], x.shape[1] * x.shape[2])

    def rope(
        self, x: F32Array, positions: I32Array, table: RopeTable, out: F32Array | None = None
    ) -> F32Array:
        num_tokens, _, head_dim = x.shape
        if positions.shape != (num_tokens,):
            raise ValueError(f"positions are {positions.shape} for {num_tokens} tokens")
        if 2 * table.inv_freq.shape[0] > head_dim:
            raise ValueError(f"{2 * table.inv_freq.shape[0]} rotated of heads of {head_dim}")
        out = _result(x.shape, out)
        cos, sin = self._angles.get(table, positions)
        self._rope(x, cos, sin, table.pairing is RopePairing.INTERLEAVED, out)
        return out

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
        assert isinstance(cache, CpuKvCache)
        layer = cache.layers[cache_layer]
        kv = layer.kv
        num_tokens, num_heads, _ = q.shape
        if (
            k.shape != (num_tokens, kv.num_heads, kv.key_dim)
            or v.shape != (num_tokens, kv.num_heads, kv.value_dim)
            or q.shape[2] != kv.key_dim
            or num_heads % kv.num_heads
        ):
            raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape} do not fit {kv}")
        out = _result((num_tokens, num_heads, kv.value_dim), out)
        if num_tokens == 0:
            return out
        first_position = _first_position(positions, num_tokens, cache.capacity)
        kernel = attention_kernel(cache.kv_type)
        num_visible = first_position + num_tokens
        size = scratch_size(num_heads // kv.num_heads, layer.keys.shape[2], num_visible)
        result = out

        def part(stores: bool, first_item: int, item_step: int) -> None:
            scratch = np.empty(size, np.float32)
            kernel(
                q,
                k,
                v,
                layer.keys,
                layer.values,
                first_position,
                scale,
                stores,
                first_item,
                item_step,
                scratch,
                result,
            )

        num_products = num_tokens * num_heads * num_visible * (kv.key_dim + kv.value_dim)
        if self._workers.num_threads == 1 or num_products < PARALLEL_PRODUCTS:
            part(True, 0, 1)
        else:
            # Every row is stored before any thread reads: an item sees earlier tokens' rows.
            part(True, num_tokens * kv.num_heads, 1)
            self._workers.run(lambda part_idx, num_parts: part(False, part_idx, num_parts))
        return out

    def route(self, logits: F32Array, rule: RoutingRule) -> tuple[I32Array, F32Array]:
        num_tokens, num_experts = logits.shape
        num_used = rule.num_experts_used
        assert rule.gating is Gating.SOFTMAX
        if not 0 < num_used <= num_experts:
            raise ValueError(f"{num_used} experts used of {num_experts}")
        ids = np.empty((num_tokens, num_used), np.int32)
        weights = np.empty((num_tokens, num_used), np.float32)
        scores = np.empty(num_experts, np.float32)
        self._route(logits, rule.normalise, scores, ids, weights)
        return ids, weights

    def add(self, x: F32Array, y: F32Array, out: F32Array | None = None) -> F32Array:
        if x.shape != y.shape:
            raise ValueError(f"cannot add {x.shape} and {y.shape}")
        return np.add(x, y, out=out)


class _AngleCache:
    """Cosines and sines of one step: every layer of a step asks for the same positions."""

    def __init__(self) -> None:
        self._last: tuple[RopeTable, bytes, F32Array, F32Array] | None = None

    def get(self, table: RopeTable, positions: I32Array) -> tuple[F32Array, F32Array]:
        """Shapes: positions [T]; results [T, num_rotated / 2]."""
        key = positions.tobytes()
        last = self._last
        if last is not None and last[0] is table and last[1] == key:
            return last[2], last[3]
        angles = positions.astype(np.float64)[:, None] * table.inv_freq
        cos = (np.cos(angles) * table.scale).astype(np.float32)
        sin = (np.sin(angles) * table.scale).astype(np.float32)
        self._last = (table, key, cos, sin)
        return cos, sin


def _result(shape: tuple[int, ...], out: F32Array | None) -> F32Array:
    """A new array, or `out` after a look at it."""
    if out is None:
        return np.empty(shape, np.float32)
    if out.shape != shape or not out.flags.c_contiguous:
        raise ValueError(f"out is {out.shape}, expected contiguous {shape}")
    return out


def _first_position(positions: I32Array, num_tokens: int, capacity: int) -> int:
    """Where a chunk begins, after a check that it ascends by one and fits.

    Raises: ContextExceeded if it does not fit.
    """
    first = int(positions[0])
    if positions.shape != (num_tokens,) or first < 0:
        raise ValueError(f"positions are {positions.shape} from {first} for {num_tokens} tokens")
    if num_tokens > 1 and bool((positions[1:] - positions[:-1] != 1).any()):
        raise ValueError("positions must ascend by one")
    if first + num_tokens > capacity:
        raise ContextExceeded(first + num_tokens, capacity)
    return first
