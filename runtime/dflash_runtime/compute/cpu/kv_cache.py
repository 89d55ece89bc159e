"""The state of one sequence in host memory, in the layouts that kernels read.

Keys and values as in kernels/attention_tiles, recurrent layers' states as in kernels/delta_tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_adapters.spec import KvLayer, RecurrentLayer
from dflash_protocol.errors import CheckpointMissing, ContextExceeded
from dflash_protocol.ids import F32Array, I64Array, U8Array
from dflash_runtime.compute.cpu.kernels import attention_split as a
from dflash_runtime.compute.cpu.kernels import delta_tasks as d
from dflash_runtime.compute.cpu.kernels.attention_tasks import function_words
from dflash_runtime.compute.cpu.threads.pages import TouchSchedule, zero_pages
from dflash_runtime.compute.cpu.threads.scratch import zeros_on_lines
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.host_room import Slabs, state_values
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.sequence_state import LayerState, SequenceState
from dflash_runtime.compute.sliding_window import WindowRows

_STATE_WORDS = {
    d.MATRICES: "matrices",
    d.ROWS: "rows",
    d.KEYS: "keys",
    d.DECAYS: "decays",
    d.TOTALS: "totals",
}
"""Words of a layer, and the parts of its state at these addresses."""


class BlockedState(LayerState):
    """A layer's state: float32, every part starting on a cache line.

    Shapes: inputs [K - 1, channels], position p's in row ``p % (K - 1)``; matrices [value heads,
    Dk, V padded]; for the tokens of the current block keys [key heads, Dk, 32] and rows [value
    heads, 32, V padded], and what of them is left after the last token: decays [value heads, 32]
    and totals [value heads].
    """

    __slots__ = ("_num_matrices", "delta", "inputs", "words")

    def __init__(self, layer: RecurrentLayer) -> None:
        delta, heads = layer.delta, layer.delta.num_value_heads
        sizes = state_values(layer)
        super().__init__(zeros_on_lines(4 * sum(sizes.values())).view(np.float32))
        self.delta = delta
        self.words: I64Array = np.zeros(d.NUM_LAYER_WORDS, np.int64)
        first = 0
        for word, name in _STATE_WORDS.items():
            self.words[word] = self.values[first:].ctypes.data
            first += sizes[name]
        self._num_matrices = sizes["matrices"]
        self.inputs: F32Array = self.values[first:].reshape(
            layer.conv_kernel - 1, delta.num_channels
        )
        self.words[d.KEY_HEADS], self.words[d.VALUE_HEADS] = delta.num_key_heads, heads
        self.words[d.KEY_DIM], self.words[d.VALUE_DIM] = delta.key_dim, delta.value_dim
        self.words[d.IS_TILED] = delta.is_tiled

    def copy(self, source: F32Array, target: F32Array, num_positions: int) -> None:
        """Skips the matrices before the first block ends, and everything else at a block's end."""
        first = 0 if num_positions >= d.DELTA_BLOCK else self._num_matrices
        end = target.size
        if num_positions % d.DELTA_BLOCK == 0:
            first, end = 0, self._num_matrices
            target[end - self.inputs.size :] = source[end - self.inputs.size :]
        np.copyto(target[first:end], source[first:end])


_NO_WINDOW = 1 << 62

_TOUCHED_AHEAD = 256
"""How many positions before its first one a slab is touched, at most."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer's keys and values, as bytes, for positions below `capacity`.

    Successive positions share a slab, which has their keys and values of all heads: as many as fill
    a huge page. So a step touches few pages, and a head's rows are read in long runs.
    Shapes: slabs [N / R, bytes of R rows]: of each head R / 32 blocks of keys, then R rows of
    values; N rows are the window's, rounded up. Words: those of a layer in attention_split; they
    never change.
    """

    kv: KvLayer
    capacity: int
    window: WindowRows
    slabs: U8Array
    words: I64Array


class CpuKvCache(SequenceState):
    """Implements kv_cache.KvCache. Addresses stay as they are; memory is allocated by `touch`, or
    else where it is first written.

    `workers` touch memory together; without them, the caller does it alone.
    """

    def __init__(
        self,
        layers: Sequence[KvLayer],
        capacity: int,
        kv_type: KvType,
        recurrent: Iterable[RecurrentLayer] = (),
        workers: Workers | None = None,
    ) -> None:
        self.states = [BlockedState(each) for each in recurrent]
        super().__init__(self.states, [WindowRows(kv.mask, capacity) for kv in layers])
        self._sliding = [window for window in self.windows if window.is_window]
        self.capacity = capacity
        self.kv_type = kv_type
        self.layers = [
            _layer_cache(kv, capacity, window, kv_type)
            for kv, window in zip(layers, self.windows, strict=True)
        ]
        self._schedule = _touch_schedule(self.layers, self.states, workers)
        self.touch(0)

    def begin_step(self, position: int, num_rows: int) -> None:
        """Note that a step of successive tokens begins, which `end_step` ends.

        Raises: ContextExceeded; CheckpointMissing if the sequence does not end at `position`.
        """
        end = position + num_rows
        if end > self.capacity:
            raise ContextExceeded(end, self.capacity)
        for state in self.states:
            if position not in (0, state.num_positions):
                raise CheckpointMissing(wanted=position, kept=state.num_positions)
        for window in self._sliding:
            window.begin(position)
            window.advance(num_rows)
        for state in self.states:
            if position == 0:
                state.inputs[:] = 0
            state.conv_positions = state.delta_positions = -1  # until all of it is done

    def end_step(self, num_positions: int) -> None:
        """Note that a step has been computed, up to here."""
        for state in self.states:
            state.conv_positions = state.delta_positions = num_positions

    @property
    def can_be_cut(self) -> bool:
        """Whether rows can be overwritten and the sequence still resumed before them."""
        return not self.states and not self._sliding

    @property
    def nbytes(self) -> int:
        return sum(layer.slabs.nbytes for layer in self.layers) + self.state_bytes

    def touch(self, num_positions: int) -> None:
        self._schedule.touch(num_positions)


def _touch_schedule(
    layers: Sequence[LayerCache], states: Sequence[BlockedState], workers: Workers | None
) -> TouchSchedule:
    """States and first slabs at once, further slabs some positions before their first: of each
    layer another number, so that few steps wait for more than one."""
    wanted_after = [np.full(len(states), -1)]
    firsts = [np.array([each.values.ctypes.data for each in states], np.int64)]
    sizes = [np.array([each.values.nbytes for each in states], np.int64)]
    for index, layer in enumerate(layers):
        ahead = max(1, _TOUCHED_AHEAD * (len(layers) - index) // len(layers))
        slabs = np.arange(layer.slabs.shape[0])
        wanted_after.append(slabs * layer.words[a.SLAB_ROWS] - ahead)
        firsts.append(slabs * layer.slabs.shape[1] + layer.words[a.KEYS])
        sizes.append(np.full(slabs.size, layer.slabs.shape[1]))
    order = np.argsort(np.concatenate(wanted_after), kind="stable")
    first, size = np.concatenate(firsts), np.concatenate(sizes)
    ranges = np.stack([first, first + size], axis=1)
    return TouchSchedule(np.concatenate(wanted_after)[order], ranges[order], workers)


def _layer_cache(kv: KvLayer, capacity: int, window: WindowRows, kv_type: KvType) -> LayerCache:
    how = Slabs.of(kv, window.num_rows, kv_type)
    slabs = zero_pages(how.num_bytes).reshape(how.num_slabs, how.slab_bytes)
    window.arrays = (slabs,)
    words = np.zeros(a.NUM_LAYER_WORDS, np.int64)
    words[a.KEYS], words[a.VALUES] = slabs.ctypes.data, slabs.ctypes.data + how.key_bytes
    words[a.KV_HEADS] = kv.num_heads
    words[a.KEY_DIM], words[a.VALUE_DIM] = kv.key_dim, kv.value_dim
    words[a.SLAB_ROWS], words[a.SLAB_BYTES] = how.num_rows, how.slab_bytes
    words[a.HEAD_BYTES] = how.head_bytes
    words[a.KEY_BLOCK_BYTES] = how.key_block_bytes
    words[a.VALUE_ROW_BYTES] = how.value_row_bytes
    words[a.WINDOW_ROWS] = window.num_rows if window.is_window else _NO_WINDOW
    words[a.WINDOW], words[a.CHUNK] = kv.mask.window, kv.mask.chunk
    for index, address in function_words(kv_type).items():
        words[index] = address
    return LayerCache(kv, capacity, window, slabs, words)
