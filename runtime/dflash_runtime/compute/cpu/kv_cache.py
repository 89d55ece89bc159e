"""Keys and values of one sequence in host memory, in the layout that attention_tiles reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dflash_adapters.moe_spec import KvLayer
from dflash_adapters.ops import KvType
from dflash_protocol.ids import I64Array, U8Array
from dflash_runtime.compute.cpu import attention_arguments as a

LANES = 32
_LINE = 64


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer, as bytes.

    Shapes: keys [kv_heads, N / 32, a block of 32 positions]; values [kv_heads, N, a row]; words as
    in attention_arguments, those of a layer.
    """

    kv: KvLayer
    keys: U8Array
    values: U8Array
    words: I64Array


class CpuKvCache:
    """Implements ops.KvCache. Memory of blocks that were never written is never touched."""

    def __init__(self, layers: Iterable[KvLayer], capacity: int, kv_type: KvType) -> None:
        self.capacity = capacity
        self.kv_type = kv_type
        self.layers = [_layer_cache(kv, capacity, kv_type) for kv in layers]


def _layer_cache(kv: KvLayer, capacity: int, kv_type: KvType) -> LayerCache:
    num_blocks = -(-capacity // LANES)
    key_dim, value_dim = kv.key_dim, _padded(kv.value_dim)
    if kv_type is KvType.Q8_0:
        key_block_bytes, row_bytes = _padded(key_dim) * 34, value_dim // LANES * 34
    else:
        size = 2 if kv_type is KvType.F16 else 4
        key_block_bytes, row_bytes = key_dim * LANES * size, value_dim * size
    keys = zeros_on_lines(kv.num_heads, num_blocks, key_block_bytes)
    values = zeros_on_lines(kv.num_heads, num_blocks * LANES, row_bytes)
    words = np.zeros(a.NUM_OF_LAYER, np.int64)
    words[a.KEYS], words[a.VALUES] = keys.ctypes.data, values.ctypes.data
    words[a.KV_HEADS], words[a.KEY_DIM], words[a.VALUE_DIM] = kv.num_heads, key_dim, kv.value_dim
    words[a.KEY_HEAD_BYTES], words[a.KEY_BLOCK_BYTES] = keys.strides[:2]
    words[a.VALUE_HEAD_BYTES], words[a.VALUE_ROW_BYTES] = values.strides[:2]
    return LayerCache(kv, keys, values, words)


def _padded(dim: int) -> int:
    return -(-dim // LANES) * LANES


def zeros_on_lines(*shape: int) -> U8Array:
    """Bytes that begin with a cache line; memory is taken when it is first written."""
    num_bytes = int(np.prod(shape, dtype=np.int64))
    room = np.zeros(num_bytes + _LINE, np.uint8)
    first = -room.ctypes.data % _LINE
    return room[first : first + num_bytes].reshape(shape)
