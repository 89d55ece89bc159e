"""Attention in plain numpy over one layer's cached rows."""

from __future__ import annotations

import numpy as np

from dflash_protocol.ids import AnyArray, F32Array, I32Array
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
        visible, is_hidden = _visible(positions[part], window)
        loaded = visible % window.num_rows
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // keys.num_heads)
            scores = (q[part, head] @ keys.load(loaded, kv_head).T) * np.float32(scale)
            scores[is_hidden] = -np.inf
            sink = None if sinks is None else sinks[head]
            out[part, head] = _mixed(scores, values.load(loaded, kv_head), sink)


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


def _visible(positions: I32Array, window: WindowRows) -> tuple[I32Array, AnyArray]:
    """The positions that some token of a chunk sees, and which of them each token does not see.

    Shapes: positions [T]; results [P], [T, P] bool.
    """
    first_visible = np.array([window.mask.first_visible(int(each)) for each in positions])
    visible = np.arange(first_visible[0], positions[-1] + 1, dtype=np.int32)
    return visible, (visible > positions[:, None]) | (visible < first_visible[:, None])


def _mixed(scores: F32Array, values: F32Array, sink: np.float32 | None) -> F32Array:
    """Softmax over one head's scores, with its sink, times the values.

    Shapes: scores [T, P]; values [P, V]; result [T, V].
    """
    highest = scores.max(axis=1, keepdims=True)
    if sink is not None:
        highest = np.maximum(highest, sink)
    terms = np.exp(scores - highest)
    total = terms.sum(axis=1, keepdims=True)
    if sink is not None:
        total += np.exp(sink - highest)
    result: F32Array = (terms @ values) / total
    return result
