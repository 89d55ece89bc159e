"""Keys and values of one sequence in host memory, in the layout that attention_tiles reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_adapters.spec import KvLayer, RecurrentLayer
from dflash_protocol.ids import I64Array, U8Array
from dflash_runtime.compute.cpu.kernels import attention_split as a
from dflash_runtime.compute.cpu.kernels.attention_tasks import function_words
from dflash_runtime.compute.cpu.recurrent_state import BlockedState
from dflash_runtime.compute.cpu.threads.scratch import zeros_on_lines
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.sequence_state import SequenceState
from dflash_runtime.compute.sliding_window import WindowRows

LANES = 32
_NO_WINDOW = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer's keys and values, as bytes, for positions below `capacity`.

    Shapes: keys [kv_heads, N / 32, a block of 32 positions]; values [kv_heads, N, a row], N rows
    being the window's; words: those of a layer in attention_arguments.
    """

    kv: KvLayer
    capacity: int
    window: WindowRows
    keys: U8Array
    values: U8Array
    words: I64Array


class CpuKvCache(SequenceState):
    """Implements kv_cache.KvCache. Memory of blocks is untouched until they are written."""

    def __init__(
        self,
        layers: Sequence[KvLayer],
        capacity: int,
        kv_type: KvType,
        recurrent: Iterable[RecurrentLayer] = (),
    ) -> None:
        self.states = [BlockedState(each) for each in recurrent]
        super().__init__(self.states, [WindowRows(kv.mask, capacity) for kv in layers])
        self.capacity = capacity
        self.kv_type = kv_type
        self.layers = [
            _layer_cache(kv, capacity, window, kv_type)
            for kv, window in zip(layers, self.windows, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        rows = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)
        return rows + self.state_bytes


def _layer_cache(kv: KvLayer, capacity: int, window: WindowRows, kv_type: KvType) -> LayerCache:
    num_blocks = -(-window.num_rows // LANES)
    key_dim, value_dim = kv.key_dim, _padded(kv.value_dim)
    if kv_type is KvType.Q8_0:
        key_block_bytes, row_bytes = _padded(key_dim) * 34, value_dim // LANES * 34
    else:
        size = 2 if kv_type is KvType.F16 else 4
        key_block_bytes, row_bytes = key_dim * LANES * size, value_dim * size
    keys = zeros_on_lines(kv.num_heads, num_blocks, key_block_bytes)
    values = zeros_on_lines(kv.num_heads, num_blocks * LANES, row_bytes)
    window.arrays = keys, values
    words = np.zeros(a.NUM_LAYER_WORDS, np.int64)
    words[a.KEYS], words[a.VALUES] = keys.ctypes.data, values.ctypes.data
    words[a.KV_HEADS], words[a.KEY_DIM], words[a.VALUE_DIM] = kv.num_heads, key_dim, kv.value_dim
    words[a.KEY_HEAD_BYTES], words[a.KEY_BLOCK_BYTES] = keys.strides[:2]
    words[a.VALUE_HEAD_BYTES], words[a.VALUE_ROW_BYTES] = values.strides[:2]
    words[a.WINDOW_ROWS] = window.num_rows if window.is_window else _NO_WINDOW
    words[a.WINDOW], words[a.CHUNK] = kv.mask.window, kv.mask.chunk
    for index, address in function_words(kv_type).items():
        words[index] = address
    return LayerCache(kv, capacity, window, keys, values, words)


def _padded(dim: int) -> int:
    return -(-dim // LANES) * LANES
