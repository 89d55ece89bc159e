"""Dense operations on the CPU: checks, buffers and arguments around the kernels.

Everything that reaches a kernel is checked here or in attention and recurrent. Compiled signatures
check dtypes and layouts: they accept only C-contiguous arrays of one element type and rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Gate
from dflash_adapters.loading import Matrix
from dflash_adapters.quant import dequantise
from dflash_adapters.rope import RopePairing, RopeTable
from dflash_adapters.routing import RoutingRule
from dflash_adapters.spec import KvLayer, RecurrentLayer
from dflash_protocol.ids import F32Array, I32Array, I64Array
from dflash_runtime.compute.cpu.attention import CpuAttention
from dflash_runtime.compute.cpu.kernels import dense_tasks as tasks
from dflash_runtime.compute.cpu.kernels import linear_kernel as products
from dflash_runtime.compute.cpu.kernels import route_tasks
from dflash_runtime.compute.cpu.kernels.products import TOTALS_BYTES, product_scratch_bytes
from dflash_runtime.compute.cpu.kv_cache import CpuKvCache
from dflash_runtime.compute.cpu.recurrent import Recurrent
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.cpu.weights.matrix import CpuMatrix, load_matrix
from dflash_runtime.compute.cpu.weights.repacked.kernels import Q8_BLOCK_BYTES
from dflash_runtime.compute.cpu.weights.repacked.quantising import quantise_function
from dflash_runtime.compute.cpu.weights.rows import ROW_BYTES, UNPACK, expand_function
from dflash_runtime.compute.host_ops import DeltaInputs
from dflash_runtime.compute.kv_cache import KvCache, KvType
from dflash_runtime.compute.trees import Tree, attend_segments

PARALLEL_VALUES = 1 << 15
"""With fewer values, waking other threads costs more than it saves."""

_NOTHING = np.empty(0, np.float32)

_MOST_PLANS = 1 << 14


class CpuOps:
    """Implements host_ops.Ops over numpy arrays; can be called from several threads at once."""

    def __init__(self, workers: Workers, scratch: Scratch) -> None:
        self._workers = workers
        self._scratch = scratch
        self._attention = CpuAttention(workers, scratch)
        self._recurrent = Recurrent(workers, scratch)
        self._embed = products.embed_kernel()
        self._multiply = products.linear_kernel()
        self._plans: dict[tuple[CpuMatrix, ...], _Plan] = {}
        self._angles = _AngleCache()
        # Compiled now rather than in the first step.
        tasks.norm_kernel()
        tasks.rope_kernel()
        tasks.gate_kernel()
        route_tasks.route_kernel()
        products.linear_tasks()
        quantise_function()

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
        return CpuKvCache(layers, capacity, kv_type, recurrent, self._workers)

    def embed(self, table: Matrix, token_ids: I32Array) -> F32Array:
        assert isinstance(table, CpuMatrix)
        out = np.empty((token_ids.shape[0], table.columns), np.float32)
        expand = expand_function(table.tensor_type).address
        row_bytes = int(table.layout[ROW_BYTES])
        bad = self._embed(token_ids, table.address, expand, row_bytes, table.rows, out)
        if bad >= 0:
            raise ValueError(f"token id {token_ids[bad]} is not within 0..{table.rows - 1}")
        return out

    def rms_norm(self, x: F32Array, weight: F32Array, eps: float) -> F32Array:
        """Normalise over the last axis. Shapes: x [..., n]; weight [n]."""
        columns = x.shape[-1]
        if weight.shape != (columns,):
            raise ValueError(f"weight is {weight.shape} for rows of {columns}")
        out: F32Array = np.empty(x.shape, np.float32)
        rows, result = x, out
        if x.ndim != 2:
            # A view of `out`; a copy of `x` if that is not contiguous.
            rows, result = x.reshape(-1, columns), out.reshape(-1, columns)
        kernel, task = tasks.norm_kernel()
        with self._scratch.take(8 * tasks.NUM_WORDS) as memory:
            kernel(rows, weight, eps, result, memory, self._pool_for(x.size), task.address)
        return out

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
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.shape}, expected contiguous {shape}")
        if add is None:
            self._products(x, (matrix,), out.reshape(-1))
        else:
            if add.shape != shape:
                raise ValueError(f"cannot add {add.shape} to {shape}")
            self._products(x, (matrix,), out.reshape(-1), add.reshape(-1))
        return out

    def project(self, x: F32Array, matrices: Sequence[Matrix]) -> list[F32Array]:
        several = tuple(matrix for matrix in matrices if isinstance(matrix, CpuMatrix))
        assert len(several) == len(matrices)
        num_tokens = x.shape[0]
        out = np.empty(num_tokens * sum(matrix.rows for matrix in several), np.float32)
        self._products(x, several, out)
        outs, first = [], 0
        for matrix in several:
            end = first + num_tokens * matrix.rows
            outs.append(out[first:end].reshape(num_tokens, matrix.rows))
            first = end
        return outs

    def _products(
        self,
        x: F32Array,
        matrices: tuple[CpuMatrix, ...],
        out: F32Array,
        addend: F32Array = _NOTHING,
    ) -> None:
        """``x @ matrix.T`` for each matrix, one after another in `out`, plus `addend` if not empty.

        Shapes: x [T, columns]; out, addend [T * sum of rows]; all contiguous.
        """
        plan = self._plans.get(matrices)
        if plan is None:
            if len(self._plans) == _MOST_PLANS:  # mostly of closed models
                self._plans.clear()
            plan = self._plans[matrices] = _plan(matrices)
        num_tokens, columns = x.shape
        if columns != plan.columns:
            raise ValueError(f"x is {x.shape}, the matrix has {plan.columns} columns")
        size = num_tokens * plan.rows
        if out.size != size or addend.size not in (0, size):
            raise ValueError(f"{out.size} and {addend.size} values for {size} products")
        if size == 0:
            return
        workers = self._workers
        with self._scratch.take(
            8 * products.NUM_ARGUMENTS,
            num_tokens * plan.q8_bytes,
            workers.num_threads * plan.thread_bytes,
        ) as memory:
            self._multiply(x, out, addend, plan.words, memory, workers.address)

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
        """In place: RMS norm of each head where there is a weight, then rotation by the position,
        then, with `norms_after`, division by the root mean square.

        Shapes: q [T, heads, D]; k [T, kv_heads, D]; positions [T]; weights [D].
        """
        num_tokens, _, dim = q.shape
        if k.shape[0] != num_tokens or k.shape[2] != dim:
            raise ValueError(f"q is {q.shape}, k is {k.shape}")
        if positions.shape != (num_tokens,):
            raise ValueError(f"positions are {positions.shape} for {num_tokens} tokens")
        if 2 * table.inv_freq.shape[0] > dim:
            raise ValueError(f"{2 * table.inv_freq.shape[0]} rotated values in heads of {dim}")
        for weight in (q_weight, k_weight):
            if weight is not None and weight.shape != (dim,):
                raise ValueError(f"weight is {weight.shape} for heads of {dim}")
        angles = self._angles.get(table, positions)
        kernel, task = tasks.rope_kernel()
        with self._scratch.take(8 * tasks.NUM_WORDS) as memory:
            kernel(
                q,
                k,
                _NOTHING if q_weight is None else q_weight,
                _NOTHING if k_weight is None else k_weight,
                eps,
                angles,
                norms_after,
                memory,
                self._pool_for(q.size + k.size),
                task.address,
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
        sinks: F32Array | None = None,
        tree: Tree | None = None,
    ) -> F32Array:
        assert isinstance(cache, CpuKvCache)
        layer = cache.layers[cache_layer]
        if tree is None:
            return self._attention(q, k, v, layer, positions, scale, sinks=sinks)
        out = np.empty((*q.shape[:2], v.shape[2]), np.float32)

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
        """Shapes: logits [T, E]; bias [E]; results [T, K]."""
        num_tokens, num_experts = logits.shape
        rule.check(num_experts)
        if bias is not None and bias.shape != (num_experts,):
            raise ValueError(f"bias is {bias.shape} for {num_experts} experts")
        ids = np.empty((num_tokens, rule.num_experts_used), np.int32)
        weights = np.empty((num_tokens, rule.num_experts_used), np.float32)
        kernel, task = route_tasks.route_kernel()
        scratch_bytes = self._workers.num_threads * route_tasks.scratch_bytes(num_experts)
        rule_numbers = (
            route_tasks.GATINGS[rule.gating],
            rule.selects_by_logits,
            rule.num_groups,
            rule.num_groups_used,
            rule.normalise,
            rule.scale,
        )
        with self._scratch.take(8 * route_tasks.NUM_WORDS, scratch_bytes) as memory:
            kernel(
                logits,
                _NOTHING if bias is None else bias,
                ids,
                weights,
                rule_numbers,
                memory,
                self._pool_for(rule.num_experts_used * logits.size),
                task.address,
            )
        return ids, weights

    def gated(
        self, x: F32Array, gate: F32Array, kind: Gate, out: F32Array | None = None
    ) -> F32Array:
        """Compute ``x * f(gate)``. `out` may be `x`. Shapes: x [T, C]; gate [T, n], where n divides
        C."""
        num_tokens, columns = x.shape
        num_gates = gate.shape[-1]
        if gate.shape != (num_tokens, num_gates) or not num_gates or columns % num_gates:
            raise ValueError(f"gates are {gate.shape} for rows {x.shape}")
        if out is None:
            out = np.empty(x.shape, np.float32)
        elif out.shape != x.shape:
            raise ValueError(f"out is {out.shape}, expected contiguous {x.shape}")
        kernel, task = tasks.gate_kernel()
        with self._scratch.take(8 * tasks.NUM_WORDS) as memory:
            number, pool = tasks.KINDS[kind], self._pool_for(x.size)
            kernel(x, gate, number, out, memory, pool, task.address)
        return out

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
        assert isinstance(cache, CpuKvCache)
        state = cache.states[layer]
        if tree is not None:
            return self._recurrent.tree_conv(x, weight, state, tree)
        return self._recurrent.causal_conv(x, weight, state, positions)

    def delta_rule(
        self,
        inputs: DeltaInputs,
        cache: KvCache,
        layer: int,
        positions: I32Array,
        *,
        tree: Tree | None = None,
    ) -> F32Array:
        assert isinstance(cache, CpuKvCache)
        state = cache.states[layer]
        if tree is not None:
            return self._recurrent.tree_delta(inputs, state, tree)
        return self._recurrent.delta_rule(inputs, state, positions)

    def _pool_for(self, num_values: int) -> int:
        return self._workers.address if num_values >= PARALLEL_VALUES else 0


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What calls with the same matrices have in common; `words` as in linear_kernel."""

    matrices: tuple[CpuMatrix, ...]
    columns: int
    rows: int
    thread_bytes: int
    q8_bytes: int
    """Bytes of one token's q8 blocks; 0 if no matrix needs them."""
    words: I64Array


def _plan(matrices: tuple[CpuMatrix, ...]) -> _Plan:
    columns = matrices[0].columns
    layouts = [matrix.layout for matrix in matrices]
    thread_bytes = TOTALS_BYTES + product_scratch_bytes(layouts)
    has_repacked = any(layout[UNPACK] for layout in layouts)
    q8_bytes = Q8_BLOCK_BYTES * (columns // 32) if has_repacked else 0
    words = np.zeros(products.NUM_PLAN_WORDS + len(matrices) * products.NUM_MATRIX_FIELDS, np.int64)
    num_rows = num_runs = 0
    fields = words[products.NUM_PLAN_WORDS :].reshape(len(matrices), products.NUM_MATRIX_FIELDS)
    for row, matrix in zip(fields, matrices, strict=True):
        if matrix.columns != columns:
            raise ValueError(f"matrices of {columns} and {matrix.columns} columns")
        row[products.LAYOUT] = matrix.layout.ctypes.data
        row[products.WEIGHTS] = matrix.address
        row[products.ROWS] = matrix.rows
        row[products.ROWS_BEFORE] = num_rows
        row[products.RUNS_BEFORE] = num_runs
        num_rows += matrix.rows
        num_runs += -(-matrix.rows // products.RUN_ROWS)
    words[products.NUM_MATRICES], words[products.NUM_RUNS] = len(matrices), num_runs
    words[products.SCRATCH_BYTES], words[products.Q8_BYTES] = thread_bytes, q8_bytes
    functions = quantise_function(), *products.linear_tasks()
    words[products.QUANTISE : products.NUM_PLAN_WORDS] = [each.address for each in functions]
    return _Plan(matrices, columns, num_rows, thread_bytes, q8_bytes, words)


class _AngleCache:
    """Cosines and sines of the last positions: all layers of a step ask for the same ones."""

    def __init__(self) -> None:
        # Replaced by one assignment: other threads may be reading it.
        self._last: tuple[bytes, list[tuple[RopeTable, tuple[F32Array, bool]]]] = b"", []

    def get(self, table: RopeTable, positions: I32Array) -> tuple[F32Array, bool]:
        """Cosines and sines, and whether pairs are interleaved.

        Shapes: positions [T]; result [2, T, num_rotated / 2].
        """
        key, last = positions.tobytes(), self._last
        if last[0] != key:
            self._last = last = key, []
        for each, found in last[1]:
            if each is table:
                return found
        angles = positions.astype(np.float64)[:, None] * table.inv_freq
        turns = (np.stack((np.cos(angles), np.sin(angles))) * table.scale).astype(np.float32)
        found = turns, table.pairing is RopePairing.INTERLEAVED
        last[1].append((table, found))
        return found
