"""Launches attention: checks shapes, fills in the arguments, and chooses how to share the work.

Everything that reaches a task is checked here.
"""

from __future__ import annotations

import numpy as np

from dflash_protocol.errors import ContextExceeded
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.cpu.kernels import attention_split as a
from dflash_runtime.compute.cpu.kernels.attention_tasks import (
    Sharing,
    attention_kernel,
    function_words,
)
from dflash_runtime.compute.cpu.kernels.attention_tiles import BLOCK
from dflash_runtime.compute.cpu.kv_cache import LayerCache
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.kv_cache import KvType

_PARALLEL_PRODUCTS = 1 << 17
"""With fewer products, waking other threads costs more than it saves."""

_PARALLEL_VALUES = 1 << 15
"""The same for new keys and values to be stored."""

_TILE_ROWS = 128
"""Rows of a tile for which keys and values are expanded once; more would not fit the L2 cache."""

_MOST_PARTIAL_BYTES = 32 << 20

_NO_SINKS = np.empty(0, np.float32)
_NO_PAIRS: Sharing = (1, 0, 1, 0, 0, 0, 0)
"""How a call is shared that only stores."""


class CpuAttention:
    """Attention on one pool of threads; can be called from several threads at once."""

    def __init__(self, workers: Workers, scratch: Scratch) -> None:
        self._workers = workers
        self._scratch = scratch

    def compile(self, kv_type: KvType) -> None:
        """Compile everything for a cache of this type."""
        attention_kernel()
        function_words(kv_type)

    def __call__(
        self,
        q: F32Array,
        k: F32Array,
        v: F32Array,
        layer: LayerCache,
        positions: I32Array,
        scale: float,
        *,
        sinks: F32Array | None = None,
    ) -> F32Array:
        """Write k and v to the cache at `positions`, then attend over all visible positions.

        Shapes: q [T, heads, D]; k [T, kv_heads, D]; v [T, kv_heads, V]; sinks [heads]; result [T,
        heads, V].
        Raises: ContextExceeded if the chunk does not fit the cache; CheckpointMissing if rows that
        it sees have been overwritten.
        """
        kv = layer.kv
        num_tokens, num_heads, _ = q.shape
        if (
            k.shape != (num_tokens, kv.num_heads, kv.key_dim)
            or v.shape != (num_tokens, kv.num_heads, kv.value_dim)
            or q.shape[2] != kv.key_dim
            or num_heads % kv.num_heads
        ):
            raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape} do not fit {kv}")
        if sinks is None:
            sinks = _NO_SINKS
        elif sinks.shape != (num_heads,):
            raise ValueError(f"sinks are {sinks.shape} for {num_heads} heads")
        out = np.empty((num_tokens, num_heads, kv.value_dim), np.float32)
        if num_tokens == 0:
            return out
        first_position = _first_position(positions, num_tokens, layer.capacity)
        for part in layer.window.parts(first_position, num_tokens):
            self._compute(
                (q[part], k[part], v[part]),
                sinks,
                layer,
                first_position=first_position + part.start,
                scale=scale,
                out=out[part],
            )
        return out

    def store(self, k: F32Array, v: F32Array, layer: LayerCache, positions: I32Array) -> None:
        """Write k and v to the cache without attending. Shapes and errors as in `__call__`."""
        num_tokens, nothing = k.shape[0], np.empty((0, 1, 1), np.float32)
        begin = _first_position(positions, num_tokens, layer.capacity)
        for part in layer.window.parts(begin, num_tokens):
            with self._scratch.take(8 * a.NUM_ARGUMENTS, 0, 0, 0) as memory:
                attention_kernel()(
                    nothing,
                    k[part],
                    v[part],
                    _NO_SINKS,
                    nothing,
                    layer.words,
                    begin + part.start,
                    0.0,
                    _NO_PAIRS,
                    memory,
                )

    def _compute(
        self,
        new: tuple[F32Array, F32Array, F32Array],
        sinks: F32Array,
        layer: LayerCache,
        *,
        first_position: int,
        scale: float,
        out: F32Array,
    ) -> None:
        """Store and attend to rows that fit the window beside all that they see. Shapes as in
        `__call__`."""
        q, k, v = new
        kv, (num_tokens, num_heads, _) = layer.kv, q.shape
        group = num_heads // kv.num_heads
        num_visible = first_position + num_tokens
        base_split = kv.mask.first_visible(first_position) // a.SPLIT
        # A power of two that divides BLOCK: no tile crosses a block's boundary.
        tile_tokens = min(BLOCK, 1 << max(0, (_TILE_ROWS // group).bit_length() - 1))
        one_partial = a.partial_bytes(tile_tokens * group, kv.value_dim)
        num_tiles = (num_visible - 1) // tile_tokens - first_position // tile_tokens + 1
        num_pairs, num_splits = num_tiles * kv.num_heads, -(-num_visible // a.SPLIT) - base_split
        num_threads = self._workers.num_threads
        num_seen = min(num_visible, kv.mask.span or num_visible)
        num_products = num_tokens * num_heads * num_seen * (kv.key_dim + kv.value_dim)
        is_shared = num_threads > 1 and num_products >= _PARALLEL_PRODUCTS
        items_a_pair, all_partials = 1, num_pairs * num_splits * one_partial
        if not is_shared or num_pairs >= 4 * num_threads or all_partials > _MOST_PARTIAL_BYTES:
            all_partials = 0
        else:
            items_a_pair = num_splits
        one_scratch = a.scratch_bytes(tile_tokens * group, kv.key_dim, kv.value_dim)
        pool = self._workers.address
        sharing = (
            tile_tokens,
            num_pairs,
            items_a_pair,
            one_partial,
            one_scratch,
            pool if k.size + v.size >= _PARALLEL_VALUES else 0,
            pool if is_shared else 0,
        )
        with self._scratch.take(
            8 * a.NUM_ARGUMENTS, num_threads * one_scratch, all_partials, 8 * num_pairs
        ) as memory:
            attention_kernel()(
                q, k, v, sinks, out, layer.words, first_position, scale, sharing, memory
            )


def _first_position(positions: I32Array, num_tokens: int, capacity: int) -> int:
    """The first position of a chunk, after checking that it ascends by one and fits.

    Raises: ContextExceeded if it does not fit.
    """
    first = int(positions[0])
    if positions.shape != (num_tokens,) or first < 0:
        raise ValueError(f"positions are {positions.shape} from {first} for {num_tokens} tokens")
    if num_tokens > 1 and bool((positions[1:] - positions[:-1] != 1).any()):
        raise ValueError("positions must ascend by one")
    if first + num_tokens > capacity:
        raise ContextExceeded(first + num_tokens, capacity)
    return first
