"""Copies runs of host memory to a device through locked memory, without the interpreter.

Scattered runs fill one piece of locked memory; those whose destinations are neighbours leave it in
one copy. Threads take transfers from a queue, in its order, and each takes the next piece of one
until none is left. They stay in compiled code while transfers follow each other: a thread that
begins or ends work in Python takes the interpreter's lock, for which launches of kernels wait.
While the device reads a thread's last piece of a transfer, the thread fills its first piece of the
next one.

A thread that has found nothing for a while says that it is asleep, looks at the queue once more,
and returns. `post` puts a transfer into the queue and then looks for threads that sleep: in either
order one of both sees the other. A thread is started by whoever has made it awake.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dflash_runtime.compute.cpu.compile.compiling import Kernel, compile_kernel, helper
from dflash_runtime.compute.cpu.kernels.lent_runs import copy_lent, end_copies
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.atomics import (
    atomic_add,
    atomic_load,
    atomic_replace,
    atomic_store,
)
from dflash_runtime.compute.cpu.simd.types import I32, I64, emit_call, i64, primitive
from dflash_runtime.compute.cpu.threads import system

SOURCE, DESTINATION, SIZE, LAYER, MATRIX = range(5)
"""Columns of the table of runs: two addresses, and bytes; and of a matrix of an expert that comes
from an arena, words of its layer, 0 for others, and its number (lent_runs)."""
COLUMNS = 5

(
    STATE, POSITION, COPY, SYNCHRONIZE, WAIT_FOR, STREAM, STAGED, HALF,
    CURRENT, PENDING, IN_FLIGHT, READER,
) = range(12)  # fmt: skip
"""Words of a thread: whether it is awake, and which transfer of the queue comes next; the driver's
functions and the stream, see `SideStream.functions`; the address of two halves of locked memory,
and which of them is filled next; the transfer that it is at, or 0; the one before, if pieces of it
are on their way, or 0, and how many; and words of its reader of an arena's experts (lent_runs), or
0."""
LANE_WORDS = 16
ASLEEP, AWAKE = range(2)

RUNS, TOTAL_BYTES, PIECE_BYTES, EVENT, NEXT, ENDED, INSIDE = range(7)
"""Words of a transfer: the address of its table; bytes of all runs, and of a piece; the event
before which nothing is written, or 0; the next piece, which all threads count up; pieces that have
arrived; threads at work on it."""
TRANSFER_WORDS = 7

HEAD, IS_CLOSED, FIRST = range(3)
"""Words of a queue: how many transfers were posted; whether threads end as soon as none is left;
the addresses of the latest ones, in turns."""
MOST_POSTED = 64

NO_MORE = 1 << 62
"""As the next piece: no further one is begun, or none was yet: the transfer was not posted."""

_IDLE_NS = 100_000_000
"""How long a thread without work waits in compiled code."""
_NAP_US = 1000
"""The longest that it, or who waits for a transfer, sleeps without looking."""


@primitive(i64, i64, i64, i64, i64, i64)
def _copy(
    builder: Any, function: Any, destination: Any, source: Any, num_bytes: Any, stream: Any
) -> Any:
    """Call ``int(destination, source, num_bytes, stream)`` of the driver."""
    arguments = [destination, source, num_bytes, stream]
    return builder.sext(emit_call(builder, I32, function, arguments), I64)


@primitive(i64, i64, i64)
def _synchronize(builder: Any, function: Any, stream: Any) -> Any:
    """Call ``int(stream)`` of the driver."""
    return builder.sext(emit_call(builder, I32, function, [stream]), I64)


@primitive(i64, i64, i64, i64)
def _wait_for(builder: Any, function: Any, stream: Any, event: Any) -> Any:
    """Call ``int(stream, event, 0)`` of the driver."""
    return builder.sext(emit_call(builder, I32, function, [stream, event, I32(0)]), I64)


@helper
def _get(words: int, index: int) -> int:
    return v.load_i64(words + 8 * index)  # type: ignore[no-any-return]


@helper
def _run(transfer: int, run: int, column: int) -> int:
    return _get(_get(transfer, RUNS), COLUMNS * run + column)  # type: ignore[no-any-return]


@helper
def _leave(transfer: int) -> None:
    """A thread has done what it can for a transfer."""
    atomic_add(transfer + 8 * INSIDE, -1)
    system.wake(transfer + 8 * ENDED)


@helper
def _settle(lane: int) -> int:
    """Wait until what is on its way has arrived. Returns the driver's status."""
    transfer = _get(lane, PENDING)
    if transfer == 0:
        return 0
    status = _synchronize(_get(lane, SYNCHRONIZE), _get(lane, STREAM))
    if status == 0:
        v.store_i64(lane + 8 * PENDING, 0)
        atomic_add(transfer + 8 * ENDED, _get(lane, IN_FLIGHT))
        _leave(transfer)
    return status  # type: ignore[no-any-return]


@helper
def _copy_pieces(transfer: int, lane: int) -> int:
    """Copy pieces until none is left; the last may still be on its way. Returns the driver's
    status: 0, or the first error."""
    stream, piece_bytes, num_begun = _get(lane, STREAM), _get(transfer, PIECE_BYTES), 0
    total_bytes = _get(transfer, TOTAL_BYTES)
    num_pieces = (total_bytes + piece_bytes - 1) // piece_bytes
    while True:
        piece = atomic_add(transfer + 8 * NEXT, 1)
        if piece >= num_pieces:
            if num_begun > 0:
                v.store_i64(lane + 8 * IN_FLIGHT, num_begun)
                v.store_i64(lane + 8 * PENDING, transfer)
                return 0
            status = _settle(lane)
            if status == 0:
                _leave(transfer)
            return status  # type: ignore[no-any-return]
        skipped, first = piece * piece_bytes, 0
        left = min(piece_bytes, total_bytes - skipped)
        while _run(transfer, first, SIZE) <= skipped:
            skipped -= _run(transfer, first, SIZE)
            first += 1
        half = _get(lane, HALF)
        staged = _get(lane, STAGED) + half * piece_bytes
        # Filled first, while the device reads the other half; then copied run by run, or several
        # at once.
        run, offset, place, end = first, skipped, staged, staged + left
        while place < end:
            size = min(_run(transfer, run, SIZE) - offset, end - place)
            source, layer = _run(transfer, run, SOURCE), _run(transfer, run, LAYER)
            if layer == 0:
                v.copy_bytes(place, source + offset, size)
            else:
                matrix = layer, _run(transfer, run, MATRIX)
                copy_lent(_get(lane, READER), matrix, source, offset, size, place)
            place, run, offset = place + size, run + 1, 0
        if _get(lane, READER) != 0:
            end_copies(_get(lane, READER))
        if num_begun > 0:
            status = _synchronize(_get(lane, SYNCHRONIZE), stream)
        else:
            status = _settle(lane)
            if status == 0 and _get(transfer, EVENT) != 0:
                status = _wait_for(_get(lane, WAIT_FOR), stream, _get(transfer, EVENT))
        if status != 0:
            return status  # type: ignore[no-any-return]
        run, offset, place = first, skipped, staged
        begin, destination = staged, _run(transfer, first, DESTINATION) + skipped
        while place < end:
            if _run(transfer, run, DESTINATION) + offset != destination + (place - begin):
                status = _copy(_get(lane, COPY), destination, begin, place - begin, stream)
                if status != 0:
                    return status  # type: ignore[no-any-return]
                begin, destination = place, _run(transfer, run, DESTINATION) + offset
            place += min(_run(transfer, run, SIZE) - offset, end - place)
            run, offset = run + 1, 0
        status = _copy(_get(lane, COPY), destination, begin, end - begin, stream)
        if status != 0:
            return status  # type: ignore[no-any-return]
        v.store_i64(lane + 8 * HALF, 1 - half)
        num_begun += 1


def _serve(queue: int, lane: int) -> int:
    """Run one thread, until it sleeps (0) or the driver's status of a copy is not 0: the caller
    calls `fail` then, and this again."""
    head, end_ns = queue + 8 * HEAD, system.monotonic_ns() + _IDLE_NS
    while True:
        num_posted, position = atomic_load(head), _get(lane, POSITION)
        if position < num_posted:
            transfer = _get(queue, FIRST + position % MOST_POSTED)
            atomic_add(transfer + 8 * INSIDE, 1)
            v.store_i64(lane + 8 * CURRENT, transfer)
            status = _copy_pieces(transfer, lane)
            if status != 0:
                return status  # type: ignore[no-any-return]
            v.store_i64(lane + 8 * CURRENT, 0)
            atomic_store(lane + 8 * POSITION, position + 1)
            end_ns = system.monotonic_ns() + _IDLE_NS
        elif _get(lane, PENDING) != 0:
            status = _settle(lane)
            if status != 0:
                return status  # type: ignore[no-any-return]
        elif _get(queue, IS_CLOSED) != 0 or system.monotonic_ns() >= end_ns:
            atomic_store(lane + 8 * STATE, ASLEEP)
            if atomic_load(head) == position:
                return 0
            if not atomic_replace(lane + 8 * STATE, ASLEEP, AWAKE):
                return 0  # another thread goes on
        else:
            system.sleep_while(head, num_posted, _NAP_US)


def _fail(lane: int) -> None:
    """No further piece of the transfers that a thread is at is begun; the thread leaves them."""
    if _get(lane, CURRENT) != 0:
        atomic_store(lane + 8 * POSITION, _get(lane, POSITION) + 1)
    for word in (CURRENT, PENDING):
        transfer = _get(lane, word)
        if transfer != 0:
            v.store_i64(lane + 8 * word, 0)
            atomic_store(transfer + 8 * NEXT, NO_MORE)
            _leave(transfer)


def _post(queue: int, transfer: int, lanes: int, num_lanes: int) -> int:
    """Put a transfer into the queue. Returns the threads that sleep and could copy pieces of it,
    one bit for each: see `_start`."""
    head, asleep = _get(queue, HEAD), 0
    v.store_i64(transfer + 8 * NEXT, 0)
    v.store_i64(queue + 8 * (FIRST + head % MOST_POSTED), transfer)
    atomic_store(queue + 8 * HEAD, head + 1)
    system.wake(queue + 8 * HEAD)
    piece_bytes = _get(transfer, PIECE_BYTES)
    num_pieces = (_get(transfer, TOTAL_BYTES) + piece_bytes - 1) // piece_bytes
    for index in range(min(num_lanes, num_pieces)):
        if atomic_load(lanes + 8 * (LANE_WORDS * index + STATE)) == ASLEEP:
            asleep |= 1 << index
    return asleep


def _start(queue: int, lanes: int, asleep: int) -> int:
    """Make threads that sleep awake. They go on where they stopped, as they may have missed a
    transfer that was posted while they fell asleep, or with the oldest that is still in the queue.
    Returns those that still slept: the caller starts them."""
    started, index = 0, 0
    while asleep >> index != 0:
        lane = lanes + 8 * LANE_WORDS * index
        if asleep >> index & 1 != 0 and atomic_replace(lane + 8 * STATE, ASLEEP, AWAKE):
            oldest = _get(queue, HEAD) - MOST_POSTED + 2  # see `_is_behind`
            atomic_store(lane + 8 * POSITION, max(_get(lane, POSITION), oldest))
            started |= 1 << index
        index += 1
    return started


def _is_behind(lanes: int, num_lanes: int, position: int) -> bool:
    """Whether a thread that is awake may still look at the transfer of this number, perhaps as the
    one before the next."""
    for index in range(num_lanes):
        lane = lanes + 8 * LANE_WORDS * index
        if atomic_load(lane + 8 * STATE) == AWAKE and _get(lane, POSITION) <= position + 1:
            return True
    return False


def _has_ended(transfer: int, limit_ns: int) -> bool:
    """Wait until all pieces of a transfer have arrived, or no further one will; False if that takes
    longer."""
    piece_bytes, end_ns = _get(transfer, PIECE_BYTES), system.monotonic_ns() + limit_ns
    num_pieces = (_get(transfer, TOTAL_BYTES) + piece_bytes - 1) // piece_bytes
    while True:
        num_ended = atomic_load(transfer + 8 * ENDED)
        if num_ended == num_pieces:
            return True
        if atomic_load(transfer + 8 * NEXT) >= NO_MORE and atomic_load(transfer + 8 * INSIDE) == 0:
            return True
        if system.monotonic_ns() >= end_ns:
            return False
        system.sleep_while(transfer + 8 * ENDED, num_ended, _NAP_US)


def compile_all() -> None:
    """Compile the functions below now, rather than in a thread that copies."""
    for compiled in (serve, fail, post, start, is_behind, has_ended):
        compiled()


@cache
def serve() -> Kernel:
    """``int(queue, lane)``, addresses: see `_serve`."""
    return compile_kernel(_serve, i64, i64)


@cache
def fail() -> Kernel:
    """``fail(lane)``: see `_fail`."""
    return compile_kernel(_fail, i64)


@cache
def post() -> Kernel:
    """``int(queue, transfer, lanes, num_lanes)``: see `_post`."""
    return compile_kernel(_post, i64, i64, i64, i64)


@cache
def start() -> Kernel:
    """``int(queue, lanes, asleep)``: see `_start`."""
    return compile_kernel(_start, i64, i64, i64)


@cache
def is_behind() -> Kernel:
    """``bool(lanes, num_lanes, position)``: see `_is_behind`."""
    return compile_kernel(_is_behind, i64, i64, i64)


@cache
def has_ended() -> Kernel:
    """``bool(transfer, limit_ns)``: see `_has_ended`."""
    return compile_kernel(_has_ended, i64, i64)
