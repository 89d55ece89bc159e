"""Causal convolution and the gated delta rule: checks and buffers around their calls."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.cpu.kernels import conv_tasks, delta_tree
from dflash_runtime.compute.cpu.kernels import delta_tasks as d
from dflash_runtime.compute.cpu.kernels.words import Call
from dflash_runtime.compute.cpu.kv_cache import BlockedState
from dflash_runtime.compute.host_ops import DeltaInputs
from dflash_runtime.compute.sequence_state import begin_of
from dflash_runtime.compute.trees import Tree


class Runner(Protocol):
    """Runs calls on a pool of threads."""

    @property
    def num_threads(self) -> int: ...

    def run(self, call: Call) -> None: ...

    def new(self, shape: tuple[int, ...]) -> F32Array:
        """Memory for a result."""


class Recurrent:
    """Both operations, as calls that a runner runs; can be called from several threads at once.

    It does not keep the runner, which owns it: with a cycle, a closed model's memory would wait for
    the garbage collector.
    """

    def __init__(self) -> None:
        self._taps: dict[int, tuple[F32Array, F32Array]] = {}

    def compile(self) -> None:
        """Compile everything except what only trees need."""
        for compiled in (conv_tasks.conv_task, conv_tasks.keep_task, d.delta_task):
            compiled()

    def causal_conv(
        self,
        runner: Runner,
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
        result = self.convolve(runner, x, weight, state, first=first)
        state.conv_positions = first + num_tokens
        return result

    def convolve(
        self,
        runner: Runner,
        x: F32Array,
        weight: F32Array,
        state: BlockedState,
        *,
        first: int,
    ) -> F32Array:
        """Convolve tokens from position `first` on, and keep their last inputs. Shapes: x [T, C];
        weight [C, K]."""
        result = self._convolved(runner, x, weight, state, first=first)
        taps = self._taps_of(weight)
        runner.run(conv_tasks.keep_call(x, state.inputs, taps, first_position=first))
        return result

    def tree_conv(
        self,
        runner: Runner,
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
            self.causal_conv(runner, x[path], weight, state, tree.positions[path])

        tree.keep(keep)
        return self._convolved(runner, x, weight, state, table=int(table.ctypes.data))

    def _convolved(
        self,
        runner: Runner,
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
        out, threads = runner.new(x.shape), runner.num_threads
        runner.run(
            conv_tasks.conv_call(
                x, kept, taps, out, first_position=first, table=table, num_threads=threads
            )
        )
        return out

    def delta_rule(
        self,
        runner: Runner,
        inputs: DeltaInputs,
        state: BlockedState,
        positions: I32Array,
    ) -> F32Array:
        if inputs.num_tokens == 0:
            return np.empty(inputs.out_shape, np.float32)
        first = begin_of(positions, state.delta_positions)
        _check_count(positions, inputs.num_tokens)
        _check_shape(inputs, state)
        state.delta_positions = -1  # until all of it is done
        out = self.apply_rule(runner, inputs, state, first=first)
        state.delta_positions = first + inputs.num_tokens
        return out

    def apply_rule(
        self, runner: Runner, inputs: DeltaInputs, state: BlockedState, *, first: int
    ) -> F32Array:
        """Apply the rule to tokens from position `first` on."""
        _check_shape(inputs, state)
        out, threads = runner.new(inputs.out_shape), runner.num_threads
        runner.run(
            d.delta_call(state.words, inputs, out, first_position=first, num_threads=threads)
        )
        return out

    def tree_delta(
        self,
        runner: Runner,
        inputs: DeltaInputs,
        state: BlockedState,
        tree: Tree,
    ) -> F32Array:
        """`delta_rule` of a tree's tokens, each from its parent's state."""
        _check_shape(inputs, state)
        tree.check_size(inputs.num_tokens)
        out = np.empty(inputs.out_shape, np.float32)
        if inputs.num_tokens == 0:
            return out
        threads = runner.num_threads
        runner.run(delta_tree.tree_call(state.words, inputs, out, tree, num_threads=threads))

        def keep(path: I32Array) -> None:
            self.delta_rule(runner, inputs.of(path), state, tree.positions[path])

        tree.keep(keep)
        return out

    def _taps_of(self, weight: F32Array) -> F32Array:
        """A weight transposed, one row for each tap, cached. Shapes: weight [C, K]; result [K,
        C]."""
        known = self._taps.get(id(weight))
        if known is None:
            known = self._taps[id(weight)] = weight, np.ascontiguousarray(weight.T)
        return known[1]


def _check_shape(inputs: DeltaInputs, state: BlockedState) -> None:
    if inputs.shape != state.delta:
        raise ValueError(f"{inputs.shape} does not fit a state of {state.delta}")


def _check_count(positions: I32Array, num_tokens: int) -> None:
    if positions.shape != (num_tokens,):
        raise ValueError(f"positions are {positions.shape} for {num_tokens} tokens")
