"""How tasks get their arguments: an array of int64, one field each."""

from __future__ import annotations

from dflash_runtime.compute.cpu import vector as v
from dflash_runtime.compute.cpu.compiling import helper


@helper
def get(args: int, field: int) -> int:
    """A field of the array at `args`."""
    return v.load_i64(args + 8 * field)  # type: ignore[no-any-return]
