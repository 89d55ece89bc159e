"""Which half-life finds most: an arena's keys of experts, and its shadows.

A use of an expert counts 2 ** (its layer's call / half-life), of which a key is the logarithm, so
that keys of experts that are not used need no change. There are keys for several half-lives
(compute/half_lives.py), one of which decides what leaves. Each has a shadow: the experts of a layer
that it would keep, if it had its share of the slots. What shadows miss in steps says which
half-life is used. One more shadow has twice as many, to tell what more memory would bring.
"""

from __future__ import annotations

import math

from dflash_runtime.compute.cpu.compile.compiling import helper
from dflash_runtime.compute.cpu.kernels import arena_words as w
from dflash_runtime.compute.cpu.kernels import experts_kernel as k
from dflash_runtime.compute.cpu.kernels.words import get
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.half_lives import (
    HALF_LIVES,
    LEAST_GAIN,
    LEAST_TOKENS,
    OLDEST,
    RATES,
    WINDOW,
)

_NUM_KINDS = len(HALF_LIVES)
TWICE, NUM_CHOSEN = _NUM_KINDS, _NUM_KINDS + 1
"""Beside the half-lives: the shadow with twice the slots; the number of experts that are chosen."""


@helper
def note_use(layer: int, expert: int) -> None:
    """Count a use in all keys."""
    for kind in range(_NUM_KINDS):
        place, now = w.key_at(layer, kind, expert), RATES[kind] * get(layer, w.NUM_CALLS)
        before = v.load_double(place) - now
        if before > OLDEST:
            continue
        key = now
        if before > -OLDEST:
            key += math.log(1.0 + math.exp(before))
        v.store_double(place, key)


@helper
def _leaving_shadow(layer: int, shadow: int, kind: int, call: int) -> int:
    """The expert that leaves a shadow first; negative if this batch chose all of them."""
    leaving, least = -1, math.inf
    for expert in range(get(layer, w.NUM_EXPERTS)):
        if v.load_i64(get(layer, w.SHADOWS) + 8 * expert) >> shadow & 1 == 0:
            continue
        key = v.load_double(w.key_at(layer, kind, expert))
        if key < least and v.load_i64(get(layer, w.CHOSEN_AT) + 8 * expert) != call:
            leaving, least = expert, key
    return leaving


@helper
def _drop_from_shadow(layer: int, shadow: int, expert: int) -> None:
    place, size_at = get(layer, w.SHADOWS) + 8 * expert, get(layer, w.SHADOW_SIZES) + 8 * shadow
    v.store_i64(place, v.load_i64(place) & ~(1 << shadow))
    v.store_i64(size_at, v.load_i64(size_at) - 1)


@helper
def _missed_by_shadow(args: int, layer: int, shadow: int, kind: int, num_slots: int) -> int:
    """How many of a step's experts a shadow does not keep; it keeps them from now on, if they were
    used more than those that leave."""
    num_missed, call = 0, get(get(layer, w.ARENA), w.CALL)
    size_at = get(layer, w.SHADOW_SIZES) + 8 * shadow
    for group in range(get(args, k.NUM_GROUPS)):
        expert = w.expert_of(args, group)
        place = get(layer, w.SHADOWS) + 8 * expert
        if v.load_i64(place) >> shadow & 1 != 0:
            continue
        num_missed += 1
        key = v.load_double(w.key_at(layer, kind, expert))
        while v.load_i64(size_at) >= num_slots:  # more than once where there are fewer slots now
            leaving = _leaving_shadow(layer, shadow, kind, call)
            if leaving < 0:
                break
            is_last = v.load_i64(size_at) == num_slots
            if is_last and key <= v.load_double(w.key_at(layer, kind, leaving)):
                break
            _drop_from_shadow(layer, shadow, leaving)
        if v.load_i64(size_at) < num_slots:
            v.store_i64(place, v.load_i64(place) | 1 << shadow)
            v.store_i64(size_at, v.load_i64(size_at) + 1)
    return num_missed


@helper
def compare_half_lives(args: int, layer: int) -> None:
    """Count what shadows miss in a step; after its last layer, use the half-life that misses least,
    if it gains enough."""
    arena = get(layer, w.ARENA)
    num_slots, deciding = get(arena, w.SHADOW_SLOTS), get(arena, w.DECIDING)
    averages, forgetting = get(arena, w.SHADOW_MISSES), 1.0 / (WINDOW * get(arena, w.NUM_LAYERS))
    best = deciding
    for shadow in range(_NUM_KINDS + 2):
        if shadow < _NUM_KINDS:
            value = _missed_by_shadow(args, layer, shadow, shadow, num_slots)
        elif shadow == TWICE:
            value = _missed_by_shadow(args, layer, shadow, deciding, 2 * num_slots)
        else:
            value = get(args, k.NUM_GROUPS)
        average = v.load_double(averages + 8 * shadow)
        average += forgetting * (value - average)
        v.store_double(averages + 8 * shadow, average)
        if shadow < _NUM_KINDS and average < v.load_double(averages + 8 * best):
            best = shadow
    if get(layer, w.NEXT) != 0 or get(layer, w.NUM_CALLS) < LEAST_TOKENS:
        return
    present = v.load_double(averages + 8 * deciding)
    if v.load_double(averages + 8 * best) < (1.0 - LEAST_GAIN) * present:
        v.store_i64(arena + 8 * w.DECIDING, best)
