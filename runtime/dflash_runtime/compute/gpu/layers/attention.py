"""Launches of attention: checks every array that reaches a kernel, fills in arguments."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from dflash_adapters.rope import RopeTable
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import F32Array
from dflash_runtime.compute.gpu.device.device import (
    DeviceArray,
    Grid,
    Kernel,
    KernelDevice,
    address,
)
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import GRANULE, ArrayChecker, StepRows
from dflash_runtime.compute.gpu.layers.attention_plan import AttentionShape, DecodePlan, PrefillPlan
from dflash_runtime.compute.gpu.layers.kv_rows import KvRows, LayerKvCache

_ALIGNMENT = 16

LayerCacheArgs = kernel_struct("attention_heads.cuh", "LayerCache")
NewRowsArgs = kernel_struct("attention_heads.cuh", "NewRows")
AttentionDecodeArgs = kernel_struct("attention_decode.cu", "AttentionDecodeArgs")
AttentionMergeArgs = kernel_struct("attention_merge.cu", "AttentionMergeArgs")
AttentionStoreArgs = kernel_struct("attention_store.cu", "AttentionStoreArgs")
AttentionPrefillArgs = kernel_struct("attention_prefill.cu", "AttentionPrefillArgs")


def rotation_angles(table: RopeTable, num_positions: int) -> F32Array:
    """{cos, sin} of every pair at every position, scaled. Shapes: result [N, rotated / 2, 2]."""
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * table.inv_freq
    pairs = np.empty((*angles.shape, 2), np.float32)
    pairs[..., 0] = np.cos(angles) * table.scale
    pairs[..., 1] = np.sin(angles) * table.scale
    return pairs


@dataclass(slots=True, eq=False)  # made for every launch
class TokenRows:
    """Rows of heads inside a wider array, such as the joint projection of queries, keys and values.

    Shapes: array [T, columns] float32; a token's heads begin at `first_column` of its row.
    """

    array: DeviceArray
    first_column: int = 0


@dataclass(slots=True, eq=False)
class NewRows:
    """Projected queries, keys and values, and their norms and rotation before attention.

    Shapes: angles from rotation_angles, None: no rotation; weights [D] float32 or None;
    query_factors [N] float32, by position.
    """

    queries: TokenRows
    keys: TokenRows
    values: TokenRows
    angles: DeviceArray | None
    scale: float
    query_weight: DeviceArray | None = None
    key_weight: DeviceArray | None = None
    eps: float = 0.0
    query_factors: DeviceArray | None = None


class DecodeAttention:
    """Attention of a step of 1 to 8 tokens, over contexts of one bucket.

    Two launches that need no host work, so one capture serves the whole bucket.
    """

    def __init__(self, device: KernelDevice, plan: DecodePlan) -> None:
        self.plan = plan
        self._device, self._arrays = device, ArrayChecker(device)
        self._decode = device.module("attention_decode.cu", plan.defines()).kernel(
            "attention_decode", AttentionDecodeArgs
        )
        self._merge = device.module("attention_merge.cu", plan.merge_defines()).kernel(
            "attention_merge", AttentionMergeArgs
        )

    def launch(
        self,
        rows: NewRows,
        layer: LayerKvCache,
        *,
        positions: DeviceArray,
        scratch: DeviceArray,
        out: StepRows,
        sinks: DeviceArray | None = None,
    ) -> None:
        """Write the step's keys and values, then let every token see all up to its own.

        `positions` are read before the preceding kernel has ended, and rows of the cache before
        them too: neither may be written by kernels that overlap with this one. They ascend by one
        and lie inside the bucket and the cache, which the caller has checked on the host.
        Shapes: positions [T] int32; scratch [plan.scratch_bytes] uint8; out has float32 values
        [T, heads, V], or int8 rows of heads * V columns (only if 16 divides V), or both; sinks
        [heads] float32, if compiled with them.
        """
        plan, arrays = self.plan, self._arrays
        shape, num_tokens = plan.shape, plan.num_tokens
        check_layer(shape, layer, rows)
        where = arrays.address("positions", positions, np.int32, T=num_tokens)
        partials = scratch_address(scratch, plan.scratch_bytes)
        statistics = partials + plan.scratch_bytes - plan.statistics_bytes
        merging = merge_args(arrays, shape, out, num_tokens=num_tokens, sinks=sinks)
        merging.positions = where
        merging.partials, merging.statistics = partials, statistics
        self._device.launch(
            self._decode,
            plan.grid,
            plan.threads(self._device.lanes),
            AttentionDecodeArgs(
                rows=attention_rows(arrays, shape, rows, num_tokens=num_tokens),
                positions=where,
                cache=layer_cache(layer),
                results=(partials, statistics),
            ),
        )
        self._device.launch(self._merge, plan.merge_grid, plan.merge_threads, merging)


@dataclass(frozen=True, slots=True)
class _ChunkLaunch:
    """Grid and kernels for chunks of one size."""

    store_grid: Grid
    store_threads: int
    kernel: Kernel
    grid: Grid
    threads: int
    shared_bytes: int
    scratch_bytes: int


class PrefillAttention:
    """Attention of chunks of a prompt, of any number of tokens."""

    def __init__(self, device: KernelDevice, shape: AttentionShape) -> None:
        """Raises: SettingsError if a block needs more shared memory than the device has."""
        self.shape = shape
        self._device, self._arrays = device, ArrayChecker(device)
        self._store = device.module("attention_store.cu", shape.defines()).kernel(
            "attention_store", AttentionStoreArgs
        )
        self._kernels: dict[PrefillPlan, Kernel] = {}
        self._launches: dict[int, _ChunkLaunch] = {}
        smallest = PrefillPlan(shape, 1)
        if smallest.shared_bytes > device.max_shared_bytes:
            raise SettingsError(
                f"attention needs {smallest.shared_bytes} bytes of shared memory, "
                f"{device.name} has {device.max_shared_bytes}"
            )

    def plan(self, num_tokens: int) -> PrefillPlan:
        """How a chunk is cut; its bits do not depend on it."""
        plan = PrefillPlan.of(
            self.shape, num_tokens, num_multiprocessors=self._device.num_multiprocessors
        )
        if plan.shared_bytes > self._device.max_shared_bytes:
            return PrefillPlan(self.shape, 1)
        return plan

    def scratch_bytes(self, num_tokens: int) -> int:
        return self._launch_of(num_tokens).scratch_bytes

    def launch(
        self,
        rows: NewRows,
        layer: LayerKvCache,
        *,
        first_position: DeviceArray,
        num_tokens: int,
        scratch: DeviceArray,
        out: DeviceArray,
        sinks: DeviceArray | None = None,
    ) -> None:
        """Write the chunk's keys and values, then let every token see all up to its own.

        Positions ascend by one from the device-side `first_position` on, which no kernel that
        overlaps with this one may write; the caller has checked that they fit.
        Shapes: first_position [1] int32; scratch [scratch_bytes(T)] uint8; out [T, heads, V]; sinks
        [heads] float32, if compiled with them.
        """
        if num_tokens < 1 or num_tokens > layer.capacity:
            raise ValueError(f"a chunk of {num_tokens} tokens, {layer.capacity} positions")
        if self.shape.window_rows and num_tokens > self.shape.most_tokens:
            raise ValueError(f"{num_tokens} tokens over a window, {self.shape.most_tokens} at once")
        how = self._launch_of(num_tokens)
        check_layer(self.shape, layer, rows)
        where = self._arrays.address("first_position", first_position, np.int32, one=1)
        queries = scratch_address(scratch, how.scratch_bytes)
        target, cache = _out(self.shape, out, num_tokens), layer_cache(layer)
        self._device.launch(
            self._store,
            how.store_grid,
            how.store_threads,
            AttentionStoreArgs(
                rows=attention_rows(self._arrays, self.shape, rows, num_tokens=num_tokens),
                first_position=where,
                cache=cache,
                queries=queries,
            ),
        )
        self._device.launch(
            how.kernel,
            how.grid,
            how.threads,
            AttentionPrefillArgs(
                queries=queries,
                first_position=where,
                cache=cache,
                sinks=_sinks(self._arrays, self.shape, sinks),
                out=target,
                num_tokens=num_tokens,
            ),
            shared_bytes=how.shared_bytes,
        )

    def _launch_of(self, num_tokens: int) -> _ChunkLaunch:
        known = self._launches.get(num_tokens)
        if known is None:
            plan, lanes = self.plan(num_tokens), self._device.lanes
            known = self._launches[num_tokens] = _ChunkLaunch(
                store_grid=plan.store_grid(num_tokens),
                store_threads=plan.store_threads(lanes),
                kernel=self._kernel(plan),
                grid=plan.grid(num_tokens),
                threads=plan.threads(lanes),
                shared_bytes=plan.shared_bytes,
                scratch_bytes=plan.scratch_bytes(num_tokens),
            )
        return known

    def _kernel(self, plan: PrefillPlan) -> Kernel:
        kernel = self._kernels.get(plan)
        if kernel is None:
            module = self._device.module("attention_prefill.cu", plan.defines())
            kernel = module.kernel("attention_prefill", AttentionPrefillArgs)
            self._kernels[plan] = kernel
        return kernel


def merge_args(
    arrays: ArrayChecker,
    shape: AttentionShape,
    out: StepRows,
    *,
    num_tokens: int,
    sinks: DeviceArray | None,
) -> ctypes.Structure:
    """Arguments of the kernel that writes results.

    Raises: ValueError for arrays that do not fit.
    """
    args = AttentionMergeArgs(sinks=_sinks(arrays, shape, sinks))
    if out.values is not None:
        args.values = _out(shape, out.values, num_tokens)
    if out.quants is not None:
        if shape.kv.value_dim % GRANULE:
            raise ValueError(f"heads of {shape.kv.value_dim} are no whole granules of int8")
        columns = shape.num_heads * shape.kv.value_dim
        args.quants, args.meta = arrays.int8_rows(
            "out.", out.quants, out.meta, rows=num_tokens, columns=columns
        )
    return args


def _out(shape: AttentionShape, out: DeviceArray, num_tokens: int) -> int:
    """Address of the results. Raises: ValueError if the array does not fit."""
    width = shape.num_heads * shape.kv.value_dim
    if out.dtype != np.float32 or out.shape[0] != num_tokens or out.size != num_tokens * width:
        raise ValueError(
            f"out is {out.dtype} {out.shape}, expected float32 [{num_tokens}, {width}]"
        )
    return address(out)


def scratch_address(scratch: DeviceArray, num_bytes: int) -> int:
    """Its address. Raises: ValueError if it is too small."""
    if scratch.dtype != np.uint8 or scratch.size < num_bytes:
        raise ValueError(
            f"scratch is {scratch.dtype} {scratch.shape}, needed are {num_bytes} bytes"
        )
    return _aligned(scratch, "scratch")


def check_layer(shape: AttentionShape, layer: LayerKvCache, rows: NewRows) -> None:
    """Raises: ValueError for a cache of another kind, or tables of fewer positions than it has."""
    kind = layer.kv, layer.kv_type, layer.window_rows
    if kind != (shape.kv, shape.kv_type, shape.window_rows):
        raise ValueError(f"a cache of {layer.kv_type} {layer.kv}, compiled for {shape}")
    if (rows.angles is None) != (shape.num_rotated == 0):
        raise ValueError(f"angles are {rows.angles}, compiled for {shape}")
    if (rows.query_factors is None) == shape.is_tempered:
        raise ValueError(f"query_factors are {rows.query_factors}, compiled for {shape}")
    for name, table in (("angles", rows.angles), ("query_factors", rows.query_factors)):
        if table is not None and table.shape[0] < layer.capacity:
            raise ValueError(f"{name} of {table.shape[0]} of {layer.capacity} positions")


def _sinks(arrays: ArrayChecker, shape: AttentionShape, sinks: DeviceArray | None) -> int:
    """Their address. Raises: ValueError if they are missing, or not expected."""
    if (sinks is None) == shape.has_sinks:
        raise ValueError(f"sinks are {sinks}, compiled for {shape}")
    return arrays.optional("sinks", sinks, np.float32, heads=shape.num_heads)


def _aligned(array: DeviceArray, name: str) -> int:
    """Raises: ValueError if the array is not aligned for vector loads."""
    begin = address(array)
    if begin % _ALIGNMENT:
        raise ValueError(f"{name} is not aligned to {_ALIGNMENT} bytes")
    return begin


def layer_cache(layer: LayerKvCache) -> ctypes.Structure:
    """A layer's arrays as arguments of kernels."""

    def scales(rows: KvRows) -> int | None:
        return None if rows.scales is None else address(rows.scales)

    return LayerCacheArgs(
        keys=_aligned(layer.keys.elements, "keys"),
        values=_aligned(layer.values.elements, "values"),
        key_scales=scales(layer.keys),
        value_scales=scales(layer.values),
        num_rows=layer.num_rows,
    )


def attention_rows(
    arrays: ArrayChecker, shape: AttentionShape, rows: NewRows, *, num_tokens: int
) -> ctypes.Structure:
    """Rows of so many tokens as arguments of kernels.

    Raises: ValueError for rows of another shape.
    """

    def begin(given: TokenRows, name: str, width: int) -> int:
        array, end = given.array, given.first_column + width
        if (
            array.dtype != np.float32
            or len(array.shape) != 2
            or array.shape[0] != num_tokens
            or not width <= end <= array.shape[1]
        ):
            raise ValueError(
                f"{name} are {array.dtype} {array.shape} from column {given.first_column} on; "
                f"{num_tokens} rows with {width} columns are needed"
            )
        return address(array, 4 * given.first_column)

    angles, factors = rows.angles, rows.query_factors
    key_width = shape.kv.num_heads * shape.kv.key_dim
    value_width = shape.kv.num_heads * shape.kv.value_dim
    return NewRowsArgs(
        queries=begin(rows.queries, "queries", shape.num_heads * shape.kv.key_dim),
        keys=begin(rows.keys, "keys", key_width),
        values=begin(rows.values, "values", value_width),
        query_weight=arrays.optional(
            "query_weight", rows.query_weight, np.float32, D=shape.kv.key_dim
        ),
        key_weight=arrays.optional("key_weight", rows.key_weight, np.float32, D=shape.kv.key_dim),
        angles=arrays.optional(
            "angles",
            angles,
            np.float32,
            N=0 if angles is None else angles.shape[0],
            pairs=shape.num_rotated // 2,
            two=2,
        ),
        query_factors=arrays.optional(
            "query_factors", factors, np.float32, N=0 if factors is None else factors.shape[0]
        ),
        query_stride=rows.queries.array.shape[1],
        key_stride=rows.keys.array.shape[1],
        value_stride=rows.values.array.shape[1],
        eps=rows.eps,
        scale=rows.scale,
    )
