"""Replays a trace through the slots of steps: a GPU's decode steps keep experts there besides
those that live there, and the processor computes what is in neither.

The rule is that of the kernel (``decide_fetch`` in gpu/kernels/mailbox/mailbox_post.cuh), in
float32: of the experts of a token that are not there, the second one, in the order of the choice,
is read over the bus. It stays in an empty slot, or in that of the least used expert that this
token does not use, of equals the first slot, if it was used more, by a margin. Uses count half
after a half-life. Tokens of prompts do not look into slots; drafts do. Here they change nothing, as
a trace does not say which of them were in one step; on a GPU each of their steps is one use, and
fetches, too.

A GPU may contract products and sums, and so round uses otherwise in the last bit.

The functions work on one layer's arrays: ``place`` [E] uint8, see policies.py: PROTECTED experts
live there, those on PROBATION are in slots; ``slots`` [M] int32 experts, negative: empty;
``scores`` [E] float32 uses. They are plain Python, and may be compiled.
"""

from __future__ import annotations

import numpy as np

from dflash_protocol.ids import F32Array, I32Array, Phase, U8Array
from dflash_runtime.placement.cache import policies as p
from dflash_runtime.placement.cache.traces import PHASES

_ONE = np.float32(1.0)
_PROMPT, _STEP = PHASES.index(Phase.PREFILL), PHASES.index(Phase.DECODE)


def slot_of(
    expert: int, chosen: I32Array, slots: I32Array, scores: F32Array, rates: F32Array
) -> int:
    """The slot that an expert which is read for a token gets, -1: it is not kept. Shapes: chosen
    [K]; rates [2]: by how much less a use counts with each token, and the margin."""
    best = -1
    least, least_order = -_ONE, -_ONE
    for slot in range(slots.size):
        kept = slots[slot]
        is_used = False
        for k in range(chosen.size):
            is_used |= kept >= 0 and chosen[k] == kept
        if is_used:
            continue
        worth = -_ONE
        if kept >= 0:
            worth = rates[0] * scores[kept]
        # As the kernel orders them: what differs by less than float32 has beyond 1 is equal.
        order = worth + _ONE
        if best < 0 or order < least_order:
            best, least, least_order = slot, worth, order
    if best < 0:
        return -1
    wanted = rates[0] * scores[expert] + _ONE
    return best if slots[best] < 0 or wanted > least + rates[1] else -1


# simulation.py substitutes a compiled one.
_slot_of = slot_of


def replay_steps(
    ids: I32Array,
    phases: U8Array,
    rates: F32Array,
    place: U8Array,
    slots: I32Array,
    scores: F32Array,
    hits: U8Array,
    brought: U8Array,
) -> None:
    """Writes hits and brought [N, K], 1 or 0. Shapes: ids [N, K]; phases [N], see traces.py; rates:
    see `slot_of`."""
    num_tokens, num_used = ids.shape
    for token in range(num_tokens):
        num_missing, second = 0, -1
        for k in range(num_used):
            where = place[ids[token, k]]
            hits[token, k] = where == p.PROTECTED or (
                where != p.ABSENT and phases[token] != _PROMPT
            )
            brought[token, k] = 0
            if where == p.ABSENT:
                num_missing += 1
                if num_missing == 2:
                    second = k
        if phases[token] != _STEP:
            continue
        if second >= 0:
            expert = ids[token, second]
            brought[token, second] = 1
            slot = _slot_of(expert, ids[token], slots, scores, rates)
            if slot >= 0:
                if slots[slot] >= 0:
                    place[slots[slot]] = p.ABSENT
                slots[slot], place[expert] = expert, p.PROBATION
        for expert in range(scores.size):
            scores[expert] *= rates[0]
        for k in range(num_used):
            scores[ids[token, k]] += _ONE
