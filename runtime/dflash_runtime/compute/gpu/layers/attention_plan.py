"""What attention is compiled for and how its work is cut: shapes, context buckets, splits, scratch.

Numbers only. What decides the bits of a result (splits, tiles) depends on the model's shape and the
context's bucket, never on the device or the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_adapters.rope import RopePairing
from dflash_adapters.spec import KvLayer
from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.gpu.launch.decode_arrays import check_tokens
from dflash_runtime.compute.gpu.layers.kv_rows import row_elements
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.step_order import MOST_TOKENS, padded_columns

FIRST_BUCKET = 1024
"""Positions of the smallest context bucket; each further one has four times as many."""

_SPLIT_BLOCKS = 512
"""Blocks of a full bucket: more than any device runs at once."""

_SMALLEST_SPLIT = 64
"""Keys of a block's four warps, a tile each."""

_WARP_ROWS, _KEY_WARPS = 8, 4
_CHUNK_WARPS, _STORE_WARPS, _MERGE_THREADS = 4, 8, 256
_STAGE_KEYS = 32

_KV_TYPE_NUMBERS = {KvType.F32: 0, KvType.F16: 1, KvType.Q8_0: 2}


def context_bucket(num_positions: int) -> int:
    """The bucket of a context, positions of the step itself included."""
    bucket = FIRST_BUCKET
    while bucket < num_positions:
        bucket *= 4
    return bucket


def _shared_columns(elements: int) -> int:
    """Elements from one query (or key) in shared memory to the next; see attention_heads.cuh."""
    columns = -(-elements // 32) * 32
    return columns + (32 if columns % 64 == 0 else 0)


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer's shape, and how it is computed: with tensor cores or without."""

    num_heads: int
    kv: KvLayer
    kv_type: KvType
    pairing: RopePairing
    num_rotated: int
    use_mma: bool
    is_tempered: bool = False
    """Queries have a factor besides, of their position."""
    has_sinks: bool = False
    window_rows: int = 0
    """Positions that the cache has rows of, if it is a window."""

    def __post_init__(self) -> None:
        """Raises: SettingsError for what the kernels cannot take."""
        if self.kv.num_heads < 1 or self.num_heads < 1 or self.num_heads % self.kv.num_heads:
            raise SettingsError(
                f"{self.num_heads} heads do not share {self.kv.num_heads} key/value heads"
            )
        row_elements(self.kv_type, self.kv.value_dim)
        row_elements(self.kv_type, self.kv.key_dim)
        if self.num_rotated % 2 or not 0 <= self.num_rotated <= self.kv.key_dim:
            raise SettingsError(f"{self.num_rotated} of {self.kv.key_dim} elements rotated")
        if self.use_mma and self.kv_type is KvType.F32:
            raise SettingsError("tensor cores do not take a float32 cache")
        if self.window_rows and self.most_tokens < MOST_TOKENS:
            raise SettingsError(f"a window of {self.window_rows} positions of {self.kv.mask}")

    @property
    def most_tokens(self) -> int:
        """Positions of a window that may be written at once without losing what the first sees."""
        return self.window_rows - (self.kv.mask.span or 1) + 1

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.kv.num_heads

    @property
    def key_row(self) -> int:
        return row_elements(self.kv_type, self.kv.key_dim)

    @property
    def value_row(self) -> int:
        return row_elements(self.kv_type, self.kv.value_dim)

    @property
    def query_columns(self) -> int:
        """Elements of a query that a chunk's attention reads."""
        return -(-self.key_row // 32) * 32

    @property
    def query_bytes(self) -> int:
        """Bytes of such a query."""
        return self.query_columns * (2 if self.use_mma else 4)

    def defines(self) -> dict[str, int]:
        return {
            "NUM_HEADS": self.num_heads,
            "NUM_KV_HEADS": self.kv.num_heads,
            "KEY_DIM": self.kv.key_dim,
            "VALUE_DIM": self.kv.value_dim,
            "KEY_ROW": self.key_row,
            "VALUE_ROW": self.value_row,
            "ROTATED": self.num_rotated,
            "INTERLEAVED": int(self.pairing is RopePairing.INTERLEAVED),
            "KV_TYPE": _KV_TYPE_NUMBERS[self.kv_type],
            "USE_MMA": int(self.use_mma),
            "WINDOW": self.kv.mask.window,
            "CHUNK": self.kv.mask.chunk,
            "IS_TEMPERED": int(self.is_tempered),
            "HAS_SINKS": int(self.has_sinks),
            "WINDOW_ROWS": self.window_rows,
        }


@dataclass(frozen=True)
class DecodePlan:
    """How a step of `num_tokens` is computed over contexts of up to `bucket` positions."""

    shape: AttentionShape
    num_tokens: int
    bucket: int
    lanes: int = 32
    """Lanes of the device's logical warps; decides speed, not bits."""

    def __post_init__(self) -> None:
        check_tokens(self.num_tokens)
        if self.bucket != context_bucket(self.bucket):
            raise ValueError(f"{self.bucket} positions are no bucket")

    @property
    def split_keys(self) -> int:
        """Positions of one block, a power of two."""
        wanted = self.bucket * self.shape.kv.num_heads // _SPLIT_BLOCKS
        return max(_SMALLEST_SPLIT, 1 << max(0, wanted - 1).bit_length())

    @property
    def num_splits(self) -> int:
        return -(-self.bucket // self.split_keys)

    @property
    def row_warps(self) -> int:
        """Rows of warps in a block that read the same keys: as many as registers allow. Eight
        warps of 64 lanes would have 128 registers each on gfx906, where they need 200."""
        if self.lanes == 64:
            return 1
        row_tiles = -(-self.num_tokens * self.shape.group // _WARP_ROWS)
        row = max(self.shape.key_row, self.shape.value_row)
        most = 2 if not self.shape.use_mma or row > 128 else 3 if row > 64 else 4
        num_blocks = -(-row_tiles // most)
        return -(-row_tiles // num_blocks)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.grid_of(self.row_warps)

    def grid_of(self, row_warps: int) -> tuple[int, int, int]:
        """The grid with so many rows of warps in a block."""
        rows = self.num_tokens * self.shape.group
        num_blocks = -(-rows // (_WARP_ROWS * row_warps))
        return self.num_splits, self.shape.kv.num_heads, num_blocks

    def threads(self, lanes: int) -> int:
        return _KEY_WARPS * self.row_warps * lanes

    @property
    def merge_grid(self) -> tuple[int, int, int]:
        return self.shape.num_heads, self.num_tokens, 1

    @property
    def merge_threads(self) -> int:
        return _MERGE_THREADS

    @property
    def statistics_bytes(self) -> int:
        return 8 * self._num_partials

    @property
    def scratch_bytes(self) -> int:
        """Partial results and then their statistics."""
        return 4 * self.shape.value_row * self._num_partials + self.statistics_bytes

    @property
    def _num_partials(self) -> int:
        return self.num_tokens * self.shape.num_heads * self.num_splits

    def defines(self) -> dict[str, int]:
        return self.shape.defines() | {
            "NUM_TOKENS": self.num_tokens,
            "SPLIT_KEYS": self.split_keys,
            "NUM_SPLITS": self.num_splits,
            "ROW_WARPS": self.row_warps,
        }

    def merge_defines(self) -> dict[str, int]:
        names = (
            "NUM_HEADS",
            "VALUE_DIM",
            "VALUE_ROW",
            "SPLIT_KEYS",
            "NUM_SPLITS",
            "WINDOW",
            "CHUNK",
            "HAS_SINKS",
        )
        defines = self.defines()
        columns = self.shape.num_heads * self.shape.kv.value_dim
        return {name: defines[name] for name in names} | {"PADDED_COLUMNS": padded_columns(columns)}


@dataclass(frozen=True)
class PrefillPlan:
    """How a chunk is computed; `row_tiles` (only with tensor cores) decides speed, not bits."""

    shape: AttentionShape
    row_tiles: int

    @staticmethod
    def of(shape: AttentionShape, num_tokens: int, *, num_multiprocessors: int) -> PrefillPlan:
        """A plan with large blocks, unless there would be too few of them."""
        if not shape.use_mma or shape.value_row > 128:
            return PrefillPlan(shape, 1)
        large = PrefillPlan(shape, 2)
        num_blocks = large.grid(num_tokens)[0] * shape.kv.num_heads
        return large if num_blocks >= num_multiprocessors else PrefillPlan(shape, 1)

    @property
    def block_rows(self) -> int:
        rows = 16 * self.row_tiles if self.shape.use_mma else _WARP_ROWS
        return _CHUNK_WARPS * rows

    def grid(self, num_tokens: int) -> tuple[int, int, int]:
        return -(-num_tokens * self.shape.group // self.block_rows), self.shape.kv.num_heads, 1

    def threads(self, lanes: int) -> int:
        return _CHUNK_WARPS * lanes

    def store_grid(self, num_tokens: int) -> tuple[int, int, int]:
        num_heads = self.shape.num_heads + 2 * self.shape.kv.num_heads
        return num_tokens, -(-num_heads // _STORE_WARPS), 1

    def store_threads(self, lanes: int) -> int:
        return _STORE_WARPS * lanes

    def scratch_bytes(self, num_tokens: int) -> int:
        """Queries, normalised and rotated."""
        return num_tokens * self.shape.num_heads * self.shape.query_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: its queries, and two stages of keys and values."""
        if not self.shape.use_mma:
            return 0
        columns = _shared_columns(self.shape.key_row)
        value_columns = 8 * (self.shape.value_row // 8 | 1)
        return 2 * (self.block_rows * columns + 2 * _STAGE_KEYS * (columns + value_columns))

    def defines(self) -> dict[str, int]:
        defines = self.shape.defines()
        if self.shape.use_mma:
            defines |= {"ROW_TILES": self.row_tiles, "SHARED_BYTES": self.shared_bytes}
        return defines
