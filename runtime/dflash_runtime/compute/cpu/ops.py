"""Dense operations on the CPU: checks, buffers and words of calls.

Everything that reaches compiled code is checked here or in attention and recurrent: `address`
accepts only contiguous arrays of one element type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Gate
from dflash_adapters.loading import Matrix
from dflash_adapters.rope import RopePairing, RopeTable
from dflash_adapters.routing import RoutingRule
from dflash_adapters.spec import KvLayer, RecurrentLayer
from dflash_protocol.ids import F32Array, I32Array, I64Array
from dflash_runtime.compute.cpu import attention as attending
from dflash_runtime.compute.cpu.kernels import dense_tasks as tasks
from dflash_runtime.compute.cpu.kernels import linear_kernel as products
from dflash_runtime.compute.cpu.kernels import route_tasks
from dflash_runtime.compute.cpu.kernels.products import (
    REPACKED_ROWS,
    TOTALS_BYTES,
    product_scratch_bytes,
)
from dflash_runtime.compute.cpu.kernels.words import (
    Call,
    address,
    run_task,
    task_call,
    words_kernel,
)
from dflash_runtime.compute.cpu.kv_cache import CpuKvCache, LayerCache
from dflash_runtime.compute.cpu.recurrent import Recurrent
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.cpu.weights.matrix import CpuMatrix, load_matrix
from dflash_runtime.compute.cpu.weights.repacked.kernels import Q8_BLOCK_BYTES
from dflash_runtime.compute.cpu.weights.repacked.quantising import quantise_function
from dflash_runtime.compute.cpu.weights.rows import ROW_BYTES, UNPACK, expand_function
from dflash_runtime.compute.host_ops import DeltaInputs, ElementOps
from dflash_runtime.compute.kv_cache import KvCache, KvType
from dflash_runtime.compute.trees import Tree, attend_segments

_MOST_PLANS = 1 << 14


class CpuOps(ElementOps):
    """Implements host_ops.Ops over numpy arrays; can be called from several threads at once.

    An operation makes a call of compiled code, and `run` runs it.
    """

    def __init__(self, workers: Workers, scratch: Scratch) -> None:
        self.workers = workers
        self.scratch = scratch
        self.recurrent = Recurrent()
        self._run_words = words_kernel()
        self._plans: dict[tuple[CpuMatrix, ...], _Plan] = {}
        self._angles = _AngleCache()
        # Compiled now rather than in the first step.
        for compiled in (run_task, tasks.norm_task, tasks.rope_task, tasks.gate_task):
            compiled()
        for compiled in (route_tasks.route_task, products.run_linear, products.embed_task):
            compiled()
        products.linear_tasks()
        quantise_function()

    @property
    def num_threads(self) -> int:
        """Threads that a call may run on."""
        return self.workers.num_threads

    def run(self, call: Call) -> None:
        """Run a call, with scratch memory for it alone."""
        words, pool = call.words, self.workers.address
        if not call.scratch:
            self._run_words(call.function, np.array(words, np.int64), pool)
            return
        buffer, memory = self.scratch.take([num_bytes for _, num_bytes in call.scratch])
        try:
            for (index, _), place in zip(call.scratch, memory, strict=False):
                words[index] = place
            self._run_words(call.function, np.array(words, np.int64), pool)
        finally:
            self.scratch.give_back(buffer)

    def new(self, shape: tuple[int, ...]) -> F32Array:
        """Memory for a result, not initialised."""
        return np.empty(shape, np.float32)

    def load_vector(self, file: GgufFile, tensor_name: str) -> F32Array:
        return np.array(file.floats(tensor_name), np.float32)

    def load_matrix(self, file: GgufFile, tensor_name: str) -> CpuMatrix:
        return load_matrix(file, tensor_name)

    def new_kv_cache(
        self,
        layers: tuple[KvLayer, ...],
        capacity: int,
        kv_type: KvType,
        recurrent: tuple[RecurrentLayer, ...] = (),
    ) -> CpuKvCache:
        attending.compile_attention(kv_type)
        if recurrent:
            self.recurrent.compile()
        return CpuKvCache(layers, capacity, kv_type, recurrent, self.workers)

    def embed(self, table: Matrix, token_ids: I32Array) -> F32Array:
        """Also tells the workers how many rows the pass has that begins with it."""
        assert isinstance(table, CpuMatrix)
        self.workers.begin(token_ids.shape[0])
        out = self.new((token_ids.shape[0], table.columns))
        is_bad = (token_ids < 0) | (token_ids >= table.rows)
        if is_bad.any():
            bad = token_ids[is_bad][0]
            raise ValueError(f"token id {bad} is not within 0..{table.rows - 1}")
        place, expand = table.address, expand_function(table.tensor_type).address
        row_bytes, columns = int(table.layout[ROW_BYTES]), table.columns
        fields = [address(token_ids, np.int32), place, expand, row_bytes, columns, address(out)]
        fields.append(token_ids.shape[0])
        self.run(task_call(products.embed_task(), 0, fields, per_token=(products.NUM_IDS,)))
        return out

    def rms_norm(self, x: F32Array, weight: F32Array, eps: float) -> F32Array:
        """Normalise over the last axis. Shapes: x [..., n], contiguous; weight [n]."""
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"weight is {weight.shape} for rows of {x.shape[-1]}")
        out = self.new(x.shape)
        self.run(tasks.norm_call(x, weight, out, eps))
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
            out = self.new(shape)
        elif out.shape != shape or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.shape}, expected contiguous {shape}")
        if add is not None and add.shape != shape:
            raise ValueError(f"cannot add {add.shape} to {shape}")
        self._products(x, (matrix,), out, add)
        return out

    def project(self, x: F32Array, matrices: Sequence[Matrix]) -> list[F32Array]:
        several = tuple(matrix for matrix in matrices if isinstance(matrix, CpuMatrix))
        assert len(several) == len(matrices)
        num_tokens = x.shape[0]
        out = self.new((num_tokens * sum(matrix.rows for matrix in several),))
        self._products(x, several, out, None)
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
        addend: F32Array | None,
    ) -> None:
        """``x @ matrix.T`` for each matrix, one after another in `out`, plus `addend`.

        Shapes: x [T, columns]; out, addend [T * sum of rows].
        """
        plan = self._plans.get(matrices)
        if plan is None:
            if len(self._plans) == _MOST_PLANS:  # mostly of closed models
                self._plans.clear()
            plan = self._plans[matrices] = _plan(matrices, self.num_threads)
        num_tokens, columns = x.shape
        if columns != plan.columns:
            raise ValueError(f"x is {x.shape}, the matrix has {plan.columns} columns")
        size = num_tokens * plan.rows
        if out.size != size:
            raise ValueError(f"{out.size} values for {size} products")
        if size == 0:
            return
        places = address(x), address(out), 0 if addend is None else address(addend)
        self.run(
            Call(
                products.run_linear().address,
                [*plan.words, *places, num_tokens, num_tokens, columns, 0, plan.matrices_at, 0],
                per_token=(products.NUM_TOKENS,),
                scratch=(
                    (products.Q8_BLOCKS, num_tokens * plan.q8_bytes),
                    (products.SCRATCH, plan.scratch_bytes),
                ),
            )
        )

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
        angles = self.angles(table, positions)  # which must outlive the call
        self.run(
            tasks.rope_call(
                q,
                k,
                (q_weight, k_weight),
                angles,
                eps=eps,
                is_interleaved=table.pairing is RopePairing.INTERLEAVED,
                norms_after=norms_after,
            )
        )

    def angles(self, table: RopeTable, positions: I32Array) -> F32Array:
        """Cosines and sines of ascending positions. Shapes: positions [T]; result [2, T or more,
        pairs], beginning with those positions."""
        return self._angles.get(table, positions)

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

        def attended(q: F32Array, k: F32Array, v: F32Array, positions: I32Array) -> F32Array:
            return self.attend((q, k, v), layer, positions, scale=scale, sinks=sinks)

        if tree is None:
            return attended(q, k, v, positions)
        out = np.empty((*q.shape[:2], v.shape[2]), np.float32)

        def keep(path: I32Array) -> None:
            attending.store(self.run, k[path], v[path], layer, tree.positions[path])

        attend_segments(tree, attended, out, q=q, k=k, v=v)
        tree.keep(keep)
        return out

    def attend(
        self,
        rows: tuple[F32Array, F32Array, F32Array],
        layer: LayerCache,
        positions: I32Array,
        *,
        scale: float,
        sinks: F32Array | None,
    ) -> F32Array:
        """`attention` of consecutive tokens. Shapes: rows, queries, keys and values, as there."""
        threads = self.num_threads
        return attending.attend(
            self.run, rows, layer, positions, scale=scale, sinks=sinks, num_threads=threads
        )

    def route(
        self, logits: F32Array, rule: RoutingRule, *, bias: F32Array | None = None
    ) -> tuple[I32Array, F32Array]:
        """Shapes: logits [T, E]; bias [E]; results [T, K]."""
        num_tokens, num_experts = logits.shape
        rule.check(num_experts)
        if bias is not None and bias.shape != (num_experts,):
            raise ValueError(f"bias is {bias.shape} for {num_experts} experts")
        weights = self.new((num_tokens, rule.num_experts_used))
        ids = self.new(weights.shape).view(np.int32)
        self.run(
            route_tasks.route_call(logits, rule, bias, ids, weights, num_threads=self.num_threads)
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
            out = self.new(x.shape)
        elif out.shape != x.shape:
            raise ValueError(f"out is {out.shape}, expected contiguous {x.shape}")
        self.run(tasks.gate_call(x, gate, kind, out))
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
            return self.recurrent.tree_conv(self, x, weight, state, tree)
        return self.recurrent.causal_conv(self, x, weight, state, positions)

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
            return self.recurrent.tree_delta(self, inputs, state, tree)
        return self.recurrent.delta_rule(self, inputs, state, positions)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What calls with the same matrices have in common; `words` as in linear_kernel."""

    matrices: tuple[CpuMatrix, ...]
    columns: int
    rows: int
    scratch_bytes: int
    """Of all threads."""
    q8_bytes: int
    """Bytes of one token's q8 blocks; 0 if no matrix needs them."""
    words: list[int]
    matrices_at: int
    fields: I64Array
    """Of each matrix, at `matrices_at`. Shapes: [M, NUM_MATRIX_FIELDS]."""


def _plan(matrices: tuple[CpuMatrix, ...], num_threads: int) -> _Plan:
    columns = matrices[0].columns
    layouts = [matrix.layout for matrix in matrices]
    thread_bytes = TOTALS_BYTES + product_scratch_bytes(layouts)
    has_repacked = any(layout[UNPACK] for layout in layouts)
    q8_bytes = Q8_BLOCK_BYTES * (columns // 32) if has_repacked else 0
    fields = np.zeros((len(matrices), products.NUM_MATRIX_FIELDS), np.int64)
    num_panels = sum(-(-matrix.rows // REPACKED_ROWS) for matrix in matrices)
    row_bytes = min(int(layout[ROW_BYTES]) for layout in layouts)
    run_panels, claims_ahead = products.items_of(num_panels, row_bytes, num_threads)
    num_rows = panels_before = 0
    for row, matrix in zip(fields, matrices, strict=True):
        if matrix.columns != columns:
            raise ValueError(f"matrices of {columns} and {matrix.columns} columns")
        row[products.LAYOUT] = matrix.layout.ctypes.data
        row[products.WEIGHTS] = matrix.address
        row[products.ROWS] = matrix.rows
        row[products.ROWS_BEFORE] = num_rows
        row[products.PANELS_BEFORE] = panels_before
        num_rows += matrix.rows
        panels_before += -(-matrix.rows // REPACKED_ROWS)
        row[products.END_PANEL] = panels_before
    functions = quantise_function(), *products.linear_tasks()
    words = [num_panels, run_panels, int(claims_ahead), num_threads]
    words += [thread_bytes, q8_bytes, *(each.address for each in functions)]
    return _Plan(
        matrices,
        columns,
        num_rows,
        num_threads * thread_bytes,
        q8_bytes,
        words,
        address(fields, np.int64),
        fields,
    )


class _AngleCache:
    """Cosines and sines of the last positions: all layers of a step ask for the same ones."""

    def __init__(self) -> None:
        # Replaced by one assignment: other threads may be reading it.
        self._last: tuple[bytes, list[tuple[RopeTable, F32Array]]] = b"", []

    def get(self, table: RopeTable, positions: I32Array) -> F32Array:
        """Shapes: positions [T]; result [2, T, pairs]."""
        key, last = positions.tobytes(), self._last
        if last[0] != key:
            self._last = last = key, []
        for each, found in last[1]:
            if each is table:
                return found
        found = turns_of(table, positions)
        last[1].append((table, found))
        return found


def turns_of(table: RopeTable, positions: I32Array) -> F32Array:
    """Cosines and sines. Shapes: positions [T]; result [2, T, pairs]."""
    angles = positions.astype(np.float64)[:, None] * table.inv_freq
    turns: F32Array = (np.stack((np.cos(angles), np.sin(angles))) * table.scale).astype(np.float32)
    return turns
