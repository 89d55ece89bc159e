"""Launches causal convolution and the gated delta rule: checks and buffers around the kernels.

Compiled signatures check dtypes and layouts: they accept only C-contiguous arrays of one element
type and rank.
"""

from __future__ import annotations

import numpy as np

from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.cpu.kernels import conv_tasks, delta_tree
from dflash_runtime.compute.cpu.kernels import delta_tasks as d
from dflash_runtime.compute.cpu.kernels.recurrent_tiles import products_function
from dflash_runtime.compute.cpu.kv_cache import BlockedState
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.host_ops import DeltaInputs
from dflash_runtime.compute.sequence_state import begin_of
from dflash_runtime.compute.trees import Tree

_PARALLEL_VALUES = 1 << 15
"""With fewer values of a convolution, waking other threads costs more than it saves."""

_PARALLEL_PRODUCTS = 1 << 17
"""The same for products of a delta rule."""


class Recurrent:
    """Both operations on one pool of threads; can be called from several threads at once."""

    def __init__(self, workers: Workers, scratch: Scratch) -> None:
        self._workers = workers
        self._scratch = scratch
        self._taps: dict[int, tuple[F32Array, F32Array]] = {}

    def compile(self) -> None:
        """Compile everything except what only trees need."""
        conv_tasks.conv_kernel()
        d.delta_kernel()
        products_function()

    def causal_conv(
        self,
        x: F32Array,
        weight: F32Array,
        state: BlockedState,
        positions: I32Array,
    ) -> F32Array:
        """Shapes: x [T, C]; weight [C, K]."""
        num_tokens = x.shape[0]
        if num_tokens == 0:
            return np.empty(x.shape, np.float32)
        first = begin_of(positions, state.conv_positions)
        _check_count(positions, num_tokens)
        if first == 0:
            state.inputs[:] = 0
        state.conv_positions = -1  # until all of it is done
        result = self._convolved(x, weight, state, first=first)
        num_kept, end = state.inputs.shape[0], first + num_tokens
        for position in range(max(first, end - num_kept), end):
            state.inputs[position % num_kept] = x[position - first]
        state.conv_positions = end
        return result

    def tree_conv(
        self,
        x: F32Array,
        weight: F32Array,
        state: BlockedState,
        tree: Tree,
    ) -> F32Array:
        """`causal_conv` of a tree's tokens; accepting a path updates the state."""
        tree.check_size(x.shape[0])
        num_kept, stride = state.inputs.shape[0], 4 * x.shape[1]
        before = tree.ancestors(weight.shape[1]).astype(np.int64)
        kept = (tree.position + before) % max(1, num_kept)
        table = np.where(
            before < 0,
            state.inputs.ctypes.data + stride * kept,
            x.ctypes.data + stride * before,
        )
        table = np.ascontiguousarray(table)

        def keep(path: I32Array) -> None:
            self.causal_conv(x[path], weight, state, tree.positions[path])

        tree.keep(keep)
        return self._convolved(x, weight, state, table=int(table.ctypes.data))

    def _convolved(
        self,
        x: F32Array,
        weight: F32Array,
        state: BlockedState,
        *,
        first: int = 0,
        table: int = 0,
    ) -> F32Array:
        """Convolve without changing the state; `table` as in conv_tasks."""
        taps, kept = self._taps_of(weight), state.inputs
        if taps.shape != (kept.shape[0] + 1, x.shape[1]) or kept.shape[1] != x.shape[1]:
            raise ValueError(f"{x.shape} by {weight.shape} does not fit {kept.shape}")
        out = np.empty(x.shape, np.float32)
        kernel, task = conv_tasks.conv_kernel()
        pool = self._workers.address if x.size >= _PARALLEL_VALUES else 0
        rows_bytes = 8 * taps.shape[0] * self._workers.num_threads
        with self._scratch.take(8 * conv_tasks.NUM_WORDS, rows_bytes) as memory:
            kernel(x, kept, taps, out, first, table, memory, pool, task.address)
        return out

    def delta_rule(
        self,
        inputs: DeltaInputs,
        state: BlockedState,
        positions: I32Array,
    ) -> F32Array:
        _check_shape(inputs, state)
        out, shape = np.empty(inputs.out_shape, np.float32), inputs.shape
        if inputs.num_tokens == 0:
            return out
        first = begin_of(positions, state.delta_positions)
        _check_count(positions, inputs.num_tokens)
        one_scratch = d.scratch_bytes(shape.key_dim, shape.value_dim)
        kernel, task = d.delta_kernel()
        state.delta_positions = -1  # until all of it is done
        with self._scratch.take(8 * d.NUM_WORDS, self._workers.num_threads * one_scratch) as memory:
            kernel(
                state.words,
                _arrays(inputs),
                out,
                first,
                inputs.eps,
                memory,
                one_scratch,
                (products_function().address, task.address),
                self._pool_for(inputs),
            )
        state.delta_positions = first + inputs.num_tokens
        return out

    def tree_delta(
        self,
        inputs: DeltaInputs,
        state: BlockedState,
        tree: Tree,
    ) -> F32Array:
        """`delta_rule` of a tree's tokens, each from its parent's state."""
        _check_shape(inputs, state)
        tree.check_size(inputs.num_tokens)
        out, shape = np.empty(inputs.out_shape, np.float32), inputs.shape
        if inputs.num_tokens == 0:
            return out
        last = tree.position + int(tree.depths.max())
        num_blocks = last // d.DELTA_BLOCK - tree.position // d.DELTA_BLOCK + 1
        group = shape.num_value_heads // shape.num_key_heads
        one_scratch = delta_tree.scratch_bytes(
            inputs.num_tokens, num_blocks, group, key_dim=shape.key_dim, value_dim=shape.value_dim
        )
        kernel, task = delta_tree.tree_kernel()
        with self._scratch.take(
            8 * delta_tree.NUM_WORDS, self._workers.num_threads * one_scratch
        ) as memory:
            kernel(
                state.words,
                _arrays(inputs),
                out,
                tree.position,
                inputs.eps,
                memory,
                one_scratch,
                (products_function().address, task.address),
                self._pool_for(inputs),
                (tree.walk, tree.parents, num_blocks),
            )

        def keep(path: I32Array) -> None:
            self.delta_rule(inputs.of(path), state, tree.positions[path])

        tree.keep(keep)
        return out

    def _pool_for(self, inputs: DeltaInputs) -> int:
        shape = inputs.shape
        values = inputs.num_tokens * shape.num_value_heads * shape.value_dim
        return self._workers.address if 2 * values * shape.key_dim >= _PARALLEL_PRODUCTS else 0

    def _taps_of(self, weight: F32Array) -> F32Array:
        """A weight transposed, one row for each tap, cached. Shapes: weight [C, K]; result [K,
        C]."""
        known = self._taps.get(id(weight))
        if known is None:
            known = self._taps[id(weight)] = weight, np.ascontiguousarray(weight.T)
        return known[1]


def _arrays(inputs: DeltaInputs) -> d.Inputs:
    return inputs.mixed, inputs.alpha, inputs.beta, inputs.a, inputs.dt_bias


def _check_shape(inputs: DeltaInputs, state: BlockedState) -> None:
    if inputs.shape != state.delta:
        raise ValueError(f"{inputs.shape} does not fit a state of {state.delta}")


def _check_count(positions: I32Array, num_tokens: int) -> None:
    if positions.shape != (num_tokens,):
        raise ValueError(f"positions are {positions.shape} for {num_tokens} tokens")
