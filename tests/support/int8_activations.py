"""Activations as int8 in numpy, as CPU kernels quantise them: one scale per 32 values, or per 16 in
step order.

Rounding uses the kernels' formula in float32, so that the bits are the same; results are float64.
"""

from __future__ import annotations

import numpy as np

from dflash_protocol.ids import F32Array, F64Array

BLOCK, STEP_BLOCK = 32, 16

_STEPS = (127, 126)


def as_int8(x: F32Array, *, of_step: bool = False) -> F64Array:
    """The values after rounding. Shapes: x and result [..., a multiple of 32]."""
    turns, steps, _ = _turns_and_steps(x, of_step)
    return (np.rint(turns).astype(np.float64) * steps).reshape(x.shape)


def half_steps(x: F32Array) -> F64Array:
    """The largest change of each value by rounding. Shapes: as in `as_int8`."""
    turns, steps, _ = _turns_and_steps(x, False)
    return np.broadcast_to(0.5 * steps, turns.shape).reshape(x.shape)


def doubtful_steps(x: F32Array, slack: float, *, of_step: bool = False) -> F64Array:
    """How far `as_int8` may be off if x is known to `slack` steps: one step near ties, else 0."""
    turns, steps, margin = _turns_and_steps(x, of_step)
    from_tie = np.abs(np.abs(turns - np.trunc(turns)) - 0.5)
    # Errors of the 32 values may also change which of the two grids is chosen.
    is_doubtful = (from_tie <= slack) | (margin <= 4 * slack)
    return np.where(is_doubtful, steps, 0.0).reshape(x.shape)


def _turns_and_steps(x: F32Array, of_step: bool) -> tuple[F32Array, F64Array, F64Array]:
    """Unrounded quants, the size of a step, and the chosen grid's lead over the other one; decode
    steps have one grid.

    Shapes: [..., blocks, 32 or 16]; [..., blocks, 1]; [..., blocks, 1], in squared steps.
    """
    assert x.dtype == np.float32
    size = STEP_BLOCK if of_step else BLOCK
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    largest = np.abs(blocks).max(axis=-1, keepdims=True, initial=0)
    if of_step:
        whole = np.float32(_STEPS[0])
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.where(largest > 0, whole / largest, np.float32(0))
        return blocks * inverse, (largest / whole).astype(np.float64), np.full_like(largest, np.inf)
    turns, errors = [], []
    for steps in _STEPS:
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.where(largest > 0, np.float32(steps) / largest, np.float32(0))
        turns.append(blocks * inverse)
        total = np.square(turns[-1] - np.rint(turns[-1]))
        while total.shape[-1] > 1:  # the kernels' order of additions
            half = total.shape[-1] // 2
            total = total[..., :half] + total[..., half:]
        errors.append(total * np.float32(1 / steps**2))
    is_second = errors[1] < errors[0]
    scales = [(largest * np.float32(1 / steps)).astype(np.float64) for steps in _STEPS]
    margin = np.abs(errors[1].astype(np.float64) - errors[0]) * _STEPS[0] ** 2
    return np.where(is_second, turns[1], turns[0]), np.where(is_second, *scales[::-1]), margin
