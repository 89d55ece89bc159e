"""Copies runs of host memory to a device through locked memory, without the interpreter.

Scattered runs fill one piece of locked memory; those whose destinations are neighbours leave it in
one copy. Each thread of a transfer runs this function and takes the next piece until none is left.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dflash_protocol.ids import I64Array
from dflash_runtime.compute.cpu.compile.compiling import Kernel, compile_kernel, read_only
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.atomics import atomic_add
from dflash_runtime.compute.cpu.simd.types import I32, I64, emit_call, i64, primitive

SOURCE, DESTINATION, SIZE = range(3)
"""Columns of the table of runs: two addresses, and bytes."""

COPY, SYNCHRONIZE, STREAM, STAGED, PIECE_BYTES = range(5)
"""Words of a thread: the driver's functions and the stream, see `SideStream.functions`; the address
of two halves of locked memory, and the bytes of one."""

NEXT, TOTAL_BYTES = range(2)
"""Words of a transfer: the next piece, which all of its threads count up, and bytes of all runs."""

NO_MORE = 1 << 62
"""As the next piece: no further one is begun."""


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


def _copy_runs(runs: I64Array, transfer: int, lane: I64Array) -> int:
    """Returns the driver's status: 0, or the first error. No copy is under way then unless there
    was an error.

    Shapes: runs [N, 3]; lane [5]; `transfer` is the address of its words.
    """
    stream, piece_bytes, half = lane[STREAM], lane[PIECE_BYTES], 0
    total_bytes = v.load_i64(transfer + 8 * TOTAL_BYTES)
    num_pieces = (total_bytes + piece_bytes - 1) // piece_bytes
    while True:
        piece = atomic_add(transfer + 8 * NEXT, 1)
        if piece >= num_pieces:
            return _synchronize(lane[SYNCHRONIZE], stream)  # type: ignore[no-any-return]
        skipped, first = piece * piece_bytes, 0
        left = min(piece_bytes, total_bytes - skipped)
        while runs[first, SIZE] <= skipped:
            skipped -= runs[first, SIZE]
            first += 1
        staged = lane[STAGED] + half * piece_bytes
        # Filled first, while the device reads the other half; then copied run by run, or several
        # at once.
        run, offset, place, end = first, skipped, staged, staged + left
        while place < end:
            size = min(runs[run, SIZE] - offset, end - place)
            v.copy_bytes(place, runs[run, SOURCE] + offset, size)
            place, run, offset = place + size, run + 1, 0
        status = _synchronize(lane[SYNCHRONIZE], stream)
        if status != 0:
            return status  # type: ignore[no-any-return]
        run, offset, place = first, skipped, staged
        begin, destination = staged, runs[first, DESTINATION] + skipped
        while place < end:
            if runs[run, DESTINATION] + offset != destination + (place - begin):
                status = _copy(lane[COPY], destination, begin, place - begin, stream)
                if status != 0:
                    return status  # type: ignore[no-any-return]
                begin, destination = place, runs[run, DESTINATION] + offset
            place += min(runs[run, SIZE] - offset, end - place)
            run, offset = run + 1, 0
        status = _copy(lane[COPY], destination, begin, end - begin, stream)
        if status != 0:
            return status  # type: ignore[no-any-return]
        half = 1 - half


@cache
def copy_runs() -> Kernel:
    """``int(runs, transfer, lane)``: see `_copy_runs`."""
    return compile_kernel(_copy_runs, read_only(i64, 2), i64, read_only(i64, 1))
