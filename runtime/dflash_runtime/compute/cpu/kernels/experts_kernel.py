"""The routed experts' FFN: gate and up, activation, down, in phases without Python in between.

Phases: quantise hidden rows to q8 blocks; regroup these by expert; gate, up and activation by runs
of rows; quantise the activations; down by runs of rows over all experts.
"""

from __future__ import annotations

from functools import cache

from dflash_protocol.ids import F32Array, F64Array, I32Array, I64Array
from dflash_runtime.compute.cpu.compile.compiling import (
    Kernel,
    RowFunction,
    compile_kernel,
    compile_task,
    read_only,
)
from dflash_runtime.compute.cpu.kernels.experts_arguments import (
    ACTIVATION_Q8,
    ACTIVATIONS,
    DOWN_TASK,
    EXPERT_IDS,
    FFN_Q8_BYTES,
    GATE_UP_TASK,
    GROUP_STARTS,
    HIDDEN,
    HIDDEN_Q8_BYTES,
    HIDDEN_SIZE,
    NUM_EXPERTS,
    NUM_GROUPS,
    NUM_LAYER_WORDS,
    NUM_TOKENS,
    OUT,
    PAIR_Q8,
    QUANTISE_ACTIVATIONS_TASK,
    QUANTISE_HIDDEN_TASK,
    REGROUP_TASK,
    SCRATCH,
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
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import f32, f64, i64
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
    layer: I64Array,
    memory: tuple[int, ...],
    pool: int,
) -> bool:
    """Run all phases. False: the batch has expert ids, tokens or pairs out of range.

    Shapes: as the fields of experts_arguments; layer [NUM_LAYER_WORDS]. Memory: NUM_ARGUMENTS
    words, TOKEN_Q8, PAIR_Q8, ACTIVATIONS, ACTIVATION_Q8, SCRATCH and the counter.
    """
    num_groups, num_pairs = expert_ids.shape[0], token_indices.shape[0]
    # Cheap next to the products, and no bug of a caller makes a kernel read outside the mapping.
    if group_starts.shape[0] != num_groups + 1 or weights.shape[0] != num_pairs:
        return False
    if group_starts[0] != 0 or group_starts[num_groups] != num_pairs:
        return False
    for group in range(num_groups):
        if expert_ids[group] < 0 or expert_ids[group] >= layer[NUM_EXPERTS]:
            return False
        if group_starts[group] > group_starts[group + 1]:
            return False
    for pair in range(num_pairs):
        if token_indices[pair] < 0 or token_indices[pair] >= hidden.shape[0]:
            return False
    args, token_q8, pair_q8, activations, activation_q8, scratch, counter = memory
    v.copy_bytes(args, v.address_of(layer), 8 * NUM_LAYER_WORDS)
    v.store_i64(args + 8 * HIDDEN, v.address_of(hidden))
    v.store_i64(args + 8 * NUM_TOKENS, hidden.shape[0])
    v.store_i64(args + 8 * HIDDEN_SIZE, hidden.shape[1])
    v.store_i64(args + 8 * NUM_GROUPS, num_groups)
    v.store_i64(args + 8 * EXPERT_IDS, v.address_of(expert_ids))
    v.store_i64(args + 8 * GROUP_STARTS, v.address_of(group_starts))
    v.store_i64(args + 8 * TOKEN_INDICES, v.address_of(token_indices))
    v.store_i64(args + 8 * WEIGHTS, v.address_of(weights))
    v.store_i64(args + 8 * OUT, v.address_of(out))
    v.store_i64(args + 8 * TOKEN_Q8, token_q8 if layer[HIDDEN_Q8_BYTES] else 0)
    v.store_i64(args + 8 * PAIR_Q8, pair_q8)
    v.store_i64(args + 8 * ACTIVATIONS, activations)
    v.store_i64(args + 8 * ACTIVATION_Q8, activation_q8 if layer[FFN_Q8_BYTES] else 0)
    v.store_i64(args + 8 * SCRATCH, scratch)
    if layer[HIDDEN_Q8_BYTES]:
        few = hidden.shape[0] <= FEW_TOKENS
        run_on(0 if few else pool, layer[QUANTISE_HIDDEN_TASK], args, counter)
        if hidden.shape[0] > 1:
            run_region(pool, layer[REGROUP_TASK], args, counter)
    run_region(pool, layer[GATE_UP_TASK], args, counter)
    if layer[FFN_Q8_BYTES]:
        few = num_pairs <= FEW_PAIRS
        run_on(0 if few else pool, layer[QUANTISE_ACTIVATIONS_TASK], args, counter)
    run_region(pool, layer[DOWN_TASK], args, counter)
    return True


@cache
def expert_ffn_tasks() -> tuple[RowFunction, ...]:
    """The phases, in the order of their words, which hold their addresses."""
    phases = (quantise_hidden, regroup_hidden, gate_up, quantise_activations, down_phase)
    return tuple(compile_task(phase) for phase in phases)


@cache
def expert_ffn_kernel() -> Kernel:
    ids, memory = read_only(types.int32, 1), types.UniTuple(i64, 7)
    hidden, weights, out = read_only(f32, 2), read_only(f32, 1), f64[:, ::1]
    arrays = [hidden, ids, ids, ids, weights, out, read_only(i64, 1)]
    return compile_kernel(_expert_ffn, *arrays, memory, i64)
