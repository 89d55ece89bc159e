"""One recurrent layer's state, in the layout that delta_tasks reads."""

from __future__ import annotations

import numpy as np

from dflash_adapters.spec import RecurrentLayer
from dflash_protocol.ids import F32Array, I64Array
from dflash_runtime.compute.cpu.kernels import delta_tasks as d
from dflash_runtime.compute.cpu.threads.scratch import zeros_on_lines
from dflash_runtime.compute.sequence_state import LayerState


class BlockedState(LayerState):
    """A layer's state: float32, every part starting on a cache line.

    Shapes: inputs [K - 1, channels], position p's in row ``p % (K - 1)``; matrices [value heads,
    Dk, V padded]; for the tokens of the current block keys [key heads, Dk, 32] and rows [value
    heads, 32, V padded], and what of them is left after the last token: decays [value heads, 32]
    and totals [value heads].
    """

    __slots__ = ("_num_matrices", "delta", "inputs", "words")

    def __init__(self, layer: RecurrentLayer) -> None:
        delta = layer.delta
        heads, padded = delta.num_value_heads, -(-delta.value_dim // 32) * 32
        sizes = {
            d.MATRICES: heads * delta.key_dim * padded,
            d.ROWS: heads * d.DELTA_BLOCK * padded,
            d.KEYS: delta.num_key_heads * delta.key_dim * d.DELTA_BLOCK,
            d.DECAYS: heads * d.DELTA_BLOCK,
            d.TOTALS: -(-heads // 32) * 32,
        }
        num_inputs = (layer.conv_kernel - 1) * delta.num_channels
        num_values = sum(sizes.values()) + num_inputs
        super().__init__(zeros_on_lines(4 * num_values).view(np.float32))
        self.delta = delta
        self.words: I64Array = np.zeros(d.NUM_LAYER_WORDS, np.int64)
        first = 0
        for word, size in sizes.items():
            self.words[word] = self.values[first:].ctypes.data
            first += size
        self._num_matrices = sizes[d.MATRICES]
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
