"""What int8 with one scale for each 32 values keeps of activations, in numpy.

Kernels that multiply quantised weights see activations like this. Rounding is done in float32 by
the kernels' own formula, so that the same bits come out; what follows is for float64.
"""

from __future__ import annotations

import numpy as np

from dflash_protocol.ids import F32Array, F64Array

BLOCK = 32


def as_int8(x: F32Array) -> F64Array:
    """The values that are multiplied. Shapes: x and result [..., a multiple of 32]."""
    turns, steps = _turns_and_steps(x)
    return (np.rint(turns).astype(np.float64) * steps).reshape(x.shape)


def half_steps(x: F32Array) -> F64Array:
    """Most that rounding changes a value by. Shapes: as in `as_int8`."""
    turns, steps = _turns_and_steps(x)
    return np.broadcast_to(0.5 * steps, turns.shape).reshape(x.shape)


def doubtful_steps(x: F32Array, slack: float) -> F64Array:
    """How far `as_int8` may be off if x is known to `slack` steps: one step, or mostly none."""
    turns, steps = _turns_and_steps(x)
    from_tie = np.abs(np.abs(turns - np.trunc(turns)) - 0.5)
    return np.where(from_tie <= slack, steps, 0.0).reshape(x.shape)


def _turns_and_steps(x: F32Array) -> tuple[F32Array, F64Array]:
    """Unrounded quants and the size of a step. Shapes: [..., blocks, 32]; [..., blocks, 1]."""
    assert x.dtype == np.float32
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    largest = np.abs(blocks).max(axis=-1, keepdims=True, initial=0)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    return blocks * inverse, (largest * np.float32(1 / 127)).astype(np.float64)
