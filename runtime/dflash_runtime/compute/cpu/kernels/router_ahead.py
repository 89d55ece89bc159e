"""Which experts the next layer will probably choose, before it is computed.

A layer changes the residual little, so that the next layer's router chooses, from this layer's
normalised rows, mostly what it will choose from its own: 0.82 to 0.88 of a token's experts in the
trained demo models (tests/runtime/compute/cpu/test_router_ahead.py).
"""

from __future__ import annotations

import math

from dflash_runtime.compute.cpu.compile.compiling import helper
from dflash_runtime.compute.cpu.kernels.words import get
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import LANES

(
    ROWS, BIAS, USES_SIGMOID, NUM_ROUTED, HIDDEN_SIZE, NUM_USED, LOCAL_IDS, SCORES, LIKELY, COUNTS,
) = range(10)  # fmt: skip
"""Words of a router: its rows, [E, H] bfloat16; what is added to scores, [E] float32; whether
scores are sigmoids of logits; E; H, a multiple of LANES; experts of a token; local ids of the next
layer's experts, [E] int64, negative for those of other owners; scores, [E] float64, the local ids
that are found, [NUM_USED] int64, and for how many of several tokens each was, [E] int64, by local
id, which are written."""
ROUTER_WORDS = 10

_MOST_ROWS = 128


@helper
def _logit(row: int, hidden: int, num_columns: int) -> float:
    total = v.zeros()
    for column in range(0, num_columns, LANES):
        weights = v.load_bfloats(row + 2 * column)
        total = v.fma(weights, v.load_floats(hidden + 4 * column), total)
    return v.widen(v.sum_of(total))  # type: ignore[no-any-return]


@helper
def find_likely(router: int, hidden: int) -> int:
    """Write the local ids that a token's row makes likely, the likeliest first; returns how many.
    Experts of other owners are left out. Shapes: hidden [H] float32."""
    num_routed, num_columns = get(router, NUM_ROUTED), get(router, HIDDEN_SIZE)
    scores, likely, num_likely = get(router, SCORES), get(router, LIKELY), 0
    for expert in range(num_routed):
        score = _logit(get(router, ROWS) + 2 * num_columns * expert, hidden, num_columns)
        if get(router, USES_SIGMOID) != 0:
            score = 1.0 / (1.0 + math.exp(min(-score, 80.0)))
        score += v.widen(v.load_float(get(router, BIAS) + 4 * expert))
        v.store_double(scores + 8 * expert, score)
    for _ in range(get(router, NUM_USED)):
        best, highest = -1, -math.inf
        for expert in range(num_routed):
            score = v.load_double(scores + 8 * expert)
            if score > highest:
                best, highest = expert, score
        if best < 0:  # the row is not finite
            return num_likely
        v.store_double(scores + 8 * best, -math.inf)
        local = v.load_i64(get(router, LOCAL_IDS) + 8 * best)
        if local >= 0:
            v.store_i64(likely + 8 * num_likely, local)
            num_likely += 1
    return num_likely


@helper
def count_likely(router: int, hidden: int, num_tokens: int) -> None:
    """Write for how many of several tokens each expert is likely; of many tokens some are looked
    at. Shapes: hidden [T, H] float32."""
    counts, stride = get(router, COUNTS), (num_tokens + _MOST_ROWS - 1) // _MOST_ROWS
    for expert in range(get(router, NUM_ROUTED)):
        v.store_i64(counts + 8 * expert, 0)
    for token in range(0, num_tokens, stride):
        num_likely = find_likely(router, hidden + 4 * get(router, HIDDEN_SIZE) * token)
        for rank in range(num_likely):
            place = counts + 8 * v.load_i64(get(router, LIKELY) + 8 * rank)
            v.store_i64(place, v.load_i64(place) + 1)
