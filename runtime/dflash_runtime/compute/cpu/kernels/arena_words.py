"""What the words of an arena, its slots and layers mean: for host_arena, which makes them,
and for the compiled code that uses them (arena_tasks, arena_shadows).
"""

from __future__ import annotations

from dflash_runtime.compute.cpu.compile.compiling import helper
from dflash_runtime.compute.cpu.kernels import experts_kernel as k
from dflash_runtime.compute.cpu.kernels.words import get
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.threads import read_queue

(
    LOCK, CONTEXT, REQUESTS, PENDING, EVENTS, FREE, NUM_FREE, SLOTS, NUM_SLOTS, MEMORY, SLOT_BYTES,
    LIMIT_NS, CALL, IS_BROKEN, FOUND, MISSED, READ_BYTES, WAITED_NS, FAILED, NUM_LAYERS,
    MISSING, PREFETCHED, PREFETCHED_USED, CHECKED, PREDICTED, READ_NS, GAP_NS, LEFT_NS, CHANCES,
    DECIDING, SHADOW_SLOTS, SHADOW_MISSES,
    COPIES_FOUND, COPIES_MISSED, COPIES_FAILED, COPIES_READ_BYTES, MOST_SLOTS,
) = range(37)  # fmt: skip
"""Words of an arena: a lock that a batch holds; the kernel's queue of reads; control blocks of
reads, what each is for (PENDING_WORDS), ended ones as the kernel tells them; numbers of unused
control blocks; slots (SLOT_WORDS), how many there are at present, their memory, bytes of one; how
long a read may take; the batch's number; not 0: nothing more is read; counts; how many layers there
are; how many of a step's experts were missing of late, float64; experts that were prefetched for
steps, those of them that were used, experts that layers chose after a prediction, and those of them
that were predicted; how long an expert is read, and how long it is from a layer to the next one,
float64; when the last layer began to compute; and for the likeliest expert that is predicted, the
second one and so on, the share of missing ones that were chosen, [MOST_PREDICTED] float64; which
half-life is used; how many experts of a layer shadows keep, 0: there are none, and the half-life
stays; what they miss of a layer of late, that with twice the slots too, and how many a layer
chooses, [H + 2] float64; and of experts that threads beside batches have copied (lent_runs), those
that lay in slots and those that did not, pieces of these that could not be read, and bytes read;
how many slots there may be.
"""
NUM_WORDS = 37

LAYER, EXPERT, USED_AT, HAS_FAILED, NUM_PENDING, IS_PREFETCHED, LENT = range(7)
"""Words of a slot: words of its expert's layer, or 0 if it is empty; the expert; the last batch
that uses it; whether a part of what is read could not be; parts that are on their way, and one more
until all are; whether it was prefetched for a step and has not been used; and how many threads
copy from it, or are about to look whether they can."""
SLOT_WORDS = 7

(
    ARENA, ADDRESSES, MAPPED, PLACES, SLOT_OF, KEYS, NUM_CALLS, NEXT, NUM_EXPERTS, ROUTER,
    CHOSEN_AT, PREDICTED_FOR, NUM_PREDICTED, WERE_MISSING, SHADOWS, SHADOW_SIZES, PINS, CALLED_AT,
) = range(18)  # fmt: skip
"""Words of a layer: its arena; where experts are now, and in the mapped file, [E, 3];
where they lie in files, [E, 3] of PLACE_WORDS; their slots, negative for none, [E]; keys, [H, E]
float64; how often it was called; the next layer, or 0; how many experts it has; words of
router_ahead for rows of the layer before, or 0; the last batch that chose each expert, [E]; what
was predicted of this layer: the batch that it was for, how many experts, and a bit for each that
was missing; for each expert a bit for each shadow that keeps it, [E]; how many each keeps, [H + 1];
not 0 for each expert that must not leave, [E]; and the layer's last batch."""
LAYER_WORDS = 18

DESCRIPTOR, OFFSET, NUM_BYTES = range(3)
PLACE_WORDS = 3

SLOT, NEEDED = range(2)
"""Of a pending read: its slot, and the bytes that it must bring."""
PENDING_WORDS = 2

MOST_PENDING = 1024
MOST_AT_ONCE = 64
"""Ended reads that are asked for at once."""
PART_BYTES = 512 << 10
"""Read at once, of a matrix."""
BLOCK = 4096
"""Offsets, sizes and addresses are multiples of this, as direct reads want."""
REQUEST_BYTES, EVENT_BYTES = 64, read_queue.EVENT_BYTES
"""Of the kernel's struct iocb and struct io_event."""

MOST_PREDICTED = 32
"""Experts of a token; of more only the likeliest are predicted."""


@helper
def words_of_slot(arena: int, slot: int) -> int:
    return get(arena, SLOTS) + 8 * SLOT_WORDS * slot  # type: ignore[no-any-return]


@helper
def expert_of(args: int, group: int) -> int:
    """The expert of one of a batch's groups, whose words are `args`."""
    return v.load_i32(get(args, k.EXPERT_IDS) + 4 * group)  # type: ignore[no-any-return]


@helper
def slot_of(layer: int, expert: int) -> int:
    return v.load_i64(get(layer, SLOT_OF) + 8 * expert)  # type: ignore[no-any-return]


@helper
def key_at(layer: int, kind: int, expert: int) -> int:
    row = kind * get(layer, NUM_EXPERTS)
    return get(layer, KEYS) + 8 * (row + expert)  # type: ignore[no-any-return]


@helper
def set_request(
    block: int, number: int, descriptor: int, address: int, num_bytes: int, offset: int
) -> None:
    """Fill a control block, a struct iocb: data, key and flags, opcode (0: read) and priority,
    descriptor, buffer, bytes, offset, and what stays 0."""
    v.store_i64(block, number)
    v.store_i64(block + 16, descriptor << 32)
    v.store_i64(block + 24, address)
    v.store_i64(block + 32, num_bytes)
    v.store_i64(block + 40, offset)
