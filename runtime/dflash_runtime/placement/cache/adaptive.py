"""Replays a trace as the processor's arena does: through LFU whose half-life follows what is chosen
(compute/half_lives.py): all half-lives are tried, and the one that decides is that of the fewest
misses of late, if it gains enough.

The functions are plain Python, and may be compiled. Shapes: `misses` [N, H] of all layers by token
and half-life.
"""

from __future__ import annotations

import math

import numpy as np

from dflash_protocol.ids import F64Array, I32Array, I64Array, U8Array
from dflash_runtime.compute.half_lives import (
    FIRST,
    HALF_LIVES,
    LEAST_GAIN,
    LEAST_TOKENS,
    OLDEST,
    RATES,
    SOON,
    WINDOW,
)

AUTO = "auto"
"""The policy's name."""

_NUM_KINDS = len(HALF_LIVES)


def decide(misses: F64Array, deciding: I64Array) -> None:
    """Write which half-life decides at each token. Shapes: deciding [N]."""
    averages = np.zeros(_NUM_KINDS)
    present = FIRST
    for token in range(len(misses)):
        deciding[token] = present
        best = present
        for kind in range(_NUM_KINDS):
            averages[kind] += (misses[token, kind] - averages[kind]) / WINDOW
            if averages[kind] < averages[best]:
                best = kind
        is_known = token + 1 >= LEAST_TOKENS
        if is_known and averages[best] < (1.0 - LEAST_GAIN) * averages[present]:
            present = best


def replay_pool(
    ids: I32Array,
    first_columns: I64Array,
    layer_of: I64Array,
    deciding: I64Array,
    slot_of: I64Array,
    held: I64Array,
    used_at: I64Array,
    keys: F64Array,
    hits: U8Array,
) -> None:
    """Write hits [N, K], 1 or 0, of all layers, for which there is one pool of slots, empty at
    first. What is not there always comes.

    A use counts 2 ** (token / half-life), of which a key is the logarithm. Shapes: ids [N, K] of
    all layers, numbered from one to the next; first_columns [L + 1] of each; held [S] the expert of
    each slot, or -1; layer_of, slot_of, used_at [E], the last by numbers of layers that have
    computed; keys [H, E].
    """
    num_layers, num_there = first_columns.size - 1, 0
    for token in range(ids.shape[0]):
        for layer in range(num_layers):
            batch = num_layers * token + layer + 1
            # The last layer of a step decides before its own experts come.
            deciding_at = token + 1 if layer + 1 == num_layers else token
            kind = deciding[min(deciding_at, ids.shape[0] - 1)]
            first, end = first_columns[layer], first_columns[layer + 1]
            for k in range(first, end):
                expert = ids[token, k]
                hits[token, k] = slot_of[expert] >= 0
                used_at[expert] = batch
                for each in range(_NUM_KINDS):
                    now = RATES[each] * (token + 1)
                    before = keys[each, expert] - now
                    uses = math.exp(before) if before > -OLDEST else 0.0
                    keys[each, expert] = now + math.log(1.0 + uses)
            for k in range(first, end):
                expert = ids[token, k]
                if slot_of[expert] >= 0:
                    continue
                slot = num_there
                if num_there < held.size:
                    num_there += 1
                else:
                    slot, least = -1, math.inf
                    for other in range(held.size):
                        there = held[other]
                        if used_at[there] == batch:
                            continue
                        since = layer - layer_of[there]  # layers, of which the last was its own
                        calls = token + 1 if since >= 0 else token
                        key = max(-OLDEST, keys[kind, there] - RATES[kind] * calls)
                        key += SOON * (since % num_layers) / num_layers
                        if key < least:
                            slot, least = other, key
                    slot_of[held[slot]] = -1
                held[slot], slot_of[expert] = expert, slot
