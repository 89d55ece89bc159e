"""What a call is about, as words of 64 bits: its kernel writes them, all threads of it read them.

Knows nothing of what they mean.
"""

from __future__ import annotations

from dflash_runtime.compute.cpu.compiling import helper
from dflash_runtime.compute.cpu.vector.atomics import relaxed_load, relaxed_store


@helper
def word(args: int, index: int) -> int:
    return relaxed_load(args + 8 * index)  # type: ignore[no-any-return]


@helper
def set_word(args: int, index: int, value: int) -> None:
    relaxed_store(args + 8 * index, value)
