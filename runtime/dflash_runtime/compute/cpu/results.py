"""Where an operation's result goes: a new array, or the one that the caller has given."""

from __future__ import annotations

import numpy as np

from dflash_protocol.ids import F32Array


def result_array(shape: tuple[int, ...], out: F32Array | None) -> F32Array:
    """A new array, or `out` after a look at it."""
    if out is None:
        return np.empty(shape, np.float32)
    if out.shape != shape or not out.flags.c_contiguous:
        raise ValueError(f"out is {out.shape}, expected contiguous {shape}")
    return out
