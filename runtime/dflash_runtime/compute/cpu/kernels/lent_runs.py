"""Copies matrices of experts to other memory for threads beside an arena's batches: from a slot, if
the expert lies in one, else from the file, past the page cache.

A slot is lent: its expert may leave meanwhile, but nothing is read into the slot before the copy
has ended (`arena_tasks`). No lock is taken, which a batch may hold for as long as it computes.

Each thread has a reader: a queue of reads of its own, and memory that they come into. What is read
so takes no slot: prompts need nearly all experts, once, and would have those leave that written
tokens use. Where a read fails, or after one that has not come within the arena's limit, bytes are
taken from where the file is mapped.
"""

from __future__ import annotations

from dflash_runtime.compute.cpu.compile.compiling import helper
from dflash_runtime.compute.cpu.kernels import arena_words as w
from dflash_runtime.compute.cpu.kernels.words import get
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.atomics import atomic_add, atomic_load, atomic_store
from dflash_runtime.compute.cpu.threads import system

(
    ARENA, CONTEXT, IS_BROKEN, NUM_PENDING, MEMORY, REQUESTS, CELLS, EVENTS,
) = range(8)  # fmt: skip
"""Words of a reader: its arena's; the kernel's queue of reads; not 0: nothing more is read; reads
that have not ended; memory for these, CELL_BYTES for each; control blocks; what each is for
(CELL_WORDS); and ended ones as the kernel tells them."""
READER_WORDS = 8

IS_USED, PLACE, FROM, SIZE, MAPPED, NEEDED = range(6)
"""Of a cell: whether something is being read into it; where its bytes belong, where they come to,
how many they are, where they are mapped; and what the read must bring."""
CELL_WORDS = 6

NUM_CELLS, CELL_BYTES = 8, 256 << 10
"""Reads at once, and bytes of each at most: with as many threads as copy, enough for any disk."""
_TURN_MS = 100


@helper
def _lent(layer: int, expert: int) -> int:
    """Words of the slot in which an expert lies, whose memory stays as it is until LENT is counted
    down; 0 if it is not there as a whole."""
    place = get(layer, w.SLOT_OF) + 8 * expert
    slot = atomic_load(place)
    if slot < 0:
        return 0
    words = w.words_of_slot(get(layer, w.ARENA), slot)
    atomic_add(words + 8 * w.LENT, 1)
    # From here on the slot stays, if it is still the expert's.
    is_there = atomic_load(place) == slot and atomic_load(words + 8 * w.NUM_PENDING) == 0
    if is_there and get(words, w.HAS_FAILED) == 0:
        return words  # type: ignore[no-any-return]
    atomic_add(words + 8 * w.LENT, -1)
    return 0


@helper
def _copy_mapped(arena: int, place: int, mapped: int, size: int) -> None:
    """What could not be read."""
    v.copy_bytes(place, mapped, size)
    atomic_add(arena + 8 * w.COPIES_FAILED, 1)


@helper
def _cell(reader: int, cell: int) -> int:
    return get(reader, CELLS) + 8 * CELL_WORDS * cell  # type: ignore[no-any-return]


@helper
def _reap(reader: int) -> None:
    """Wait for a read that has ended, or for the limit, after which there are no more: what is on
    its way comes from where the file is mapped."""
    arena = get(reader, ARENA)
    end_ns, num_ended = system.monotonic_ns() + get(arena, w.LIMIT_NS), 0
    while num_ended <= 0:
        num_ended = system.ended_reads(
            get(reader, CONTEXT), NUM_CELLS, get(reader, EVENTS), _TURN_MS
        )
        if num_ended <= 0 and system.monotonic_ns() >= end_ns:
            v.store_i64(reader + 8 * IS_BROKEN, 1)
            atomic_store(arena + 8 * w.IS_BROKEN, 1)
            for index in range(NUM_CELLS):
                cell = _cell(reader, index)
                if get(cell, IS_USED) != 0:
                    _copy_mapped(arena, get(cell, PLACE), get(cell, MAPPED), get(cell, SIZE))
            return
    for event in range(num_ended):
        ended = get(reader, EVENTS) + w.EVENT_BYTES * event
        cell = _cell(reader, v.load_i64(ended))
        if v.load_i64(ended + 16) >= get(cell, NEEDED):
            v.copy_bytes(get(cell, PLACE), get(cell, FROM), get(cell, SIZE))
        else:
            _copy_mapped(arena, get(cell, PLACE), get(cell, MAPPED), get(cell, SIZE))
        v.store_i64(cell + 8 * IS_USED, 0)
        v.store_i64(reader + 8 * NUM_PENDING, get(reader, NUM_PENDING) - 1)


@helper
def _is_broken(reader: int) -> bool:
    arena = get(reader, ARENA)
    return get(reader, IS_BROKEN) != 0 or atomic_load(arena + 8 * w.IS_BROKEN) != 0  # type: ignore[no-any-return]


@helper
def _free_cell(reader: int) -> int:
    """Negative if nothing more is read."""
    while get(reader, IS_BROKEN) == 0 and get(reader, NUM_PENDING) == NUM_CELLS:
        _reap(reader)
    if _is_broken(reader):
        return -1
    free = -1
    for index in range(NUM_CELLS):
        if get(_cell(reader, index), IS_USED) == 0:
            free = index
    return free


@helper
def _begin_read(
    reader: int,
    file: tuple[int, int, int],
    useful: tuple[int, int],
    place: int,
    mapped: int,
) -> None:
    """`file`: descriptor, offset, bytes, as direct reads want them; `useful`: the bytes of those
    that are wanted, first and number."""
    descriptor, offset, num_bytes = file
    skipped, size = useful
    index = _free_cell(reader)
    if index < 0:
        _copy_mapped(get(reader, ARENA), place, mapped, size)
        return
    at, cell = get(reader, MEMORY) + CELL_BYTES * index, _cell(reader, index)
    v.store_i64(cell + 8 * PLACE, place)
    v.store_i64(cell + 8 * FROM, at + skipped)
    v.store_i64(cell + 8 * SIZE, size)
    v.store_i64(cell + 8 * MAPPED, mapped)
    v.store_i64(cell + 8 * NEEDED, skipped + size)
    block = get(reader, REQUESTS) + w.REQUEST_BYTES * index
    pointer = get(reader, REQUESTS) + w.REQUEST_BYTES * NUM_CELLS
    w.set_request(block, index, descriptor, at, num_bytes, offset)
    v.store_i64(pointer, block)
    if system.submit_read(get(reader, CONTEXT), pointer) == 1:
        v.store_i64(cell + 8 * IS_USED, 1)
        v.store_i64(reader + 8 * NUM_PENDING, get(reader, NUM_PENDING) + 1)
        atomic_add(get(reader, ARENA) + 8 * w.COPIES_READ_BYTES, num_bytes)
    else:
        _copy_mapped(get(reader, ARENA), place, mapped, size)


@helper
def copy_lent(
    reader: int, matrix: tuple[int, int], source: int, offset: int, size: int, place: int
) -> None:
    """Copy bytes of a matrix to `place`, or begin to read them: `end_copies` waits for those.

    `matrix`: words of the expert's layer, and three times the expert and which of its matrices;
    `source`: where the matrix is mapped; `offset`: of the bytes, in it.
    """
    layer, number = matrix
    arena, is_counted = get(layer, w.ARENA), offset == 0 and number % 3 == 0
    slot = _lent(layer, number // 3)
    if slot != 0:
        v.copy_bytes(place, get(get(layer, w.ADDRESSES), number) + offset, size)
        atomic_add(slot + 8 * w.LENT, -1)
        if is_counted:
            atomic_add(arena + 8 * w.COPIES_FOUND, 1)
        return
    if is_counted:
        atomic_add(arena + 8 * w.COPIES_MISSED, 1)
    in_file = get(layer, w.PLACES) + 8 * w.PLACE_WORDS * number
    begin = get(in_file, w.OFFSET) + offset
    end, at = begin + size, begin // w.BLOCK * w.BLOCK
    while at < end:
        num_bytes = min(CELL_BYTES, (end - at + w.BLOCK - 1) // w.BLOCK * w.BLOCK)
        first = max(begin, at)
        useful = first - at, min(end, at + num_bytes) - first
        done = first - begin
        file = get(in_file, w.DESCRIPTOR), at, num_bytes
        _begin_read(reader, file, useful, place + done, source + offset + done)
        at += num_bytes


@helper
def end_copies(reader: int) -> None:
    """Wait until all bytes are in their places."""
    while get(reader, NUM_PENDING) != 0 and get(reader, IS_BROKEN) == 0:
        _reap(reader)
