"""Brings a batch's experts from the disk into slots of an arena, before they are multiplied.

All of a layer's experts that are missing are read at once, in parts, past the page cache. Several
tokens, such as a prompt's chunk, have the next layer's read while they are computed, as far as
there are slots: those that its router (router_ahead) predicts for any of them, or if there is none,
and they use most of this layer, all.

Of the experts in slots those leave that were used least, older uses counting less (arena_shadows).
What this batch needs does not leave. A batch that uses most of a layer says nothing of what is hot:
it counts for nothing, so that what it brings leaves before what steps use. Where a read fails, or
there is no slot, the expert is used where the file is mapped.

A step's layer predicts what the next one will choose, too, and has it prefetched as soon as its own
experts are there, so that disk and processor work at once: as much as the disk has time for until
the next layer begins, unless it would more often be read in vain. Where of late next to nothing was
missing, nothing is predicted.

A read that takes longer than the limit ends all further ones, as its memory may be written later.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from dflash_runtime.compute.cpu.compile.compiling import RowFunction, compile_task, helper
from dflash_runtime.compute.cpu.kernels import arena_words as w
from dflash_runtime.compute.cpu.kernels import experts_kernel as k
from dflash_runtime.compute.cpu.kernels.arena_shadows import compare_half_lives, note_use
from dflash_runtime.compute.cpu.kernels.router_ahead import (
    COUNTS,
    LIKELY,
    count_likely,
    find_likely,
)
from dflash_runtime.compute.cpu.kernels.words import get
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.atomics import atomic_load, atomic_replace, atomic_store
from dflash_runtime.compute.cpu.threads import system
from dflash_runtime.compute.half_lives import OLDEST, RATES, SOON

_LAST = 1000.0
_TURN_MS = 100
_LENT_US = 50
"""A copy from a slot takes some hundred."""
_MOST_OF_A_LAYER, _SEVERAL = 0.75, 16
_NOTHING, _ALL, _PREDICTED = range(3)
_LEAST_MISSING, _FORGETTING = 1 / 16, 1 / 64
"""Experts of a layer that have to be missing on average for predictions to pay; what the last
observation counts of such an average."""


@helper
def _leave_slot(arena: int, slot: int) -> None:
    """Its expert is used where the file is mapped from now on."""
    words = w.words_of_slot(arena, slot)
    layer, expert = get(words, w.LAYER), get(words, w.EXPERT)
    if layer == 0:
        return
    atomic_store(get(layer, w.SLOT_OF) + 8 * expert, -1)
    # Who copies from it has said so before looking whether it is still the expert's (lent_runs).
    lent = atomic_load(words + 8 * w.LENT)
    while lent != 0:
        system.sleep_while(words + 8 * w.LENT, lent, _LENT_US)
        lent = atomic_load(words + 8 * w.LENT)
    for projection in range(3):
        place = 8 * (3 * expert + projection)
        v.store_i64(get(layer, w.ADDRESSES) + place, v.load_i64(get(layer, w.MAPPED) + place))
    v.store_i64(words + 8 * w.LAYER, 0)


@helper
def _least_used(arena: int, around: int, waits: bool) -> int:
    """An empty slot, or the one whose expert was used least; negative if this batch needs all.

    `around`: a layer of which more tokens may follow, so that its experts, and those that were read
    for the next one, leave last, or do not leave at all unless the batch `waits`; 0 for none.
    """
    call, best, least = get(arena, w.CALL), -1, math.inf
    kind, following = get(arena, w.DECIDING), 0
    if around != 0:
        following = get(around, w.NEXT)
    for slot in range(get(arena, w.NUM_SLOTS)):
        words = w.words_of_slot(arena, slot)
        layer = get(words, w.LAYER)
        if layer == 0:
            return slot
        if get(words, w.USED_AT) != call and get(words, w.NUM_PENDING) == 0:
            if v.load_i64(get(layer, w.PINS) + 8 * get(words, w.EXPERT)) != 0:
                continue
            key = v.load_double(w.key_at(layer, kind, get(words, w.EXPERT)))
            key -= RATES[kind] * get(layer, w.NUM_CALLS)  # how often layers were called may differ
            key = max(key, -OLDEST)
            # Experts of layers that come soon stay.
            key += SOON * min(1.0, (call - get(layer, w.CALLED_AT)) / get(arena, w.NUM_LAYERS))
            if layer in (around, following):
                if not waits:
                    continue
                key += _LAST
            if key < least:
                best, least = slot, key
    return best


@helper
def _reap(arena: int) -> None:
    """Wait for a read that has ended, or for the limit, after which there are no more."""
    end_ns = system.monotonic_ns() + get(arena, w.LIMIT_NS)
    num_ended = 0
    while num_ended <= 0:
        num_ended = system.ended_reads(
            get(arena, w.CONTEXT), w.MOST_AT_ONCE, get(arena, w.EVENTS), _TURN_MS
        )
        if num_ended <= 0 and system.monotonic_ns() >= end_ns:
            v.store_i64(arena + 8 * w.IS_BROKEN, 1)
            return
    for index in range(num_ended):
        event = get(arena, w.EVENTS) + w.EVENT_BYTES * index
        request, result = v.load_i64(event), v.load_i64(event + 16)
        pending = get(arena, w.PENDING) + 8 * w.PENDING_WORDS * request
        words = w.words_of_slot(arena, get(pending, w.SLOT))
        if result < get(pending, w.NEEDED):
            v.store_i64(words + 8 * w.HAS_FAILED, 1)
        atomic_store(words + 8 * w.NUM_PENDING, get(words, w.NUM_PENDING) - 1)
        num_free = get(arena, w.NUM_FREE)
        v.store_i64(get(arena, w.FREE) + 8 * num_free, request)
        v.store_i64(arena + 8 * w.NUM_FREE, num_free + 1)


@helper
def _read_part(
    arena: int, slot: int, descriptor: int, part: tuple[int, int, int], needed: int
) -> None:
    """`part`: address, offset in the file, bytes; `needed`: fewer at the end of the file."""
    address, offset, num_bytes = part
    while get(arena, w.NUM_FREE) == 0 and get(arena, w.IS_BROKEN) == 0:
        _reap(arena)
    words = w.words_of_slot(arena, slot)
    if get(arena, w.IS_BROKEN) != 0:
        v.store_i64(words + 8 * w.HAS_FAILED, 1)
        return
    num_free = get(arena, w.NUM_FREE) - 1
    request = v.load_i64(get(arena, w.FREE) + 8 * num_free)
    pending = get(arena, w.PENDING) + 8 * w.PENDING_WORDS * request
    v.store_i64(pending + 8 * w.SLOT, slot)
    v.store_i64(pending + 8 * w.NEEDED, needed)
    block = get(arena, w.REQUESTS) + w.REQUEST_BYTES * request
    w.set_request(block, request, descriptor, address, num_bytes, offset)
    pointer = get(arena, w.REQUESTS) + w.REQUEST_BYTES * w.MOST_PENDING
    v.store_i64(pointer, block)
    if system.submit_read(get(arena, w.CONTEXT), pointer) == 1:
        v.store_i64(words + 8 * w.NUM_PENDING, get(words, w.NUM_PENDING) + 1)
        v.store_i64(arena + 8 * w.NUM_FREE, num_free)
        v.store_i64(arena + 8 * w.READ_BYTES, get(arena, w.READ_BYTES) + num_bytes)
    else:
        v.store_i64(words + 8 * w.HAS_FAILED, 1)


@helper
def _begin_reads(arena: int, layer: int, expert: int, slot: int) -> None:
    """Read an expert into a slot, whose addresses it has from now on."""
    at = get(arena, w.MEMORY) + get(arena, w.SLOT_BYTES) * slot
    for projection in range(3):
        place = get(layer, w.PLACES) + 8 * w.PLACE_WORDS * (3 * expert + projection)
        offset = get(place, w.OFFSET)
        end = offset + get(place, w.NUM_BYTES)
        begin = offset // w.BLOCK * w.BLOCK
        v.store_i64(get(layer, w.ADDRESSES) + 8 * (3 * expert + projection), at + offset - begin)
        while begin < end:
            num_bytes = min(w.PART_BYTES, (end - begin + w.BLOCK - 1) // w.BLOCK * w.BLOCK)
            part = at, begin, num_bytes
            _read_part(arena, slot, get(place, w.DESCRIPTOR), part, min(num_bytes, end - begin))
            at, begin = at + num_bytes, begin + num_bytes


@helper
def _may_reap(arena: int) -> bool:
    is_pending = get(arena, w.NUM_FREE) < w.MOST_PENDING
    return is_pending and get(arena, w.IS_BROKEN) == 0  # type: ignore[no-any-return]


@helper
def _bring(arena: int, layer: int, expert: int, around: int, waits: bool) -> bool:
    """Begin to read an expert that has no slot; False if there is none for it. `around`: see
    `_least_used`. `waits`: for a slot whose expert is still on its way."""
    slot = _least_used(arena, around, waits)
    while waits and slot < 0 and _may_reap(arena):
        _reap(arena)
        slot = _least_used(arena, around, waits)
    if slot < 0 or get(arena, w.IS_BROKEN) != 0:
        return False
    _leave_slot(arena, slot)
    words = w.words_of_slot(arena, slot)
    v.store_i64(words + 8 * w.LAYER, layer)
    v.store_i64(words + 8 * w.EXPERT, expert)
    v.store_i64(words + 8 * w.USED_AT, get(arena, w.CALL))
    v.store_i64(words + 8 * w.HAS_FAILED, 0)
    v.store_i64(words + 8 * w.IS_PREFETCHED, 0)
    v.store_i64(words + 8 * w.NUM_PENDING, 1)  # before others find it: until all reads are begun
    atomic_store(get(layer, w.SLOT_OF) + 8 * expert, slot)
    _begin_reads(arena, layer, expert, slot)
    atomic_store(words + 8 * w.NUM_PENDING, get(words, w.NUM_PENDING) - 1)
    return True


@helper
def _await(arena: int, slot: int) -> bool:
    """Wait until all of a slot's expert has arrived; whether it can be used there."""
    words = w.words_of_slot(arena, slot)
    while get(words, w.NUM_PENDING) != 0 and get(arena, w.IS_BROKEN) == 0:
        _reap(arena)
    return get(words, w.NUM_PENDING) == 0 and get(words, w.HAS_FAILED) == 0  # type: ignore[no-any-return]


@helper
def _read_all(arena: int, layer: int, around: int) -> None:
    """Begin to read a layer's experts, in the order of the file."""
    for expert in range(get(layer, w.NUM_EXPERTS)):
        if w.slot_of(layer, expert) < 0 and not _bring(arena, layer, expert, around, False):
            return


@helper
def _read_predicted(arena: int, layer: int, around: int) -> None:
    """Begin to read the experts that were predicted of a layer (count_likely), first those that
    most tokens use."""
    router, num_missing = get(layer, w.ROUTER), 0
    for expert in range(get(layer, w.NUM_EXPERTS)):
        if v.load_i64(get(router, COUNTS) + 8 * expert) > 0:
            slot = w.slot_of(layer, expert)
            if slot < 0:
                num_missing += 1
            else:  # it stays
                v.store_i64(w.words_of_slot(arena, slot) + 8 * w.USED_AT, get(arena, w.CALL))
    for _ in range(num_missing):
        best, most = -1, 0
        for expert in range(get(layer, w.NUM_EXPERTS)):
            count = v.load_i64(get(router, COUNTS) + 8 * expert)
            if count > most and w.slot_of(layer, expert) < 0:
                best, most = expert, count
        if not _bring(arena, layer, best, around, False):
            return


@helper
def _is_whole(layer: int) -> bool:
    """Whether all experts of a layer are there, or on their way."""
    num_there = 0
    for expert in range(get(layer, w.NUM_EXPERTS)):
        num_there += 1 if w.slot_of(layer, expert) >= 0 else 0
    return num_there == get(layer, w.NUM_EXPERTS)  # type: ignore[no-any-return]


@helper
def _uses_most(args: int, layer: int) -> bool:
    return get(args, k.NUM_GROUPS) >= _MOST_OF_A_LAYER * get(layer, w.NUM_EXPERTS)  # type: ignore[no-any-return]


@helper
def _way_ahead(args: int, layer: int, is_behind: bool) -> int:
    """What of the next layer is read ahead for several tokens: if most of this one is used, and was
    there in time, all, else what is predicted."""
    following, num_tokens = get(layer, w.NEXT), get(args, k.NUM_TOKENS)
    if following == 0 or _is_whole(following):
        return _NOTHING
    is_most = _uses_most(args, layer)
    can_predict = get(following, w.ROUTER) != 0 and num_tokens >= _SEVERAL
    if can_predict and (is_behind or not is_most):
        return _PREDICTED
    return _ALL if is_most else _NOTHING


@helper
def _note(place: int, value: float) -> None:
    """Count an observation in an average, float64."""
    average = v.load_double(place)
    v.store_double(place, average + _FORGETTING * (value - average))


@helper
def _predicted(layer: int, rank: int) -> int:
    return v.load_i64(get(get(layer, w.ROUTER), LIKELY) + 8 * rank)  # type: ignore[no-any-return]


@helper
def _predict(args: int, layer: int, call: int) -> None:
    """Predict what the next layer, in the batch after this one, will choose."""
    arena, following = get(layer, w.ARENA), get(layer, w.NEXT)
    router = get(following, w.ROUTER)
    num_predicted = min(w.MOST_PREDICTED, find_likely(router, get(args, k.HIDDEN)))
    missing = 0
    for rank in range(num_predicted):
        slot = w.slot_of(following, _predicted(following, rank))
        if slot < 0:
            missing |= 1 << rank
        else:  # it stays
            v.store_i64(w.words_of_slot(arena, slot) + 8 * w.USED_AT, call)
    v.store_i64(following + 8 * w.PREDICTED_FOR, call + 1)
    v.store_i64(following + 8 * w.NUM_PREDICTED, num_predicted)
    v.store_i64(following + 8 * w.WERE_MISSING, missing)


@helper
def _prefetch(arena: int, layer: int) -> None:
    """Begin to read the experts that were predicted of a layer and are missing, the likeliest
    first, as far as the time that is hidden is expected to be more than what is read in vain."""
    read_ns, gap_ns = v.load_double(arena + 8 * w.READ_NS), v.load_double(arena + 8 * w.GAP_NS)
    for rank in range(get(layer, w.NUM_PREDICTED)):
        expert = _predicted(layer, rank)
        if w.slot_of(layer, expert) >= 0:
            continue
        chance = v.load_double(get(arena, w.CHANCES) + 8 * rank)
        hidden_ns = min(read_ns, max(0.0, gap_ns))
        if chance * hidden_ns < (1.0 - chance) * (read_ns - hidden_ns):
            continue
        if not _bring(arena, layer, expert, 0, False):
            return
        gap_ns -= read_ns
        v.store_i64(w.words_of_slot(arena, w.slot_of(layer, expert)) + 8 * w.IS_PREFETCHED, 1)
        v.store_i64(arena + 8 * w.PREFETCHED, get(arena, w.PREFETCHED) + 1)


@helper
def _check_prediction(arena: int, layer: int, num_chosen: int) -> None:
    """Compare what was predicted of a layer with what it has chosen."""
    call = get(arena, w.CALL)
    v.store_i64(arena + 8 * w.CHECKED, get(arena, w.CHECKED) + num_chosen)
    for rank in range(get(layer, w.NUM_PREDICTED)):
        is_chosen = v.load_i64(get(layer, w.CHOSEN_AT) + 8 * _predicted(layer, rank)) == call
        if is_chosen:
            v.store_i64(arena + 8 * w.PREDICTED, get(arena, w.PREDICTED) + 1)
        if get(layer, w.WERE_MISSING) >> rank & 1:
            _note(get(arena, w.CHANCES) + 8 * rank, 1.0 if is_chosen else 0.0)


@helper
def _lock(arena: int) -> None:
    while not atomic_replace(arena + 8 * w.LOCK, 0, 1):
        system.sleep_while(arena + 8 * w.LOCK, 1, 1000)


@helper
def _unlock(arena: int) -> None:
    atomic_store(arena + 8 * w.LOCK, 0)
    system.wake(arena + 8 * w.LOCK)


def _enter(args: int, counter: int, pool: int) -> None:
    """Called before a batch is computed; `_leave` must be called after it."""
    layer = get(args, k.ARENA)
    arena = get(layer, w.ARENA)
    _lock(arena)
    began_ns = system.monotonic_ns()
    call = get(arena, w.CALL) + 1
    v.store_i64(arena + 8 * w.CALL, call)
    v.store_i64(layer + 8 * w.CALLED_AT, call)
    num_groups, num_found, num_prefetched, num_missing = get(args, k.NUM_GROUPS), 0, 0, 0
    is_step = get(args, k.IS_STEP) != 0 and get(args, k.NUM_TOKENS) == 1
    is_counted = is_step or not _uses_most(args, layer)
    if is_counted:
        v.store_i64(layer + 8 * w.NUM_CALLS, get(layer, w.NUM_CALLS) + 1)
    for group in range(num_groups):
        expert = w.expert_of(args, group)
        if is_counted:
            note_use(layer, expert)
        v.store_i64(get(layer, w.CHOSEN_AT) + 8 * expert, call)
        slot = w.slot_of(layer, expert)
        if slot >= 0:
            words = w.words_of_slot(arena, slot)
            is_there = get(words, w.NUM_PENDING) == 0 and get(words, w.HAS_FAILED) == 0
            num_found += 1 if is_there else 0
            v.store_i64(words + 8 * w.USED_AT, call)
            num_prefetched += get(words, w.IS_PREFETCHED)
            v.store_i64(words + 8 * w.IS_PREFETCHED, 0)
        else:
            num_missing += 1
    v.store_i64(arena + 8 * w.PREFETCHED_USED, get(arena, w.PREFETCHED_USED) + num_prefetched)
    if get(layer, w.PREDICTED_FOR) == call:
        _note(arena + 8 * w.GAP_NS, began_ns - get(arena, w.LEFT_NS))
        _check_prediction(arena, layer, num_groups)
    if is_step:
        _note(arena + 8 * w.MISSING, num_missing + num_prefetched)
        if 0 < get(arena, w.SHADOW_SLOTS) < get(layer, w.NUM_EXPERTS):
            compare_half_lives(args, layer)
    following = get(layer, w.NEXT)
    predicts = is_step and following != 0 and get(following, w.ROUTER) != 0
    predicts = predicts and v.load_double(arena + 8 * w.MISSING) >= _LEAST_MISSING
    v.store_i64(arena + 8 * w.FOUND, get(arena, w.FOUND) + num_found)
    v.store_i64(arena + 8 * w.MISSED, get(arena, w.MISSED) + num_groups - num_found)
    has_room, around = True, 0
    if get(args, k.NUM_TOKENS) >= _SEVERAL:
        around = layer
    for group in range(num_groups):
        expert = w.expert_of(args, group)
        if has_room and w.slot_of(layer, expert) < 0:
            has_room = _bring(arena, layer, expert, around, True)
    ahead = _NOTHING
    if has_room and not is_step:
        ahead = _way_ahead(args, layer, num_found + num_missing < num_groups)
    # While reads are on their way:
    if predicts:
        _predict(args, layer, call)
    elif ahead == _PREDICTED:
        count_likely(get(following, w.ROUTER), get(args, k.HIDDEN), get(args, k.NUM_TOKENS))
    for group in range(num_groups):
        slot = w.slot_of(layer, w.expert_of(args, group))
        if slot < 0 or not _await(arena, slot):
            v.store_i64(arena + 8 * w.FAILED, get(arena, w.FAILED) + 1)
            if slot >= 0:
                _leave_slot(arena, slot)
    ended_ns = system.monotonic_ns()
    v.store_i64(arena + 8 * w.WAITED_NS, get(arena, w.WAITED_NS) + ended_ns - began_ns)
    v.store_i64(arena + 8 * w.LEFT_NS, ended_ns)
    if is_step and num_missing > 0:
        _note(arena + 8 * w.READ_NS, (ended_ns - began_ns) / num_missing)
    if predicts and has_room:
        _prefetch(arena, following)
    if ahead == _PREDICTED:
        _read_predicted(arena, following, layer)
    elif ahead == _ALL:
        _read_all(arena, following, layer)


def _leave(args: int, counter: int, pool: int) -> None:
    _unlock(get(get(args, k.ARENA), w.ARENA))


def _resize(args: int, counter: int, pool: int) -> None:
    """Between two batches, use so many slots from now on: `args` words, the arena and these."""
    arena, num_slots = get(args, 0), get(args, 1)
    _lock(arena)
    for slot in range(num_slots, get(arena, w.NUM_SLOTS)):
        _await(arena, slot)
        _leave_slot(arena, slot)
    v.store_i64(arena + 8 * w.NUM_SLOTS, num_slots)
    _unlock(arena)


def _fill(args: int, counter: int, pool: int) -> None:
    """Between two batches, read experts into empty slots: of `args` words, the arena, how many,
    and for each its layer and number."""
    arena, count = get(args, 0), get(args, 1)
    _lock(arena)
    for index in range(count):
        layer, expert = get(args, 2 + 2 * index), get(args, 3 + 2 * index)
        slot = _least_used(arena, 0, False)
        is_empty = slot >= 0 and get(w.words_of_slot(arena, slot), w.LAYER) == 0
        if is_empty and w.slot_of(layer, expert) < 0:
            _bring(arena, layer, expert, 0, False)
    for index in range(count):
        slot = w.slot_of(get(args, 2 + 2 * index), get(args, 3 + 2 * index))
        if slot >= 0 and not _await(arena, slot):
            _leave_slot(arena, slot)
    _unlock(arena)


class ArenaFunctions(NamedTuple):
    """Compiled: see `_enter` and `_leave`, which a bank's words name, `_resize` and `_fill`."""

    enter: RowFunction
    leave: RowFunction
    resize: RowFunction
    fill: RowFunction


@cache
def arena_functions() -> ArenaFunctions:
    """Compiled when they are asked for first."""
    return ArenaFunctions(*map(compile_task, (_enter, _leave, _resize, _fill)))
