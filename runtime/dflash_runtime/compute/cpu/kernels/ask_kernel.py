"""A layer's routed experts, asked for by compiled code: of banks here and of daemons.

Splits a layer's pairs among their owners, posts a request to every daemon that has any, computes
what is here meanwhile, and adds the replies; the host does the same in `experts.runtime`, with the
same bits. It waits for at most a slice, and is then to be called again. After a failure, the words
of the step say what it was, and every further call of the step returns at once: the host gives the
slots back and computes the step again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from dflash_protocol.ring import compiled as ring
from dflash_protocol.ring import compiled_experts as w
from dflash_runtime.compute.cpu.compile.compiling import RowFunction, compile_task, helper
from dflash_runtime.compute.cpu.kernels.words import get, set_word
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import I64, i64, primitive
from dflash_runtime.compute.cpu.simd.untyped import ir

# Words of a layer: addresses, except where the comment says otherwise.
(
    STEP,  # the words below
    NUM_TOKENS,  # number
    NUM_USED,  # number of experts of each token
    HIDDEN,  # [T, H] float32
    HIDDEN_SIZE,  # number
    TOPK_IDS,  # [T, K] int32, global
    TOPK_WEIGHTS,  # [T, K] float32
    SELECTIONS,  # [E] int64, by global id: incremented
    OWNERS_OF,  # [E] int32, by global id: index of an owner
    LOCAL_IDS,  # [E] int32, by global id
    NUM_OWNERS,  # number
    OWNERS,  # [owners, OWNER_WORDS], in the order in which their sums are added
    SUMS,  # [T, H] float64
    ROUNDED,  # [T, H] float32: the result
    POST,  # functions of the ring
    COLLECT,
    NUM_COLLECTED,  # number of owners whose sums were added; 0 when the layer begins
    NUM_WORDS,
) = range(18)

# Of an owner.
(
    PORT,  # of a lent slot; 0: the experts are here
    COMPUTE,  # of experts here: as in `ring.compiled_experts`
    EXPERTS,
    REQUEST,  # REQUEST_WORDS, with addresses of arrays for T * K pairs
    OWNER_WORDS,
) = range(5)

# Of a step, which all its layers share.
(
    IS_WAITING,  # 1: call the same layer again
    FAILURE,  # status of `post` or `collect`, or 0
    FAILED_OWNER,  # index
    STEP_WORDS,
) = range(4)


@primitive(i64, i64, i64, i64)
def _call(builder: Any, function: Any, first: Any, second: Any) -> Any:
    """Call ``int64 function(int64, int64)`` at an address."""
    kind = ir.FunctionType(I64, [I64, I64])
    return builder.call(builder.inttoptr(function, kind.as_pointer()), [first, second])


@helper
def _owner(args: int, index: int) -> int:
    return get(args, OWNERS) + 8 * OWNER_WORDS * index  # type: ignore[no-any-return]


@helper
def _group(args: int, index: int) -> int:
    """Write an owner's batch, grouped by local expert id in the order of a stable sort; returns the
    number of its pairs."""
    batch, num_used = get(_owner(args, index), REQUEST), get(args, NUM_USED)
    ids, starts = get(batch, w.BATCH_EXPERT_IDS), get(batch, w.BATCH_GROUP_STARTS)
    tokens, weights = get(batch, w.BATCH_TOKEN_INDICES), get(batch, w.BATCH_WEIGHTS)
    num_pairs = 0
    for pair in range(get(args, NUM_TOKENS) * num_used):
        chosen = v.load_i32(get(args, TOPK_IDS) + 4 * pair)
        if v.load_i32(get(args, OWNERS_OF) + 4 * chosen) == index:
            expert = v.load_i32(get(args, LOCAL_IDS) + 4 * chosen)
            place = num_pairs
            # An insertion sort, of few pairs; `starts` holds each pair's expert meanwhile.
            while place > 0 and v.load_i32(starts + 4 * (place - 1)) > expert:
                v.store_i32(starts + 4 * place, v.load_i32(starts + 4 * (place - 1)))
                v.store_i32(tokens + 4 * place, v.load_i32(tokens + 4 * (place - 1)))
                v.store_float(weights + 4 * place, v.load_float(weights + 4 * (place - 1)))
                place -= 1
            v.store_i32(starts + 4 * place, expert)
            v.store_i32(tokens + 4 * place, pair // num_used)
            weight = v.load_float(get(args, TOPK_WEIGHTS) + 4 * pair)
            v.store_float(weights + 4 * place, weight)
            num_pairs += 1
    num_groups, last = 0, -1
    for pair in range(num_pairs):
        expert = v.load_i32(starts + 4 * pair)
        if expert != last:
            v.store_i32(ids + 4 * num_groups, expert)
            v.store_i32(starts + 4 * num_groups, pair)
            num_groups += 1
            last = expert
    v.store_i32(starts + 4 * num_groups, num_pairs)
    set_word(batch, w.BATCH_TOKENS, get(args, NUM_TOKENS))
    set_word(batch, w.BATCH_GROUPS, num_groups)
    set_word(batch, w.BATCH_PAIRS, num_pairs)
    set_word(batch, w.BATCH_HIDDEN, get(args, HIDDEN))
    return num_pairs


@helper
def _fail(args: int, index: int, status: int) -> None:
    set_word(get(args, STEP), FAILED_OWNER, index)
    set_word(get(args, STEP), FAILURE, status)


@helper
def _begin(args: int) -> None:
    """Post every daemon's request, then compute what is here."""
    for pair in range(get(args, NUM_TOKENS) * get(args, NUM_USED)):
        counted = get(args, SELECTIONS) + 8 * v.load_i32(get(args, TOPK_IDS) + 4 * pair)
        v.store_i64(counted, v.load_i64(counted) + 1)
    for place in range(get(args, NUM_TOKENS) * get(args, HIDDEN_SIZE)):
        v.store_double(get(args, SUMS) + 8 * place, 0.0)
    for index in range(get(args, NUM_OWNERS)):
        owner = _owner(args, index)
        request = get(owner, REQUEST)
        if _group(args, index) > 0 and get(owner, PORT) != 0:
            set_word(request, w.REQUEST_OUT, get(args, SUMS))
            status = _call(get(args, POST), get(owner, PORT), request)
            if status < 0:
                _fail(args, index, status)
                return
    for index in range(get(args, NUM_OWNERS)):
        owner = _owner(args, index)
        request = get(owner, REQUEST)
        if get(owner, PORT) == 0 and get(request, w.BATCH_PAIRS) > 0:
            set_word(request, w.BATCH_SUMS, get(args, SUMS))
            if _call(get(owner, COMPUTE), get(owner, EXPERTS), request) == 0:
                _fail(args, index, ring.UNSENT)
                return


def _ask(args: int, counter: int, pool: int) -> None:
    """Called again while IS_WAITING. Experts here are computed by the threads of their own words,
    so that `counter` and `pool` are unused."""
    step, num_owners = get(args, STEP), get(args, NUM_OWNERS)
    if get(step, FAILURE) != 0:
        return
    index = get(args, NUM_COLLECTED)
    if get(step, IS_WAITING) == 0:
        index = 0
        _begin(args)
    set_word(step, IS_WAITING, 0)
    while index < num_owners and get(step, FAILURE) == 0:
        owner = _owner(args, index)
        request = get(owner, REQUEST)
        if get(owner, PORT) != 0 and get(request, w.BATCH_PAIRS) > 0:
            status = _call(get(args, COLLECT), get(owner, PORT), request)
            if status == ring.NOTHING:
                set_word(args, NUM_COLLECTED, index)
                set_word(step, IS_WAITING, 1)
                return
            if status < 0:
                _fail(args, index, status)
        index += 1
    for place in range(get(args, NUM_TOKENS) * get(args, HIDDEN_SIZE)):
        total = np.float32(v.load_double(get(args, SUMS) + 8 * place))
        v.store_float(get(args, ROUNDED) + 4 * place, total)


@cache
def ask_function() -> RowFunction:
    """``ask(args, counter, pool)``, which threads must not run at the same time."""
    return compile_task(_ask)
