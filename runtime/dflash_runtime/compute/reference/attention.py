"""Attention in plain numpy over one layer's cached rows."""

from __future__ import annotations

import numpy as np

from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.reference.kv_cache import CachedRows
from dflash_runtime.compute.sliding_window import WindowRows


def attend(
    q: F32Array,
    new: tuple[F32Array, F32Array],
    rows: tuple[CachedRows, CachedRows],
    *,
    window: WindowRows,
    positions: I32Array,
    scale: float,
    sinks: F32Array | None,
    out: F32Array,
) -> None:
    """Store new keys and values, then attend; see ops.Ops.attention. `new` and `rows` are (keys,
    values).

    Shapes: q [T, heads, D]; new [T, kv_heads, …]; sinks [heads].
    """
    keys, values = rows
    for part in window.parts(int(positions[0]), positions.size):
        store(positions[part], (new[0][part], new[1][part]), rows, window=window)
        _attend(q[part], keys, values, window, positions[part], scale, sinks, out[part])


def store(
    positions: I32Array,
    new: tuple[F32Array, F32Array],
    rows: tuple[CachedRows, CachedRows],
    *,
    window: WindowRows,
) -> None:
    """Store keys and values of these positions. Shapes: positions [T]; new [T, kv_heads, …]."""
    for each, values in zip(rows, new, strict=True):
        each.store(positions % window.num_rows, values)


def _attend(
    q: F32Array,
    keys: CachedRows,
    values: CachedRows,
    window: WindowRows,
    positions: I32Array,
    scale: float,
    sinks: F32Array | None,
    out: F32Array,
) -> None:
    first_visible = np.array([window.mask.first_visible(int(each)) for each in positions])
    visible = np.arange(first_visible[0], positions[-1] + 1, dtype=np.int32)
    is_hidden = (visible > positions[:, None]) | (visible < first_visible[:, None])
    num_heads = q.shape[1]
    group = num_heads // keys.num_heads
    for head in range(num_heads):
        head_keys = keys.load(visible % window.num_rows, head // group)
        head_values = values.load(visible % window.num_rows, head // group)
        scores = (q[:, head] @ head_keys.T) * np.float32(scale)
        scores[is_hidden] = -np.inf
        highest = scores.max(axis=1, keepdims=True)
        if sinks is not None:
            highest = np.maximum(highest, sinks[head])
        terms = np.exp(scores - highest)
        total = terms.sum(axis=1, keepdims=True)
        if sinks is not None:
            total += np.exp(sinks[head] - highest)
        out[:, head] = (terms @ head_values) / total
