"""Launches RMS norm, rotary embedding, routing and gates: checks and buffers around the kernels.

Compiled signatures check dtypes and layouts: they accept only C-contiguous arrays of one element
type and rank.
"""

from __future__ import annotations

import numpy as np

from dflash_adapters.layers import Gate
from dflash_adapters.rope import RopePairing, RopeTable
from dflash_adapters.routing import RoutingRule
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.cpu.kernels import dense_tasks as tasks
from dflash_runtime.compute.cpu.kernels import gate_tasks, route_tasks
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers

PARALLEL_VALUES = 1 << 15
"""With fewer values, waking other threads costs more than it saves."""

_NOTHING = np.empty(0, np.float32)


class Dense:
    """Operations without weight matrices; can be called from several threads at once."""

    def __init__(self, workers: Workers, scratch: Scratch) -> None:
        self._workers = workers
        self._scratch = scratch
        self._angles = _AngleCache()

    def compile(self) -> None:
        tasks.norm_kernel()
        tasks.rope_kernel()
        route_tasks.route_kernel()
        gate_tasks.gate_kernel()

    def rms_norm(
        self, x: F32Array, weight: F32Array, eps: float, out: F32Array | None = None
    ) -> F32Array:
        """Normalise over the last axis. `out` may be `x`. Shapes: x [..., n]; weight [n]."""
        columns = x.shape[-1]
        if weight.shape != (columns,):
            raise ValueError(f"weight is {weight.shape} for rows of {columns}")
        out = result_array(x.shape, out)
        rows, result = x, out
        if x.ndim != 2:
            # Both reshapes are views: `out` is contiguous; so is `x`, or the kernel refuses it.
            rows, result = x.reshape(-1, columns), out.reshape(-1, columns)
        kernel, task = tasks.norm_kernel()
        with self._scratch.take(8 * tasks.NUM_WORDS) as memory:
            kernel(rows, weight, eps, result, memory, self._pool_for(x.size), task.address)
        return out

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

    def route(
        self, logits: F32Array, rule: RoutingRule, bias: F32Array | None = None
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
        kernel, task = gate_tasks.gate_kernel()
        with self._scratch.take(8 * gate_tasks.NUM_WORDS) as memory:
            number, pool = gate_tasks.KINDS[kind], self._pool_for(x.size)
            kernel(x, gate, number, out, memory, pool, task.address)
        return out

    def _pool_for(self, num_values: int) -> int:
        return self._workers.address if num_values >= PARALLEL_VALUES else 0


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


def result_array(shape: tuple[int, ...], out: F32Array | None) -> F32Array:
    """A new array, or `out` if it has the right shape and is contiguous."""
    if out is None:
        return np.empty(shape, np.float32)
    if out.shape != shape or not out.flags.c_contiguous:
        raise ValueError(f"out is {out.shape}, expected contiguous {shape}")
    return out
