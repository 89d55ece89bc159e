"""Attention's calls: checks shapes, fills in the words, and takes the memory to share the work.

Everything that reaches a task is checked here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from dflash_protocol.errors import ContextExceeded
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.cpu.kernels import attention_split as a
from dflash_runtime.compute.cpu.kernels.attention_tasks import function_words, run_attention
from dflash_runtime.compute.cpu.kernels.attention_tiles import BLOCK
from dflash_runtime.compute.cpu.kernels.words import Call, address, float_bits
from dflash_runtime.compute.cpu.kv_cache import LayerCache
from dflash_runtime.compute.kv_cache import KvType

_PARALLEL_PRODUCTS = 1 << 17
"""With fewer products, waking other threads costs more than it saves."""

_PARALLEL_VALUES = 1 << 15
"""The same for new keys and values to be stored."""

_TILE_ROWS = 128
"""Rows of a tile for which keys and values are expanded once; more would not fit the L2 cache."""

_MOST_PARTIAL_BYTES = 32 << 20


def compile_attention(kv_type: KvType) -> None:
    """Compile everything for a cache of this type."""
    run_attention()
    function_words(kv_type)


def attend(
    run: Callable[[Call], None],
    rows: tuple[F32Array, F32Array, F32Array],
    layer: LayerCache,
    positions: I32Array,
    *,
    scale: float,
    sinks: F32Array | None,
    num_threads: int,
) -> F32Array:
    """Write k and v to the cache at `positions`, then attend over all visible positions.

    Shapes: rows q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, V]; sinks [heads]; result [T,
    heads, V].
    Raises: ContextExceeded if the chunk does not fit the cache; CheckpointMissing if rows that
    it sees have been overwritten.
    """
    q, k, v = rows
    num_tokens, num_heads, _ = q.shape
    out = np.empty((num_tokens, num_heads, layer.kv.value_dim), np.float32)
    if num_tokens == 0:
        return out
    first = _first_position(positions, num_tokens, layer.capacity)
    for part in layer.window.parts(first, num_tokens):
        some, begin = (q[part], k[part], v[part]), first + part.start
        call = attention_call(
            some, layer, out[part], begin, scale=scale, sinks=sinks, num_threads=num_threads
        )
        run(call)
    return out


def store(
    run: Callable[[Call], None], k: F32Array, v: F32Array, layer: LayerCache, positions: I32Array
) -> None:
    """Write k and v to the cache without attending. Shapes and errors as of `attend`."""
    begin = _first_position(positions, k.shape[0], layer.capacity)
    for part in layer.window.parts(begin, k.shape[0]):
        words = _words(layer, k[part], v[part], begin + part.start)
        run(Call(run_attention().address, words))


def attention_call(
    rows: tuple[F32Array, F32Array, F32Array],
    layer: LayerCache,
    out: F32Array,
    first_position: int,
    *,
    scale: float,
    sinks: F32Array | None,
    num_threads: int,
    end_position: int | None = None,
) -> Call:
    """Store and attend to queries, keys and values of successive tokens, which fit the layer's
    window beside all that they see. `end_position`: where the last call with these words may end,
    if not with these tokens. Shapes: as of `attend`; T > 0."""
    q, k, v = rows
    kv, (num_tokens, num_heads, _) = layer.kv, q.shape
    if (
        k.shape != (num_tokens, kv.num_heads, kv.key_dim)
        or v.shape != (num_tokens, kv.num_heads, kv.value_dim)
        or q.shape[2] != kv.key_dim
        or num_heads % kv.num_heads
    ):
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape} do not fit {kv}")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks are {sinks.shape} for {num_heads} heads")
    group = num_heads // kv.num_heads
    # A power of two that divides BLOCK: no tile crosses a block's boundary.
    tile_tokens = min(BLOCK, 1 << max(0, (_TILE_ROWS // group).bit_length() - 1))
    one_partial = a.partial_bytes(tile_tokens * group, kv.value_dim)
    one_scratch = a.scratch_bytes(tile_tokens * group, kv.key_dim, kv.value_dim)
    end = first_position + num_tokens
    num_tiles = (end - 1) // tile_tokens - first_position // tile_tokens + 1
    if end_position is not None:
        end, num_tiles = max(end, end_position), num_tiles + 1
    num_splits = -(-min(end, kv.mask.span or end) // a.SPLIT) + 1
    num_pairs, partials = num_tiles * kv.num_heads, 0
    if num_threads > 1 and num_pairs < 2 * a.ENOUGH_PAIRS * num_threads:
        partials = min(num_pairs * num_splits * one_partial, _MOST_PARTIAL_BYTES)
    words = _words(layer, k, v, first_position)
    words[a.SPAN], words[a.NUM_THREADS] = kv.mask.span or 0, num_threads
    words[a.TILE_TOKENS], words[a.PARTIAL_BYTES] = tile_tokens, one_partial
    words[a.SCRATCH_BYTES], words[a.PARTIALS_BYTES] = one_scratch, partials
    words[a.QUERIES], words[a.OUT], words[a.NUM_HEADS] = address(q), address(out), num_heads
    words[a.SINKS] = 0 if sinks is None else address(sinks)
    words[a.SCALE_BITS] = float_bits(scale)
    return Call(
        run_attention().address,
        words,
        per_token=(a.NUM_TOKENS,),
        per_position=((a.FIRST_POSITION, 1),),
        scratch=(
            (a.SCRATCH, num_threads * one_scratch),
            (a.PARTIALS, partials),
            (a.DONE, 8 * num_pairs),
        ),
    )


def _words(layer: LayerCache, k: F32Array, v: F32Array, first_position: int) -> list[int]:
    """The words of a call that only stores."""
    words = [*layer.words.tolist(), *[0] * (a.ITEMS_A_PAIR + 1 - a.NUM_LAYER_WORDS)]
    words[a.NEW_KEYS], words[a.NEW_VALUES] = address(k), address(v)
    words[a.NUM_TOKENS], words[a.FIRST_POSITION] = k.shape[0], first_position
    words[a.LEAST_SHARED_VALUES] = _PARALLEL_VALUES
    words[a.LEAST_SHARED_PRODUCTS] = _PARALLEL_PRODUCTS
    return words


def _first_position(positions: I32Array, num_tokens: int, capacity: int) -> int:
    """The first position of a chunk, after checking that it ascends by one and fits.

    Raises: ContextExceeded if it does not fit.
    """
    first = int(positions[0])
    if positions.shape != (num_tokens,) or first < 0:
        raise ValueError(f"positions are {positions.shape} from {first} for {num_tokens} tokens")
    if num_tokens > 1 and not _ascend_by_one(positions.tobytes()):
        raise ValueError("positions must ascend by one")
    if first + num_tokens > capacity:
        raise ContextExceeded(first + num_tokens, capacity)
    return first


@lru_cache(maxsize=8)
def _ascend_by_one(positions: bytes) -> bool:
    """Whether int32 positions do. All layers of a step ask for the same ones."""
    return bool((np.diff(np.frombuffer(positions, np.int32)) == 1).all())
