"""One layer's rows of keys or values, in a cache's element type."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dflash_protocol.ids import AnyArray, F32Array, I32Array
from dflash_runtime.compute.kv_cache import KvType

_BLOCK = 32


class CachedRows(Protocol):
    """One row of D values for each position and head."""

    @property
    def arrays(self) -> tuple[AnyArray, ...]:
        """The arrays that hold the rows."""

    @property
    def num_heads(self) -> int: ...

    def store(self, positions: I32Array, rows: F32Array) -> None:
        """Shapes: positions [T]; rows [T, heads, D]."""

    def load(self, positions: I32Array, head: int) -> F32Array:
        """Load rows of one head. Shapes: positions [N]; result [N, D]."""


def cached_rows(kv_type: KvType, capacity: int, *, num_heads: int, dim: int) -> CachedRows:
    """Zeros for `capacity` positions."""
    if kv_type is KvType.Q8_0:
        return Q8Rows(capacity, num_heads, dim)
    dtype = np.float16 if kv_type is KvType.F16 else np.float32
    return FloatRows(np.zeros((capacity, num_heads, dim), dtype))


class FloatRows:
    """Implements CachedRows with one array [N, heads, D]."""

    def __init__(self, values: AnyArray) -> None:
        self._values = values

    @property
    def arrays(self) -> tuple[AnyArray, ...]:
        return (self._values,)

    @property
    def num_heads(self) -> int:
        return int(self._values.shape[1])

    def store(self, positions: I32Array, rows: F32Array) -> None:
        self._values[positions] = rows

    def load(self, positions: I32Array, head: int) -> F32Array:
        rows: F32Array = self._values[positions, head].astype(np.float32)
        return rows


class Q8Rows:
    """Implements CachedRows with blocks of 32 along D: a half as scale, and signed bytes.

    Source: ggml, block_q8_0: scale = largest magnitude / 127, rounded to a half after the bytes
    have been divided by it; ties go to the even byte.
    """

    def __init__(self, capacity: int, num_heads: int, dim: int) -> None:
        self._dim = dim
        num_blocks = -(-dim // _BLOCK)
        self._scales = np.zeros((capacity, num_heads, num_blocks, 1), np.float16)
        self._bytes = np.zeros((capacity, num_heads, num_blocks, _BLOCK), np.int8)

    @property
    def arrays(self) -> tuple[AnyArray, ...]:
        return self._scales, self._bytes

    @property
    def num_heads(self) -> int:
        return int(self._bytes.shape[1])

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
