"""Routing: choosing each token's experts.

A token's experts depend on its logits alone.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from dflash_adapters.routing import Gating, RoutingRule
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.cpu.compile.compiling import RowFunction, compile_task, helper
from dflash_runtime.compute.cpu.kernels.words import (
    FIRST_FIELD,
    Call,
    address,
    float_bits,
    get,
    task_call,
)
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.exponentials import exp_lanes, exp_scalar, softplus_lanes
from dflash_runtime.compute.cpu.threads.parallel import claim

TOKENS_AN_ITEM = 8

GATINGS = {gating: number for number, gating in enumerate(Gating)}
_SOFTMAX, _SIGMOID = GATINGS[Gating.SOFTMAX], GATINGS[Gating.SIGMOID]
_SOFTMAX_WEIGHT, _SQRT_SOFTPLUS = GATINGS[Gating.SOFTMAX_WEIGHT], GATINGS[Gating.SQRT_SOFTPLUS]

(
    _LOGITS,
    _BIAS,  # or 0
    _IDS,
    _WEIGHTS,
    _NUM_TOKENS,
    _NUM_EXPERTS,
    _NUM_USED,
    _SCRATCH,
    _GATING,
    _SELECTS_BY_LOGITS,
    _NUM_GROUPS,
    _NUM_GROUPS_USED,
    _NORMALISE,
    _SCALE_BITS,
) = range(FIRST_FIELD, FIRST_FIELD + 14)

# Markers, in descending order, all below any score that can be chosen: even for logits that are NaN
# or infinite valid expert ids are chosen, since they are used as indices.
_LOWEST, _UNUSED = np.float32(-3.1e38), np.float32(-3.2e38)
_TAKEN, _PADDING = np.float32(-3.3e38), np.float32(-3.4e38)
_SMALLEST_NORMAL_HALF = np.float32(6.103515625e-05)
_MINUS_INFINITY = np.float32(-np.inf)


def scratch_bytes(num_experts: int) -> int:
    """Scratch bytes of one thread."""
    return 12 * ((num_experts + 31) // 32 * 32)


@helper
def _softmax(values: int, padded: int) -> None:
    """In place; also over the padding, whose values are minus infinity."""
    highest = v.splat(_MINUS_INFINITY)
    for place in range(values, values + 4 * padded, 128):
        highest = v.maximum(v.load_floats(place), highest)
    shift, total = v.splat(v.largest_of(highest)), v.zeros()
    for place in range(values, values + 4 * padded, 128):
        term = exp_lanes(v.load_floats(place) - shift)
        v.store_floats(place, term)
        total = total + term
    total = v.splat(v.sum_of(total))
    for place in range(values, values + 4 * padded, 128):
        v.store_floats(place, v.load_floats(place) / total)


@helper
def _score(args: int, logits: int, scores: int, selection: int) -> None:
    """Scores of one token. Shapes: logits [E]; scores, selection [E padded]."""
    num_experts, gating, bias = get(args, _NUM_EXPERTS), get(args, _GATING), get(args, _BIAS)
    padded = (num_experts + 31) // 32 * 32
    for expert in range(0, padded, 32):
        rest = num_experts - expert
        if rest >= 32:
            logit = v.load_floats(logits + 4 * expert)
        else:
            logit = v.pad(v.load_padded(logits + 4 * expert, rest), rest, _MINUS_INFINITY)
        v.store_floats(selection + 4 * expert, logit)
        if gating == _SIGMOID:
            logit = v.splat(1.0) / (v.splat(1.0) + exp_lanes(v.zeros() - logit))
        elif gating == _SQRT_SOFTPLUS:
            logit = v.square_root(softplus_lanes(logit))
        v.store_floats(scores + 4 * expert, logit)
    if gating == _SOFTMAX:
        _softmax(scores, padded)
    for expert in range(0, padded, 32):
        rest = num_experts - expert
        source = selection if get(args, _SELECTS_BY_LOGITS) != 0 else scores
        score = v.load_floats(source + 4 * expert)
        if bias != 0:
            score = score + v.load_padded(bias + 4 * expert, min(rest, 32))
        score = v.maximum(score, v.splat(_LOWEST))  # also instead of a NaN
        v.store_floats(selection + 4 * expert, v.pad(score, rest, _PADDING))


@helper
def _highest(values: int, padded: int) -> int:
    """Index of the highest value, the first of equal ones."""
    best = v.load_floats(values)
    for place in range(values + 128, values + 4 * padded, 128):
        best = v.maximum(best, v.load_floats(place))
    best_value, index = v.largest_of(best), 0
    lane = v.first_equal(v.load_floats(values), best_value)
    while lane == 32:
        index += 32
        lane = v.first_equal(v.load_floats(values + 4 * index), best_value)
    return index + lane  # type: ignore[no-any-return]


@helper
def _drop_groups(args: int, selection: int, group_scores: int) -> None:
    """Mark the experts of all but the best groups as unused.

    Shapes: group_scores [groups padded].
    """
    num_groups, num_used = get(args, _NUM_GROUPS), get(args, _NUM_GROUPS_USED)
    size, padded = get(args, _NUM_EXPERTS) // num_groups, (num_groups + 31) // 32 * 32
    for group in range(padded):
        first, second = _PADDING, np.float32(0)
        if group < num_groups:
            place = selection + 4 * size * group
            first, second = v.load_float(place), _LOWEST if size > 1 else np.float32(0)
            for index in range(1, size):
                value = v.load_float(place + 4 * index)
                if value > first:
                    first, second = value, first
                elif value > second:
                    second = value
        # The sum of two lowest values overflows.
        v.store_float(group_scores + 4 * group, max(first + second, _PADDING))
    for _ in range(num_used):
        v.store_float(group_scores + 4 * _highest(group_scores, padded), _MINUS_INFINITY)
    for group in range(num_groups):
        if v.load_float(group_scores + 4 * group) != _MINUS_INFINITY:
            for index in range(size * group, size * (group + 1)):
                v.store_float(selection + 4 * index, _UNUSED)


@helper
def _route_token(args: int, logits: int, scratch: int, ids: int, out: int) -> None:
    """Choose the best remaining expert K times.

    Scratch: scores, selection scores, group scores, each [E padded].
    """
    num_experts, num_used = get(args, _NUM_EXPERTS), get(args, _NUM_USED)
    padded = (num_experts + 31) // 32 * 32
    left = scratch + 4 * padded
    _score(args, logits, scratch, left)
    if get(args, _NUM_GROUPS) > 1:
        _drop_groups(args, left, left + 4 * padded)
    for rank in range(num_used):
        expert = _highest(left, padded)
        v.store_float(left + 4 * expert, _TAKEN)
        v.store_i32(ids + 4 * rank, expert)
        v.store_float(out + 4 * rank, v.load_float(scratch + 4 * expert))
    if get(args, _GATING) == _SOFTMAX_WEIGHT:
        _softmax_of_few(out, num_used)
    total = np.float32(0)
    for rank in range(num_used):
        total += v.load_float(out + 4 * rank)
    scale = v.float_from_bits(get(args, _SCALE_BITS))
    for rank in range(num_used):
        share = v.load_float(out + 4 * rank)
        if get(args, _NORMALISE) != 0:
            share /= max(total, _SMALLEST_NORMAL_HALF)
        v.store_float(out + 4 * rank, share * scale)


@helper
def _softmax_of_few(values: int, count: int) -> None:
    highest, total = _MINUS_INFINITY, np.float32(0)
    for index in range(count):
        highest = max(highest, v.load_float(values + 4 * index))
    for index in range(count):
        term = exp_scalar(v.load_float(values + 4 * index) - highest)
        v.store_float(values + 4 * index, term)
        total += term
    for index in range(count):
        v.store_float(values + 4 * index, v.load_float(values + 4 * index) / total)


def _route_task(args: int, counter: int, worker_idx: int) -> None:
    num_tokens, num_experts = get(args, _NUM_TOKENS), get(args, _NUM_EXPERTS)
    num_used = get(args, _NUM_USED)
    scratch = get(args, _SCRATCH) + worker_idx * 12 * ((num_experts + 31) // 32 * 32)
    while True:
        first = claim(counter) * TOKENS_AN_ITEM
        if first >= num_tokens:
            return
        for token in range(first, min(first + TOKENS_AN_ITEM, num_tokens)):
            chosen = 4 * num_used * token
            _route_token(
                args,
                get(args, _LOGITS) + 4 * num_experts * token,
                scratch,
                get(args, _IDS) + chosen,
                get(args, _WEIGHTS) + chosen,
            )


def route_call(
    logits: F32Array,
    rule: RoutingRule,
    bias: F32Array | None,
    ids: I32Array,
    weights: F32Array,
    *,
    num_threads: int,
) -> Call:
    """Shapes: logits [T, E]; bias [E]; ids, weights [T, K]."""
    num_tokens, num_experts = logits.shape
    num_used = rule.num_experts_used
    fields = [
        address(logits),
        0 if bias is None else address(bias),
        address(ids, np.int32),
        address(weights),
        num_tokens,
        num_experts,
        num_used,
        0,
        GATINGS[rule.gating],
        rule.selects_by_logits,
        rule.num_groups,
        rule.num_groups_used,
        rule.normalise,
        float_bits(rule.scale),
    ]
    return task_call(
        route_task(),
        num_used * logits.size,
        fields,
        per_token=(_NUM_TOKENS,),
        scratch=((_SCRATCH, num_threads * scratch_bytes(num_experts)),),
    )


@cache
def route_task() -> RowFunction:
    return compile_task(_route_task)
