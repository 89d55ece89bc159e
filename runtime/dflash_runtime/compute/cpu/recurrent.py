"""Launches causal convolution and the gated delta rule: guards, and buffers.

Dtypes and layouts are checked by the kernels' own signatures, which accept C-contiguous arrays of
one element type and rank only. Knows nothing of the mathematics.
"""

from __future__ import annotations

import numpy as np

from dflash_adapters.moe_spec import DeltaShape
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.cpu import conv_tasks
from dflash_runtime.compute.cpu import delta_tasks as d
from dflash_runtime.compute.cpu.recurrent_state import RecurrentState
from dflash_runtime.compute.cpu.recurrent_tiles import products_function
from dflash_runtime.compute.cpu.results import result_array
from dflash_runtime.compute.cpu.scratch import Scratch
from dflash_runtime.compute.cpu.workers import Workers
from dflash_runtime.compute.sequence_state import begin_of

_PARALLEL_VALUES = 1 << 15
"""Values of a convolution below which waking other threads costs more than it saves."""

_PARALLEL_PRODUCTS = 1 << 17
"""Products of a delta rule, likewise."""


class Recurrent:
    """Both operations on one pool of threads; calls may come from several threads at once."""

    def __init__(self, workers: Workers, scratch: Scratch) -> None:
        self._workers = workers
        self._scratch = scratch
        self._taps: dict[int, tuple[F32Array, F32Array]] = {}

    def compile(self) -> None:
        conv_tasks.conv_kernel()
        d.delta_kernel()
        products_function()

    def causal_conv(
        self,
        x: F32Array,
        weight: F32Array,
        state: RecurrentState,
        positions: I32Array,
        out: F32Array | None = None,
    ) -> F32Array:
        """See ops.Ops. Shapes: x [T, C]; weight [C, K]."""
        num_tokens, channels = x.shape
        taps = self._taps_of(weight)
        num_kept = taps.shape[0] - 1
        if taps.shape[1] != channels or state.inputs.shape != (num_kept, channels):
            raise ValueError(f"{x.shape} by {weight.shape} does not fit {state.inputs.shape}")
        if out is x:
            raise ValueError("out must not be x, of which rows are read after they were convolved")
        out = result_array(x.shape, out)
        if num_tokens == 0:
            return out
        first = begin_of(positions, state.conv_positions)
        _check_count(positions, num_tokens)
        if first == 0:
            state.inputs[:] = 0
        kernel, task = conv_tasks.conv_kernel()
        pool = self._workers.address if x.size >= _PARALLEL_VALUES else 0
        state.conv_positions = -1  # until all of it is done
        rows_bytes = 8 * taps.shape[0] * self._workers.num_threads
        with self._scratch.take(8 * conv_tasks.NUM_WORDS, rows_bytes) as (args, rows, counter):
            kernel(x, state.inputs, taps, out, first, rows, args, counter, pool, task.address)
        end = first + num_tokens
        for position in range(max(first, end - num_kept), end):
            state.inputs[position % num_kept] = x[position - first]
        state.conv_positions = end
        return out

    def delta_rule(
        self,
        mixed: F32Array,
        alpha: F32Array,
        beta: F32Array,
        shape: DeltaShape,
        *,
        a: F32Array,
        dt_bias: F32Array,
        state: RecurrentState,
        positions: I32Array,
        eps: float,
        out: F32Array | None = None,
    ) -> F32Array:
        """See ops.Ops."""
        num_tokens, heads = mixed.shape[0], shape.num_value_heads
        logits = num_tokens, heads
        if (
            shape != state.delta
            or mixed.shape[1] != shape.num_channels
            or alpha.shape != logits
            or beta.shape != logits
            or a.shape != (heads,)
            or dt_bias.shape != (heads,)
        ):
            raise ValueError(f"{mixed.shape}, {alpha.shape}, {beta.shape} do not fit {shape}")
        out = result_array((num_tokens, heads, shape.value_dim), out)
        if num_tokens == 0:
            return out
        first = begin_of(positions, state.delta_positions)
        _check_count(positions, num_tokens)
        num_threads = self._workers.num_threads
        products = 2 * num_tokens * heads * shape.key_dim * shape.value_dim
        is_shared = num_threads > 1 and products >= _PARALLEL_PRODUCTS
        one_scratch = d.scratch_bytes(shape.key_dim, shape.value_dim)
        kernel, task = d.delta_kernel()
        state.delta_positions = -1  # until all of it is done
        with self._scratch.take(8 * d.NUM_WORDS, num_threads * one_scratch) as (
            args,
            scratch,
            counter,
        ):
            kernel(
                state.words,
                mixed,
                alpha,
                beta,
                a,
                dt_bias,
                out,
                first,
                eps,
                one_scratch,
                args,
                scratch,
                counter,
                self._workers.address if is_shared else 0,
                task.address,
                products_function().address,
            )
        state.delta_positions = first + num_tokens
        return out

    def _taps_of(self, weight: F32Array) -> F32Array:
        """A weight with a row for each tap, made once. Shapes: weight [C, K]; result [K, C]."""
        known = self._taps.get(id(weight))
        if known is None:
            known = self._taps[id(weight)] = weight, np.ascontiguousarray(weight.T)
        return known[1]


def _check_count(positions: I32Array, num_tokens: int) -> None:
    if positions.shape != (num_tokens,):
        raise ValueError(f"positions are {positions.shape} for {num_tokens} tokens")
