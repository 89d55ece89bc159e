"""Attention in plain numpy over one layer's cached rows, in a cache's element type."""

from __future__ import annotations

import numpy as np

from dflash_protocol.ids import AnyArray, F32Array, I32Array
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.sliding_window import WindowRows

_BLOCK = 32


class CachedRows:
    """One row of D values for each position and head, in `arrays`; here floats [N, heads, D]."""

    def __init__(self, num_heads: int, *arrays: AnyArray) -> None:
        self.num_heads, self.arrays = num_heads, arrays

    def store(self, positions: I32Array, rows: F32Array) -> None:
        """Shapes: positions [T]; rows [T, heads, D]."""
        self.arrays[0][positions] = rows

    def load(self, positions: I32Array, head: int) -> F32Array:
        """Load rows of one head. Shapes: positions [N]; result [N, D]."""
        rows: F32Array = self.arrays[0][positions, head].astype(np.float32)
        return rows


class Q8Rows(CachedRows):
    """Blocks of 32 along D: a half as scale, and signed bytes.

    Source: ggml, block_q8_0: scale = largest magnitude / 127, rounded to a half after the bytes
    have been divided by it; ties go to the even byte.
    """

    def __init__(self, capacity: int, num_heads: int, dim: int) -> None:
        self._dim = dim
        shape = capacity, num_heads, -(-dim // _BLOCK)
        self._scales = np.zeros((*shape, 1), np.float16)
        self._bytes = np.zeros((*shape, _BLOCK), np.int8)
        super().__init__(num_heads, self._scales, self._bytes)

    def store(self, positions: I32Array, rows: F32Array) -> None:
        num_tokens, num_heads, dim = rows.shape
        padded = np.zeros((num_tokens, num_heads, self._bytes.shape[2] * _BLOCK), np.float32)
        padded[..., :dim] = rows
        blocks = padded.reshape(num_tokens, num_heads, -1, _BLOCK)
        scales = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
        halves = scales.astype(np.float16)
        inverse = np.zeros_like(scales)
        # With a stored scale of 0 the bytes do not matter, and dividing might overflow.
        np.divide(np.float32(1), scales, out=inverse, where=halves != 0)
        self._scales[positions] = halves
        self._bytes[positions] = np.rint(blocks * inverse).astype(np.int8)

    def load(self, positions: I32Array, head: int) -> F32Array:
        scales = self._scales[positions, head].astype(np.float32)
        rows: F32Array = scales * self._bytes[positions, head]
        return rows.reshape(positions.size, -1)[:, : self._dim]


def cached_rows(kv_type: KvType, capacity: int, *, num_heads: int, dim: int) -> CachedRows:
    """Zeros for `capacity` positions."""
    if kv_type is KvType.Q8_0:
        return Q8Rows(capacity, num_heads, dim)
    dtype = np.float16 if kv_type is KvType.F16 else np.float32
    return CachedRows(num_heads, np.zeros((capacity, num_heads, dim), dtype))


def attend(
    q: F32Array,
    k: F32Array,
    v: F32Array,
    positions: I32Array,
    *,
    rows: tuple[CachedRows, CachedRows],
    window: WindowRows,
    scale: float,
    sinks: F32Array | None,
) -> F32Array:
    """Store new keys and values in `rows` (keys, values), then attend: host_ops.Ops.attention."""
    keys, values = rows
    out = np.empty((*q.shape[:2], v.shape[2]), np.float32)
    if not positions.size:
        return out
    for part in window.parts(int(positions[0]), positions.size):
        store(positions[part], (k[part], v[part]), rows, window=window)
        visible, is_hidden = _visible(positions[part], window)
        loaded = visible % window.num_rows
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // keys.num_heads)
            scores = (q[part, head] @ keys.load(loaded, kv_head).T) * np.float32(scale)
            scores[is_hidden] = -np.inf
            sink = None if sinks is None else sinks[head]
            out[part, head] = _mixed(scores, values.load(loaded, kv_head), sink)
    return out


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
