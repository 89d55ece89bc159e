"""Calls of compiled code: a function, and the words that it reads.

Every operation of a model is a call: ``function(args, counter, pool)``, where `args` is the address
of an array of 64-bit words, one field each, `counter` that of a word for `claim`, and `pool` that
of the threads that may help. Arrays are words that hold their addresses. So a call can be made
once and run again and again by compiled code alone, as captured steps do.

Most functions are `run_task`: the words begin with a task, which threads run on its items, its
amount of work, and the least with which waking threads pays.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from dflash_protocol.ids import AnyArray, I64Array
from dflash_runtime.compute.cpu.compile.compiling import (
    Kernel,
    RowFunction,
    compile_kernel,
    compile_task,
    helper,
    read_only,
)
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.atomics import relaxed_load, relaxed_store
from dflash_runtime.compute.cpu.simd.types import i64
from dflash_runtime.compute.cpu.simd.untyped import types
from dflash_runtime.compute.cpu.threads import system
from dflash_runtime.compute.cpu.threads.parallel import LINE, call_task, new_counter, run_on

TASK, WORK, LEAST_SHARED = range(3)
"""The first words of calls of `run_task`."""
FIRST_FIELD = 3

STOP = LINE
"""A call in a list may stop it: it writes why to the word of this index behind `counter`."""
WAIT, HOST = 1, 2
"""The call is to be run again, or the host is to do its work instead."""

SLICE_NS = 50_000_000
"""How long calls run before Python can handle a signal."""

PARALLEL_WORK = 1 << 15
"""With less work, waking other threads costs more than it saves. A unit is a value of a row, or as
many products as take as long."""

_Start = ctypes.c_char * 0
"""No bytes: what begins where an array does, which may be empty."""
_FLOAT32 = np.dtype(np.float32)
"""Compared in less time than the type, which would become one."""


@dataclass(slots=True, eq=False)
class Call:
    """A call of compiled code. What `words` point into must stay alive until it has run.

    `per_token` are the indices of words that are proportional to the number of tokens.
    `per_position`, by index, is by how much a word grows with the position of the first token.
    `scratch`, by index, is the number of bytes of scratch memory whose address the word is to hold.
    """

    function: int
    words: list[int]
    per_token: tuple[int, ...] = ()
    per_position: tuple[tuple[int, int], ...] = ()
    scratch: tuple[tuple[int, int], ...] = ()


def task_call(
    task: RowFunction,
    work: int,
    fields: list[int],
    *,
    per_token: tuple[int, ...] = (),
    per_position: tuple[tuple[int, int], ...] = (),
    scratch: tuple[tuple[int, int], ...] = (),
) -> Call:
    """A call of `run_task`; `work` is per token too."""
    words = [task.address, work, PARALLEL_WORK, *fields]
    return Call(run_task().address, words, (WORK, *per_token), per_position, scratch)


def address(array: AnyArray, dtype: npt.DTypeLike = _FLOAT32) -> int:
    """Address of an array's first element.

    Raises: TypeError unless it is contiguous and of this type: what follows does not check.
    """
    if array.dtype != dtype:
        raise TypeError(f"{array.dtype} {array.shape} is not {np.dtype(dtype)}")
    try:
        # Takes a quarter of the time of `array.ctypes`, which is longer than some operations take.
        return ctypes.addressof(_Start.from_buffer(array))  # type: ignore[arg-type]
    except TypeError:
        if not array.flags.c_contiguous:
            raise
        return int(array.ctypes.data)  # of one that cannot be written


@lru_cache(maxsize=256)
def double_bits(value: float) -> int:
    """A float64 as a word."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


@lru_cache(maxsize=256)
def float_bits(value: float) -> int:
    """A float32 as a word."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


# -- in compiled code -----------------------------------------------------------------------------


@helper
def get(args: int, field: int) -> int:
    """A field that was written before the task started and does not change."""
    return v.load_i64(args + 8 * field)  # type: ignore[no-any-return]


@helper
def word(args: int, index: int) -> int:
    """A field that a call's function may write before threads read it."""
    return relaxed_load(args + 8 * index)  # type: ignore[no-any-return]


@helper
def set_word(args: int, index: int, value: int) -> None:
    """Write a field for `word` to read."""
    relaxed_store(args + 8 * index, value)


def _run_task(args: int, counter: int, pool: int) -> None:
    is_shared = get(args, WORK) >= get(args, LEAST_SHARED)
    run_on(pool if is_shared else 0, get(args, TASK), args, counter)


def _run_calls(calls: I64Array, first: int, end: int, counter: int, pool: int) -> int:
    """Returns the index of the first call that has not run: `end`, or less after SLICE_NS; or that
    of the call that has stopped it.

    Shapes: calls [N, 2], function and words.
    """
    end_ns = system.monotonic_ns() + SLICE_NS
    for index in range(first, end):
        call_task(calls[index, 0], calls[index, 1], counter, pool)
        if relaxed_load(counter + 8 * STOP) != 0:
            return index
        if system.monotonic_ns() >= end_ns:
            return index + 1
    return end


def _run_words(function: int, words: I64Array, pool: int) -> None:
    call_task(function, v.address_of(words), new_counter(), pool)


@cache
def run_task() -> RowFunction:
    """The function of calls that are one task."""
    return compile_task(_run_task)


@cache
def words_kernel() -> Kernel:
    """Runs one call: (function, words, pool)."""
    return compile_kernel(_run_words, i64, types.Array(i64, 1, "C"), i64)


@cache
def calls_kernel() -> Kernel:
    """Runs calls in their order: see `_run_calls`."""
    return compile_kernel(_run_calls, read_only(i64, 2), i64, i64, i64, i64)
