"""Brings a batch's experts from the disk into slots of an arena, before they are multiplied.

All of a layer's experts that are missing are read at once, in parts, past the page cache. A batch
that uses most of a layer, such as a prompt's chunk, has those of the next layer read while it is
computed, as far as there are slots.

Of the experts in slots those leave that were used least, older uses counting less: a use counts
2 ** (its layer's call / half-life), of which a key is the logarithm, so that keys of experts that
are not used need no change. What this batch needs does not leave. A batch that uses most of a layer
says nothing of what is hot: it counts for nothing, so that what it brings leaves before what steps
use. Where a read fails, or there is no slot, the expert is used where the file is mapped.

There are keys for several half-lives (compute/half_lives.py), one of which decides. Each has a
shadow: the experts of a layer that it would keep, if it had its share of the slots. What shadows
miss in steps says which half-life is used.

A step's layer predicts what the next one will choose (router_ahead), and has it prefetched as soon
as its own experts are there, so that disk and processor work at once: as much as the disk has time
for until the next layer begins, unless it would more often be read in vain. Where of late next to
nothing was missing, nothing is predicted.

A read that takes longer than the limit ends all further ones, as its memory may be written later.
"""

from __future__ import annotations

import math
from functools import cache

from dflash_runtime.compute.cpu.compile.compiling import RowFunction, compile_task, helper
from dflash_runtime.compute.cpu.kernels import experts_kernel as k
from dflash_runtime.compute.cpu.kernels.router_ahead import LIKELY, find_likely
from dflash_runtime.compute.cpu.kernels.words import get
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.atomics import atomic_replace, atomic_store
from dflash_runtime.compute.cpu.threads import system
from dflash_runtime.compute.half_lives import HALF_LIVES, LEAST_GAIN, LEAST_TOKENS, WINDOW

(
    LOCK, CONTEXT, REQUESTS, PENDING, EVENTS, FREE, NUM_FREE, SLOTS, NUM_SLOTS, MEMORY, SLOT_BYTES,
    LIMIT_NS, CALL, IS_BROKEN, FOUND, MISSED, READ_BYTES, WAITED_NS, FAILED, NUM_LAYERS,
    MISSING, PREFETCHED, PREFETCHED_USED, CHECKED, PREDICTED, READ_NS, GAP_NS, LEFT_NS, CHANCES,
    DECIDING, SHADOW_SLOTS, SHADOW_MISSES,
) = range(32)  # fmt: skip
"""Words of an arena: a lock that a batch holds; the kernel's queue of reads; control blocks of
reads, what each is for (PENDING_WORDS), ended ones as the kernel tells them; numbers of unused
control blocks; slots (SLOT_WORDS), their memory, bytes of one; how long a read may take; the
batch's number; not 0: nothing more is read; counts; how many layers there are; how many of a
step's experts were missing of late, float64; experts that were prefetched for steps, those of them
that were used, experts that layers chose after a prediction, and those of them that were
predicted; how long an expert is read, and how long it is from a layer to the next one, float64;
when the last layer began to compute; and for the likeliest expert that is predicted, the second one
and so on, the share of missing ones that were chosen, [MOST_PREDICTED] float64; which half-life is
used; how many experts of a layer shadows keep, 0: there are none, and the half-life stays; and what
they miss of a layer of late, [H] float64.
"""
NUM_WORDS = 32

LAYER, EXPERT, USED_AT, HAS_FAILED, NUM_PENDING, IS_PREFETCHED = range(6)
"""Words of a slot: words of its expert's layer, or 0 if it is empty; the expert; the last batch
that uses it; whether a part of what is read could not be; parts that are on their way; whether it
was prefetched for a step and has not been used."""
SLOT_WORDS = 6

(
    ARENA, ADDRESSES, MAPPED, PLACES, SLOT_OF, KEYS, NUM_CALLS, NEXT, NUM_EXPERTS, ROUTER,
    CHOSEN_AT, PREDICTED_FOR, NUM_PREDICTED, WERE_MISSING, SHADOWS, SHADOW_SIZES,
) = range(16)  # fmt: skip
"""Words of a layer: its arena; where experts are now, and in the mapped file, [E, 3]; where they
lie in files, [E, 3] of PLACE_WORDS; their slots, negative for none, [E]; keys, [H, E] float64; how
often it was called; the next layer, or 0; how many experts it has; words of router_ahead for rows
of the layer before, or 0; the last batch that chose each expert, [E]; and what was predicted of
this layer: the batch that it was for, how many experts, and a bit for each that was missing; for
each expert a bit for each shadow that keeps it, [E]; and how many each keeps, [H]."""
LAYER_WORDS = 16

DESCRIPTOR, OFFSET, NUM_BYTES = range(3)
PLACE_WORDS = 3

SLOT, NEEDED = range(2)
"""Of a pending read: its slot, and the bytes that it must bring."""
PENDING_WORDS = 2

MOST_PENDING = 1024
MOST_AT_ONCE = 64
"""Ended reads that are asked for at once."""
PART_BYTES = 512 << 10
BLOCK = 4096
"""Offsets, sizes and addresses are multiples of this, as direct reads want."""
REQUEST_BYTES, EVENT_BYTES = 64, 32
"""Of the kernel's struct iocb and struct io_event."""

_RATES = tuple(math.log(2.0) / each for each in HALF_LIVES)
_NUM_KINDS = len(HALF_LIVES)
_OLDEST = 40.0
"""Uses whose keys are so much smaller add nothing, and are alike."""
_SOON = 0.1
_TURN_MS = 100
_MOST_OF_A_LAYER = 0.75

MOST_PREDICTED = 32
"""Experts of a token; of more only the likeliest are predicted."""
_LEAST_MISSING, _FORGETTING = 1 / 16, 1 / 64
"""Experts of a layer that have to be missing on average for predictions to pay; what the last
observation counts of such an average."""


@helper
def _slot(arena: int, slot: int) -> int:
    return get(arena, SLOTS) + 8 * SLOT_WORDS * slot  # type: ignore[no-any-return]


@helper
def _expert(args: int, group: int) -> int:
    return v.load_i32(get(args, k.EXPERT_IDS) + 4 * group)  # type: ignore[no-any-return]


@helper
def _slot_of(layer: int, expert: int) -> int:
    return v.load_i64(get(layer, SLOT_OF) + 8 * expert)  # type: ignore[no-any-return]


@helper
def _key_at(layer: int, kind: int, expert: int) -> int:
    return get(layer, KEYS) + 8 * (kind * get(layer, NUM_EXPERTS) + expert)  # type: ignore[no-any-return]


@helper
def _note_use(layer: int, expert: int) -> None:
    for kind in range(_NUM_KINDS):
        place, now = _key_at(layer, kind, expert), _RATES[kind] * get(layer, NUM_CALLS)
        before = v.load_double(place) - now
        if before > _OLDEST:
            continue
        key = now
        if before > -_OLDEST:
            key += math.log(1.0 + math.exp(before))
        v.store_double(place, key)


@helper
def _leaving_shadow(layer: int, kind: int, call: int) -> int:
    """The expert that leaves a shadow first; negative if this batch chose all of them."""
    leaving, least = -1, math.inf
    for expert in range(get(layer, NUM_EXPERTS)):
        if v.load_i64(get(layer, SHADOWS) + 8 * expert) >> kind & 1 == 0:
            continue
        key = v.load_double(_key_at(layer, kind, expert))
        if key < least and v.load_i64(get(layer, CHOSEN_AT) + 8 * expert) != call:
            leaving, least = expert, key
    return leaving


@helper
def _missed_by_shadow(args: int, layer: int, kind: int, call: int) -> int:
    """How many of a step's experts a shadow does not keep; it keeps them from now on, if they were
    used more than those that leave."""
    num_missed, bit = 0, 1 << kind
    size_at = get(layer, SHADOW_SIZES) + 8 * kind
    for group in range(get(args, k.NUM_GROUPS)):
        expert = _expert(args, group)
        place = get(layer, SHADOWS) + 8 * expert
        if v.load_i64(place) & bit != 0:
            continue
        num_missed += 1
        if v.load_i64(size_at) < get(get(layer, ARENA), SHADOW_SLOTS):
            v.store_i64(size_at, v.load_i64(size_at) + 1)
        else:
            leaving = _leaving_shadow(layer, kind, call)
            if leaving < 0:
                continue
            key = v.load_double(_key_at(layer, kind, expert))
            if key <= v.load_double(_key_at(layer, kind, leaving)):
                continue
            of_leaving = get(layer, SHADOWS) + 8 * leaving
            v.store_i64(of_leaving, v.load_i64(of_leaving) & ~bit)
        v.store_i64(place, v.load_i64(place) | bit)
    return num_missed


@helper
def _compare_half_lives(args: int, layer: int, call: int) -> None:
    """Count what shadows miss in a step; after its last layer, use the half-life that misses least,
    if it gains enough."""
    arena = get(layer, ARENA)
    forgetting = 1.0 / (WINDOW * get(arena, NUM_LAYERS))
    best = get(arena, DECIDING)
    for kind in range(_NUM_KINDS):
        place = get(arena, SHADOW_MISSES) + 8 * kind
        average = v.load_double(place)
        average += forgetting * (_missed_by_shadow(args, layer, kind, call) - average)
        v.store_double(place, average)
        if average < v.load_double(get(arena, SHADOW_MISSES) + 8 * best):
            best = kind
    if get(layer, NEXT) != 0 or get(layer, NUM_CALLS) < LEAST_TOKENS:
        return
    present = v.load_double(get(arena, SHADOW_MISSES) + 8 * get(arena, DECIDING))
    if v.load_double(get(arena, SHADOW_MISSES) + 8 * best) < (1.0 - LEAST_GAIN) * present:
        v.store_i64(arena + 8 * DECIDING, best)


@helper
def _leave_slot(arena: int, slot: int) -> None:
    """Its expert is used where the file is mapped from now on."""
    words = _slot(arena, slot)
    layer, expert = get(words, LAYER), get(words, EXPERT)
    if layer == 0:
        return
    v.store_i64(get(layer, SLOT_OF) + 8 * expert, -1)
    for projection in range(3):
        place = 8 * (3 * expert + projection)
        v.store_i64(get(layer, ADDRESSES) + place, v.load_i64(get(layer, MAPPED) + place))
    v.store_i64(words + 8 * LAYER, 0)


@helper
def _least_used(arena: int) -> int:
    """An empty slot, or the one whose expert was used least; negative if this batch needs all."""
    call, best, least = get(arena, CALL), -1, math.inf
    kind = get(arena, DECIDING)
    for slot in range(get(arena, NUM_SLOTS)):
        words = _slot(arena, slot)
        layer = get(words, LAYER)
        if layer == 0:
            return slot
        if get(words, USED_AT) != call and get(words, NUM_PENDING) == 0:
            key = v.load_double(_key_at(layer, kind, get(words, EXPERT)))
            key -= _RATES[kind] * get(layer, NUM_CALLS)  # how often layers were called may differ
            key = max(key, -_OLDEST)
            # Of experts that were used as often, those of layers that come soon stay.
            key += _SOON * min(1.0, (call - get(words, USED_AT)) / get(arena, NUM_LAYERS))
            if key < least:
                best, least = slot, key
    return best


@helper
def _reap(arena: int) -> None:
    """Wait for a read that has ended, or for the limit, after which there are no more."""
    end_ns = system.monotonic_ns() + get(arena, LIMIT_NS)
    num_ended = 0
    while num_ended <= 0:
        num_ended = system.ended_reads(
            get(arena, CONTEXT), MOST_AT_ONCE, get(arena, EVENTS), _TURN_MS
        )
        if num_ended <= 0 and system.monotonic_ns() >= end_ns:
            v.store_i64(arena + 8 * IS_BROKEN, 1)
            return
    for index in range(num_ended):
        event = get(arena, EVENTS) + EVENT_BYTES * index
        request, result = v.load_i64(event), v.load_i64(event + 16)
        pending = get(arena, PENDING) + 8 * PENDING_WORDS * request
        words = _slot(arena, get(pending, SLOT))
        v.store_i64(words + 8 * NUM_PENDING, get(words, NUM_PENDING) - 1)
        if result < get(pending, NEEDED):
            v.store_i64(words + 8 * HAS_FAILED, 1)
        num_free = get(arena, NUM_FREE)
        v.store_i64(get(arena, FREE) + 8 * num_free, request)
        v.store_i64(arena + 8 * NUM_FREE, num_free + 1)


@helper
def _read_part(
    arena: int, slot: int, descriptor: int, part: tuple[int, int, int], needed: int
) -> None:
    """`part`: address, offset in the file, bytes; `needed`: fewer at the end of the file."""
    address, offset, num_bytes = part
    while get(arena, NUM_FREE) == 0 and get(arena, IS_BROKEN) == 0:
        _reap(arena)
    words = _slot(arena, slot)
    if get(arena, IS_BROKEN) != 0:
        v.store_i64(words + 8 * HAS_FAILED, 1)
        return
    num_free = get(arena, NUM_FREE) - 1
    request = v.load_i64(get(arena, FREE) + 8 * num_free)
    pending = get(arena, PENDING) + 8 * PENDING_WORDS * request
    v.store_i64(pending + 8 * SLOT, slot)
    v.store_i64(pending + 8 * NEEDED, needed)
    # struct iocb: data, key and flags, opcode (0: read) and priority, descriptor, buffer, bytes,
    # offset, and what stays 0.
    block = get(arena, REQUESTS) + REQUEST_BYTES * request
    v.store_i64(block, request)
    v.store_i64(block + 16, descriptor << 32)
    v.store_i64(block + 24, address)
    v.store_i64(block + 32, num_bytes)
    v.store_i64(block + 40, offset)
    pointer = get(arena, REQUESTS) + REQUEST_BYTES * MOST_PENDING
    v.store_i64(pointer, block)
    if system.submit_read(get(arena, CONTEXT), pointer) == 1:
        v.store_i64(words + 8 * NUM_PENDING, get(words, NUM_PENDING) + 1)
        v.store_i64(arena + 8 * NUM_FREE, num_free)
        v.store_i64(arena + 8 * READ_BYTES, get(arena, READ_BYTES) + num_bytes)
    else:
        v.store_i64(words + 8 * HAS_FAILED, 1)


@helper
def _begin_reads(arena: int, layer: int, expert: int, slot: int) -> None:
    """Read an expert into a slot, whose addresses it has from now on."""
    at = get(arena, MEMORY) + get(arena, SLOT_BYTES) * slot
    for projection in range(3):
        place = get(layer, PLACES) + 8 * PLACE_WORDS * (3 * expert + projection)
        offset = get(place, OFFSET)
        end = offset + get(place, NUM_BYTES)
        begin = offset // BLOCK * BLOCK
        v.store_i64(get(layer, ADDRESSES) + 8 * (3 * expert + projection), at + offset - begin)
        while begin < end:
            num_bytes = min(PART_BYTES, (end - begin + BLOCK - 1) // BLOCK * BLOCK)
            part = at, begin, num_bytes
            _read_part(arena, slot, get(place, DESCRIPTOR), part, min(num_bytes, end - begin))
            at, begin = at + num_bytes, begin + num_bytes


@helper
def _bring(arena: int, layer: int, expert: int, waits: bool) -> bool:
    """Begin to read an expert that has no slot; False if there is none for it. `waits`: for one
    whose expert is still on its way."""
    slot = _least_used(arena)
    while waits and slot < 0 and get(arena, NUM_FREE) < MOST_PENDING and get(arena, IS_BROKEN) == 0:
        _reap(arena)
        slot = _least_used(arena)
    if slot < 0 or get(arena, IS_BROKEN) != 0:
        return False
    _leave_slot(arena, slot)
    words = _slot(arena, slot)
    v.store_i64(words + 8 * LAYER, layer)
    v.store_i64(words + 8 * EXPERT, expert)
    v.store_i64(words + 8 * USED_AT, get(arena, CALL))
    v.store_i64(words + 8 * HAS_FAILED, 0)
    v.store_i64(words + 8 * IS_PREFETCHED, 0)
    v.store_i64(get(layer, SLOT_OF) + 8 * expert, slot)
    _begin_reads(arena, layer, expert, slot)
    return True


@helper
def _await(arena: int, slot: int) -> bool:
    """Wait until all of a slot's expert has arrived; whether it can be used there."""
    words = _slot(arena, slot)
    while get(words, NUM_PENDING) != 0 and get(arena, IS_BROKEN) == 0:
        _reap(arena)
    return get(words, NUM_PENDING) == 0 and get(words, HAS_FAILED) == 0  # type: ignore[no-any-return]


@helper
def _look_ahead(arena: int, layer: int) -> None:
    """Begin to read a layer's experts, in the order of the file."""
    for expert in range(get(layer, NUM_EXPERTS)):
        if _slot_of(layer, expert) < 0 and not _bring(arena, layer, expert, False):
            return


@helper
def _note(place: int, value: float) -> None:
    """Count an observation in an average, float64."""
    average = v.load_double(place)
    v.store_double(place, average + _FORGETTING * (value - average))


@helper
def _predicted(layer: int, rank: int) -> int:
    return v.load_i64(get(get(layer, ROUTER), LIKELY) + 8 * rank)  # type: ignore[no-any-return]


@helper
def _predict(args: int, layer: int, call: int) -> None:
    """Predict what the next layer, in the batch after this one, will choose."""
    arena, following = get(layer, ARENA), get(layer, NEXT)
    num_predicted = min(MOST_PREDICTED, find_likely(get(following, ROUTER), get(args, k.HIDDEN)))
    missing = 0
    for rank in range(num_predicted):
        slot = _slot_of(following, _predicted(following, rank))
        if slot < 0:
            missing |= 1 << rank
        else:  # it stays
            v.store_i64(_slot(arena, slot) + 8 * USED_AT, call)
    v.store_i64(following + 8 * PREDICTED_FOR, call + 1)
    v.store_i64(following + 8 * NUM_PREDICTED, num_predicted)
    v.store_i64(following + 8 * WERE_MISSING, missing)


@helper
def _prefetch(arena: int, layer: int) -> None:
    """Begin to read the experts that were predicted of a layer and are missing, the likeliest
    first, as far as the time that is hidden is expected to be more than what is read in vain."""
    read_ns, gap_ns = v.load_double(arena + 8 * READ_NS), v.load_double(arena + 8 * GAP_NS)
    for rank in range(get(layer, NUM_PREDICTED)):
        expert = _predicted(layer, rank)
        if _slot_of(layer, expert) >= 0:
            continue
        chance = v.load_double(get(arena, CHANCES) + 8 * rank)
        hidden_ns = min(read_ns, max(0.0, gap_ns))
        if chance * hidden_ns < (1.0 - chance) * (read_ns - hidden_ns):
            continue
        if not _bring(arena, layer, expert, False):
            return
        gap_ns -= read_ns
        v.store_i64(_slot(arena, _slot_of(layer, expert)) + 8 * IS_PREFETCHED, 1)
        v.store_i64(arena + 8 * PREFETCHED, get(arena, PREFETCHED) + 1)


@helper
def _check_prediction(arena: int, layer: int, num_chosen: int) -> None:
    """Compare what was predicted of a layer with what it has chosen."""
    call = get(arena, CALL)
    v.store_i64(arena + 8 * CHECKED, get(arena, CHECKED) + num_chosen)
    for rank in range(get(layer, NUM_PREDICTED)):
        is_chosen = v.load_i64(get(layer, CHOSEN_AT) + 8 * _predicted(layer, rank)) == call
        if is_chosen:
            v.store_i64(arena + 8 * PREDICTED, get(arena, PREDICTED) + 1)
        if get(layer, WERE_MISSING) >> rank & 1:
            _note(get(arena, CHANCES) + 8 * rank, 1.0 if is_chosen else 0.0)


def _enter(args: int, counter: int, pool: int) -> None:
    """Called before a batch is computed; `_leave` must be called after it."""
    layer = get(args, k.ARENA)
    arena = get(layer, ARENA)
    while not atomic_replace(arena + 8 * LOCK, 0, 1):
        system.sleep_while(arena + 8 * LOCK, 1, 1000)
    began_ns = system.monotonic_ns()
    call = get(arena, CALL) + 1
    v.store_i64(arena + 8 * CALL, call)
    num_groups, num_found, num_prefetched, num_missing = get(args, k.NUM_GROUPS), 0, 0, 0
    is_step = get(args, k.IS_STEP) != 0 and get(args, k.NUM_TOKENS) == 1
    is_most = num_groups >= _MOST_OF_A_LAYER * get(layer, NUM_EXPERTS)
    is_counted = is_step or not is_most
    if is_counted:
        v.store_i64(layer + 8 * NUM_CALLS, get(layer, NUM_CALLS) + 1)
    for group in range(num_groups):
        expert = _expert(args, group)
        if is_counted:
            _note_use(layer, expert)
        v.store_i64(get(layer, CHOSEN_AT) + 8 * expert, call)
        slot = _slot_of(layer, expert)
        if slot >= 0:
            words = _slot(arena, slot)
            is_there = get(words, NUM_PENDING) == 0 and get(words, HAS_FAILED) == 0
            num_found += 1 if is_there else 0
            v.store_i64(words + 8 * USED_AT, call)
            num_prefetched += get(words, IS_PREFETCHED)
            v.store_i64(words + 8 * IS_PREFETCHED, 0)
        else:
            num_missing += 1
    v.store_i64(arena + 8 * PREFETCHED_USED, get(arena, PREFETCHED_USED) + num_prefetched)
    if get(layer, PREDICTED_FOR) == call:
        _note(arena + 8 * GAP_NS, began_ns - get(arena, LEFT_NS))
        _check_prediction(arena, layer, num_groups)
    if is_step:
        _note(arena + 8 * MISSING, num_missing + num_prefetched)
        if 0 < get(arena, SHADOW_SLOTS) < get(layer, NUM_EXPERTS):
            _compare_half_lives(args, layer, call)
    following = get(layer, NEXT)
    predicts = is_step and following != 0 and get(following, ROUTER) != 0
    predicts = predicts and v.load_double(arena + 8 * MISSING) >= _LEAST_MISSING
    v.store_i64(arena + 8 * FOUND, get(arena, FOUND) + num_found)
    v.store_i64(arena + 8 * MISSED, get(arena, MISSED) + num_groups - num_found)
    has_room = True
    for group in range(num_groups):
        expert = _expert(args, group)
        if has_room and _slot_of(layer, expert) < 0:
            has_room = _bring(arena, layer, expert, True)
    if predicts:  # while reads are on their way
        _predict(args, layer, call)
    for group in range(num_groups):
        slot = _slot_of(layer, _expert(args, group))
        if slot < 0 or not _await(arena, slot):
            v.store_i64(arena + 8 * FAILED, get(arena, FAILED) + 1)
            if slot >= 0:
                _leave_slot(arena, slot)
    ended_ns = system.monotonic_ns()
    v.store_i64(arena + 8 * WAITED_NS, get(arena, WAITED_NS) + ended_ns - began_ns)
    v.store_i64(arena + 8 * LEFT_NS, ended_ns)
    if is_step and num_missing > 0:
        _note(arena + 8 * READ_NS, (ended_ns - began_ns) / num_missing)
    if predicts and has_room:
        _prefetch(arena, following)
    if is_most and following != 0 and has_room:
        _look_ahead(arena, following)


def _leave(args: int, counter: int, pool: int) -> None:
    lock = get(get(args, k.ARENA), ARENA) + 8 * LOCK
    atomic_store(lock, 0)
    system.wake(lock)


@cache
def arena_functions() -> tuple[RowFunction, RowFunction]:
    """What a bank's words name: see `_enter` and `_leave`."""
    return compile_task(_enter), compile_task(_leave)
