"""Arguments of the expert FFN's phases, and how they find a group's pairs and matrices.

Addresses, except where the unit or the comment says otherwise.
"""

from __future__ import annotations

from dflash_runtime.compute.cpu.compile.compiling import helper
from dflash_runtime.compute.cpu.kernels.words import get
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.weights.matrix import NUM_FIELDS
from dflash_runtime.compute.cpu.weights.rows import ROW_BYTES

(
    # A layer's experts.
    NUM_EXPERTS,
    FFN_SIZE,
    ADDRESSES,  # [E, 3] int64: matrices of gate, up, down
    LAYOUTS,  # [3, NUM_FIELDS] int64
    SCALES,  # [E, 3] float32, or 0
    BIASES,  # [E, 3] int64: addresses, or 0; or 0 for all
    ACTIVATION,  # [3] float32: limit, alpha, offset of up
    HIDDEN_Q8_BYTES,  # of a row of hidden as q8 blocks, or 0 if none are needed
    FFN_Q8_BYTES,  # of a row of activations as q8 blocks, or 0 if none are needed
    SCRATCH_BYTES,  # of one thread
    QUANTISE,  # the function, and the phases
    QUANTISE_HIDDEN_TASK,
    REGROUP_TASK,
    GATE_UP_TASK,
    QUANTISE_ACTIVATIONS_TASK,
    DOWN_TASK,
    # A call and its scratch memory.
    HIDDEN,  # [T, H] float32
    NUM_TOKENS,
    HIDDEN_SIZE,
    NUM_GROUPS,
    EXPERT_IDS,  # [G] int32, local
    GROUP_STARTS,  # [G + 1] int32
    TOKEN_INDICES,  # [P] int32
    WEIGHTS,  # [P] float32
    OUT,  # [T, H] float64
    TOKEN_Q8,  # [T] rows of hidden as q8 blocks, or 0
    PAIR_Q8,  # [P] the same grouped by expert; unused for a single token
    ACTIVATIONS,  # [P, F] float32
    ACTIVATION_Q8,  # [P] rows of activations as q8 blocks, or 0
    SCRATCH,  # [threads, SCRATCH_BYTES]
) = range(30)

NUM_ARGUMENTS = 30
NUM_LAYER_WORDS = HIDDEN

GATE, UP, DOWN = range(3)


@helper
def pair_range(args: int, group: int) -> tuple[int, int]:
    starts = get(args, GROUP_STARTS) + 4 * group
    return v.load_i32(starts), v.load_i32(starts + 4)


@helper
def matrix_of(args: int, group: int, projection: int) -> tuple[int, int, int]:
    """Address, layout and bytes per row of an expert's matrix."""
    expert = v.load_i32(get(args, EXPERT_IDS) + 4 * group)
    layout = get(args, LAYOUTS) + 8 * NUM_FIELDS * projection
    address = v.load_i64(get(args, ADDRESSES) + 8 * (3 * expert + projection))
    return address, layout, v.load_i64(layout + 8 * ROW_BYTES)
