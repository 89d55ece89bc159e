"""The routed experts' FFN: gate and up, activation, down, in phases without Python in between.

Phases: quantise hidden rows to q8 blocks; regroup these by expert; gate, up and activation by runs
of rows; quantise the activations; down by runs of rows over all experts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dflash_protocol.ids import F32Array, F64Array, I32Array, I64Array
from dflash_runtime.compute.cpu import simd as v
from dflash_runtime.compute.cpu.compile.compiling import (
    Kernel,
    RowFunction,
    compile_kernel,
    compile_row_function,
)
from dflash_runtime.compute.cpu.kernels.experts_arguments import (
    ACTIVATION,
    ACTIVATION_Q8,
    ACTIVATIONS,
    ADDRESSES,
    BIASES,
    EXPERT_IDS,
    FFN_SIZE,
    GROUP_STARTS,
    HIDDEN,
    HIDDEN_SIZE,
    LAYOUTS,
    NUM_GROUPS,
    NUM_TOKENS,
    OUT,
    PAIR_Q8,
    QUANTISE,
    SCALES,
    SCRATCH,
    SCRATCH_BYTES,
    TOKEN_INDICES,
    TOKEN_Q8,
    WEIGHTS,
)
from dflash_runtime.compute.cpu.kernels.experts_products import down_phase, gate_up
from dflash_runtime.compute.cpu.kernels.experts_q8 import (
    quantise_activations,
    quantise_hidden,
    regroup_hidden,
)
from dflash_runtime.compute.cpu.simd.types import i64, void
from dflash_runtime.compute.cpu.simd.untyped import types
from dflash_runtime.compute.cpu.threads.parallel import run_on, run_region

FEW_TOKENS = 4
"""The caller quantises up to this many tokens alone: waking workers would take longer."""

FEW_PAIRS = 8
"""The caller quantises up to this many pairs' activations alone: waking workers would take
longer."""


def _expert_ffn(
    hidden: F32Array,
    expert_ids: I32Array,
    group_starts: I32Array,
    token_indices: I32Array,
    weights: F32Array,
    out: F64Array,
    addresses: I64Array,
    layouts: I64Array,
    scales: F32Array,
    biases: I64Array,
    activation: F32Array,
    ffn_size: int,
    thread_bytes: int,
    args: int,
    token_q8: int,
    pair_q8: int,
    activations: int,
    activation_q8: int,
    scratch: int,
    counter: int,
    pool: int,
    functions: I64Array,
) -> bool:
    """Run all phases. False: the batch has expert ids, tokens or pairs out of range.

    Arguments from `args` on are addresses, except `functions`; `scales` and `biases` may be empty,
    `token_q8` and `activation_q8` 0. Shapes: as the fields of experts_arguments; functions [6]:
    addresses of the phases and of the quantising function.
    """
    num_groups, num_pairs = expert_ids.shape[0], token_indices.shape[0]
    # Cheap next to the products, and no bug of a caller makes a kernel read outside the mapping.
    if group_starts.shape[0] != num_groups + 1 or weights.shape[0] != num_pairs:
        return False
    if group_starts[0] != 0 or group_starts[num_groups] != num_pairs:
        return False
    for group in range(num_groups):
        if expert_ids[group] < 0 or expert_ids[group] >= addresses.shape[0]:
            return False
        if group_starts[group] > group_starts[group + 1]:
            return False
    for pair in range(num_pairs):
        if token_indices[pair] < 0 or token_indices[pair] >= hidden.shape[0]:
            return False
    v.store_i64(args + 8 * HIDDEN, v.address_of(hidden))
    v.store_i64(args + 8 * NUM_TOKENS, hidden.shape[0])
    v.store_i64(args + 8 * HIDDEN_SIZE, hidden.shape[1])
    v.store_i64(args + 8 * FFN_SIZE, ffn_size)
    v.store_i64(args + 8 * NUM_GROUPS, num_groups)
    v.store_i64(args + 8 * EXPERT_IDS, v.address_of(expert_ids))
    v.store_i64(args + 8 * GROUP_STARTS, v.address_of(group_starts))
    v.store_i64(args + 8 * TOKEN_INDICES, v.address_of(token_indices))
    v.store_i64(args + 8 * WEIGHTS, v.address_of(weights))
    v.store_i64(args + 8 * OUT, v.address_of(out))
    v.store_i64(args + 8 * ADDRESSES, v.address_of(addresses))
    v.store_i64(args + 8 * LAYOUTS, v.address_of(layouts))
    v.store_i64(args + 8 * SCALES, v.address_of(scales) if scales.size else 0)
    v.store_i64(args + 8 * BIASES, v.address_of(biases) if biases.size else 0)
    v.store_i64(args + 8 * ACTIVATION, v.address_of(activation))
    v.store_i64(args + 8 * TOKEN_Q8, token_q8)
    v.store_i64(args + 8 * PAIR_Q8, pair_q8)
    v.store_i64(args + 8 * ACTIVATIONS, activations)
    v.store_i64(args + 8 * ACTIVATION_Q8, activation_q8)
    v.store_i64(args + 8 * SCRATCH, scratch)
    v.store_i64(args + 8 * SCRATCH_BYTES, thread_bytes)
    v.store_i64(args + 8 * QUANTISE, functions[5])
    if token_q8:
        run_on(pool if hidden.shape[0] > FEW_TOKENS else 0, functions[0], args, counter)
        if hidden.shape[0] > 1:
            run_region(pool, functions[1], args, counter)
    run_region(pool, functions[2], args, counter)
    if activation_q8:
        run_on(pool if num_pairs > FEW_PAIRS else 0, functions[3], args, counter)
    run_region(pool, functions[4], args, counter)
    return True


@cache
def expert_ffn_tasks() -> tuple[RowFunction, ...]:
    """The phases, passed to the kernel by address."""
    phases = (quantise_hidden, regroup_hidden, gate_up, quantise_activations, down_phase)
    return tuple(compile_row_function(phase, void, *[i64] * 3) for phase in phases)


@cache
def expert_ffn_kernel() -> Kernel:
    def given(element: Any, num_dimensions: int) -> Any:
        return types.Array(element, num_dimensions, "C", readonly=True)

    ids = given(types.int32, 1)
    return compile_kernel(
        _expert_ffn,
        given(v.f32, 2),
        ids,
        ids,
        ids,
        given(v.f32, 1),
        v.f64[:, ::1],
        given(v.i64, 2),
        given(v.i64, 2),
        given(v.f32, 2),
        given(v.i64, 2),
        given(v.f32, 1),
        *[v.i64] * 10,
        given(v.i64, 1),
    )
