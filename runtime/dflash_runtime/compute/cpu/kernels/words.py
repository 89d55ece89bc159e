"""Arguments of tasks: arrays of 64-bit words, one field each.

A kernel that Python calls fills in the words of a call, then runs tasks that read them. What calls
have in common, as a layer's sizes and addresses, comes as one array of words that it copies; arrays
that change from call to call are arguments, so that the compiled signature checks them; `memory` is
what `Scratch.take` gives: addresses of the words, of scratch memory, and last of a counter.
"""

from __future__ import annotations

from dflash_runtime.compute.cpu.compile.compiling import helper
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.atomics import relaxed_load, relaxed_store


@helper
def get(args: int, field: int) -> int:
    """A field that was written before the task started and does not change."""
    return v.load_i64(args + 8 * field)  # type: ignore[no-any-return]


@helper
def word(args: int, index: int) -> int:
    """A field that the call's kernel writes and all its threads read."""
    return relaxed_load(args + 8 * index)  # type: ignore[no-any-return]


@helper
def set_word(args: int, index: int, value: int) -> None:
    """Write a field for `word` to read."""
    relaxed_store(args + 8 * index, value)
