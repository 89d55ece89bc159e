"""Words of 64 bits in which tasks find their arguments, one field each.

Knows nothing of what they mean.
"""

from __future__ import annotations

from dflash_runtime.compute.cpu import simd as v
from dflash_runtime.compute.cpu.compile.compiling import helper
from dflash_runtime.compute.cpu.simd.atomics import relaxed_load, relaxed_store


@helper
def get(args: int, field: int) -> int:
    """Of a description that was written before the call, and stays as it is."""
    return v.load_i64(args + 8 * field)  # type: ignore[no-any-return]


@helper
def word(args: int, index: int) -> int:
    """Of what the call is about: its kernel writes it, all threads of it read it."""
    return relaxed_load(args + 8 * index)  # type: ignore[no-any-return]


@helper
def set_word(args: int, index: int, value: int) -> None:
    """The kernel's side of `word`."""
    relaxed_store(args + 8 * index, value)
