"""Attention by its formula in float64, and the numbers in a device's KV cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_adapters.rope import RopePairing, RopeTable
from dflash_adapters.spec import CAUSAL, Mask
from dflash_protocol.ids import AnyArray, F64Array, I32Array
from dflash_runtime.compute.gpu.layers.kv_rows import KvRows
from dflash_runtime.compute.kv_cache import KvType


def normalised_and_rotated(
    heads: AnyArray, positions: I32Array, table: RopeTable, weight: AnyArray | None, eps: float
) -> F64Array:
    """Shapes: heads [T, heads, D]; weight [D] or None; result as heads."""
    x = heads.astype(np.float64)
    if weight is not None:
        x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
    angles = positions[:, None].astype(np.float64) * table.inv_freq
    cos, sin = (f(angles)[:, None, :] * table.scale for f in (np.cos, np.sin))
    half = table.num_rotated // 2
    if table.pairing is RopePairing.HALF_SPLIT:
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first] = a * cos - b * sin
    x[..., second] = a * sin + b * cos
    return x


def cached_numbers(rows: KvRows, dim: int) -> F64Array:
    """The numbers in a downloaded cache. Shapes: result [kv_heads, N, dim]."""
    elements = np.asarray(rows.elements).astype(np.float64)
    if rows.scales is not None:
        num_heads, num_positions, row = elements.shape
        blocks = elements.reshape(num_heads, num_positions, row // 32, 32)
        scaled: F64Array = blocks * np.asarray(rows.scales).astype(np.float64)[..., None]
        elements = scaled.reshape(num_heads, num_positions, row)
    return elements[..., :dim]


def fill(rows: KvRows, numbers: AnyArray, kv_type: KvType) -> None:
    """Store rows in an emulated cache from position 0 on. Shapes: numbers [kv_heads, n, dim]."""
    num_heads, count, dim = numbers.shape
    elements: Any = rows.elements  # numpy's, or assignable like numpy's
    scales: Any = rows.scales
    padded = np.zeros((num_heads, count, elements.shape[2]), np.float32)
    padded[..., :dim] = numbers
    if kv_type is not KvType.Q8_0:
        elements[:, :count] = padded
        return
    blocks = padded.reshape(num_heads, count, padded.shape[2] // 32, 32)
    largest = np.abs(blocks).max(axis=-1) / 127
    scales[:, :count] = largest
    bytes_ = np.rint(blocks / np.where(largest, largest, 1)[..., None])
    elements[:, :count] = bytes_.reshape(padded.shape)


def attended(
    queries: F64Array,
    keys: AnyArray,
    values: AnyArray,
    positions: I32Array,
    *,
    mask: Mask = CAUSAL,
    sinks: AnyArray | None = None,
) -> F64Array:
    """Attention over the positions that each token sees; queries are scaled already.

    Shapes: queries [T, heads, D]; keys, values [kv_heads, N, …]; sinks [heads]; result
    [T, heads, V].
    """
    keys, values = keys.astype(np.float64), values.astype(np.float64)
    group = queries.shape[1] // keys.shape[0]
    out = np.empty((*queries.shape[:2], values.shape[2]))
    for token, position in enumerate(positions.tolist()):
        first = max(position - mask.window + 1 if mask.window else 0, 0)
        if mask.chunk:
            first = max(first, position // mask.chunk * mask.chunk)
        seen = slice(first, position + 1)
        for head in range(queries.shape[1]):
            scores = keys[head // group, seen] @ queries[token, head]
            highest = scores.max() if sinks is None else max(scores.max(), sinks[head])
            weights = np.exp(scores - highest)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - highest))
            out[token, head] = weights @ values[head // group, seen] / total
    return out
