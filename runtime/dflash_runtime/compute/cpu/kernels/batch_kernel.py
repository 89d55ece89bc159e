"""Experts of a batch that compiled code has in words: what a daemon's ring calls.

The function is `compute` of `ring.compiled_experts`: it completes the words of a layer with those
of a batch, and runs the phases of `experts_kernel`.
"""

from __future__ import annotations

from functools import cache

from dflash_protocol.ids import Phase
from dflash_protocol.ring import compiled_experts as ring
from dflash_protocol.transports.ports import PHASES
from dflash_runtime.compute.cpu.compile.compiling import RowFunction
from dflash_runtime.compute.cpu.kernels import experts_kernel as k
from dflash_runtime.compute.cpu.kernels.words import get
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import i64
from dflash_runtime.compute.cpu.threads.parallel import begin_pass

_PREFILL = PHASES.index(Phase.PREFILL)

# Words of a layer: addresses, then those of experts_kernel, complete but for a batch's.
POOL, COUNTER, ARGUMENTS = range(3)
NUM_WORDS = ARGUMENTS + k.NUM_ARGUMENTS


def _compute_batch(experts: int, batch: int) -> int:
    """Called by one thread at a time. 1, or 0: the batch is not sound."""
    args = experts + 8 * ARGUMENTS
    v.store_i64(args + 8 * k.HIDDEN, get(batch, ring.BATCH_HIDDEN))
    v.store_i64(args + 8 * k.NUM_TOKENS, get(batch, ring.BATCH_TOKENS))
    v.store_i64(args + 8 * k.NUM_GROUPS, get(batch, ring.BATCH_GROUPS))
    v.store_i64(args + 8 * k.EXPERT_IDS, get(batch, ring.BATCH_EXPERT_IDS))
    v.store_i64(args + 8 * k.GROUP_STARTS, get(batch, ring.BATCH_GROUP_STARTS))
    v.store_i64(args + 8 * k.TOKEN_INDICES, get(batch, ring.BATCH_TOKEN_INDICES))
    v.store_i64(args + 8 * k.WEIGHTS, get(batch, ring.BATCH_WEIGHTS))
    v.store_i64(args + 8 * k.OUT, get(batch, ring.BATCH_SUMS))
    v.store_i64(args + 8 * k.IS_STEP, get(batch, ring.BATCH_PHASE) != _PREFILL)
    begin_pass(get(experts, POOL), get(batch, ring.BATCH_TOKENS))
    is_sound: int = k.run_experts(args, get(experts, COUNTER), get(experts, POOL))
    return is_sound


@cache
def compute_batch_function() -> RowFunction:
    return RowFunction(_compute_batch, i64, i64, result=i64)
