"""Replays a trace through LFU whose half-life follows what is chosen, as the processor's arena does
(compute/half_lives.py): all half-lives are tried, and the one that decides is that of the fewest
misses of late, if it gains enough.

The functions are plain Python, and may be compiled. Shapes: `misses` [N, H] of all layers by token
and half-life; `uses` [H, E], `weights` [H] what a use counts now; other arrays as in policies.py.
"""

from __future__ import annotations

import numpy as np

from dflash_protocol.ids import F64Array, I32Array, I64Array, U8Array
from dflash_runtime.compute.half_lives import FIRST, HALF_LIVES, LEAST_GAIN, LEAST_TOKENS, WINDOW
from dflash_runtime.placement.cache import policies as p

AUTO = "auto"
"""The policy's name."""

_NUM_KINDS = len(HALF_LIVES)
_GROWTHS = tuple(2.0 ** (1.0 / each) for each in HALF_LIVES)

# simulation.py substitutes compiled ones.
_victim, _is_kept = p.victim, p.is_kept


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


def replay_adaptive(
    ids: I32Array,
    deciding: I64Array,
    num_slots: int,
    place: U8Array,
    last_use: I64Array,
    is_pinned: U8Array,
    uses: F64Array,
    hits: U8Array,
    brought: U8Array,
) -> None:
    """Write hits and brought [N, K], 1 or 0, of one layer that is empty at first."""
    num_tokens, num_used = ids.shape
    weights, num_there = np.ones(_NUM_KINDS), 0
    for token in range(num_tokens):
        of_kind = uses[deciding[token]]
        for k in range(num_used):
            expert = ids[token, k]
            hits[token, k] = place[expert] != p.ABSENT
            brought[token, k] = 0
            last_use[expert] = token
            for kind in range(_NUM_KINDS):
                uses[kind, expert] += weights[kind]
        for k in range(num_used):
            expert = ids[token, k]
            if place[expert] != p.ABSENT:
                continue
            if num_there < num_slots:
                num_there += 1
            else:
                leaving = _victim(p.LFU, token, place, last_use, of_kind, is_pinned)
                if not _is_kept(p.LFU, expert, leaving, 0.0, of_kind):
                    continue
                place[leaving] = p.ABSENT
            place[expert] = p.PROBATION
            brought[token, k] = 1
        for kind in range(_NUM_KINDS):
            weights[kind] *= _GROWTHS[kind]
            if weights[kind] > p.LARGEST_WEIGHT:
                uses[kind] /= weights[kind]
                weights[kind] = 1.0
