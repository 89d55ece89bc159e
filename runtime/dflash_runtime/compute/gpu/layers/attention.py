"""Attention of a layer: launches for steps and chunks, and the choice between them and a tree's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from dflash_adapters.rope import AttentionTemperature, RopePairing, RopeTable
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.device.buffers import Buffers
from dflash_runtime.compute.gpu.device.device import DeviceArray, Grid, Kernel, KernelDevice
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import ArrayChecker, StepRows
from dflash_runtime.compute.gpu.layers.attention_args import (
    AttentionMergeArgs,
    NewRows,
    attention_rows,
    check_layer,
    layer_cache,
    merge_args,
    out_address,
    rotation_angles,
    scratch_address,
    sinks_address,
)
from dflash_runtime.compute.gpu.layers.attention_plan import AttentionShape, DecodePlan, PrefillPlan
from dflash_runtime.compute.gpu.layers.attention_tree import TreeAttention
from dflash_runtime.compute.gpu.layers.kv_rows import LayerKvCache
from dflash_runtime.compute.gpu.layers.placed_step import PlacedStep
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.step_order import MOST_TOKENS

AttentionDecodeArgs = kernel_struct("attention_decode.cu", "AttentionDecodeArgs")
AttentionStoreArgs = kernel_struct("attention_store.cu", "AttentionStoreArgs")
AttentionPrefillArgs = kernel_struct("attention_prefill.cu", "AttentionPrefillArgs")

Heads: TypeAlias = tuple[DeviceArray, DeviceArray, DeviceArray]
"""Projected queries, keys and values. Shapes: each [T, heads * D] float32."""


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
        overlaps with this one may write; the caller has checked that they fit. `out` may be the
        queries, which are copied first.
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
        target, cache = out_address(self.shape, out, num_tokens), layer_cache(layer)
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
                sinks=sinks_address(self._arrays, self.shape, sinks),
                out=target,
                num_tokens=num_tokens,
            ),
            shared_bytes=how.shared_bytes,
        )

    def _launch_of(self, num_tokens: int) -> _ChunkLaunch:
        known = self._launches.get(num_tokens)
        if known is None:
            plan, lanes = self.plan(num_tokens), self._device.lanes
            module = self._device.module("attention_prefill.cu", plan.defines())
            known = self._launches[num_tokens] = _ChunkLaunch(
                store_grid=plan.store_grid(num_tokens),
                store_threads=plan.store_threads(lanes),
                kernel=module.kernel("attention_prefill", AttentionPrefillArgs),
                grid=plan.grid(num_tokens),
                threads=plan.threads(lanes),
                shared_bytes=plan.shared_bytes,
                scratch_bytes=plan.scratch_bytes(num_tokens),
            )
        return known


@dataclass(slots=True, eq=False)
class AttentionForm:
    """What one layer's attention does, besides its projections.

    Heads of q and k are normalised if there are weights [D], and rotated if there is a `table`;
    queries are multiplied by the temperature of their position; sinks [heads].
    """

    num_heads: int
    """Query heads."""
    scale: float
    """Scores are multiplied by it."""
    table: RopeTable | None = None
    query_weight: DeviceArray | None = None
    key_weight: DeviceArray | None = None
    eps: float = 0.0
    temperature: AttentionTemperature | None = None
    sinks: DeviceArray | None = None
    prefill: tuple[KvType, int, PrefillAttention] | None = field(default=None, init=False)
    """Type and window rows of the last chunk's cache, and the kernels for it: looking these up by
    their shape takes longer than a launch."""


class AttentionLauncher:
    """Launches of attention; one object serves a whole model."""

    def __init__(self, device: KernelDevice, buffers: Buffers) -> None:
        self._device = device
        self._buffers = buffers
        self._has_mma = device.capabilities.mma and device.lanes == 32
        self._decodes: dict[DecodePlan, DecodeAttention] = {}
        self._prefills: dict[AttentionShape, PrefillAttention] = {}
        self._trees: dict[tuple[AttentionShape, int], TreeAttention] = {}
        self._angles: dict[tuple[int, int], tuple[RopeTable, DeviceArray]] = {}
        self._factors: dict[tuple[AttentionTemperature, int], DeviceArray] = {}

    def launch(
        self, form: AttentionForm, heads: Heads, step: PlacedStep, *, cache_layer: int, out: Rows
    ) -> None:
        """Write keys and values to the cache, then let every token see what the mask lets it.

        A tree's keys and values get into the cache when a path is accepted.
        Shapes: out [T, heads * D], as int8 too in a step if wanted.
        Raises: CheckpointMissing if rows that the first token sees are gone.
        """
        if step.branch is not None:
            self._tree(form, heads, step, cache_layer, out)
            return
        num_tokens = out.num_tokens
        parts = [slice(0, num_tokens)]
        if step.first_position is not None:
            window = step.cache.windows[cache_layer]
            parts = list(window.parts(step.first_position, num_tokens))
        if num_tokens <= MOST_TOKENS:
            self._step(form, heads, step, cache_layer, out)
        else:
            self._chunk(form, heads, step, step.cache.layers[cache_layer], parts=parts, out=out)

    def _step(
        self, form: AttentionForm, heads: Heads, step: PlacedStep, cache_layer: int, out: Rows
    ) -> None:
        """1 to 8 tokens."""
        layer = step.cache.layers[cache_layer]
        shape = self._shape(form, layer)
        plan = DecodePlan(shape, out.num_tokens, step.bucket, self._device.lanes)
        if plan not in self._decodes:
            self._decodes[plan] = DecodeAttention(self._device, plan)
        scratch = self._buffers.take((plan.scratch_bytes,), np.uint8)
        self._decodes[plan].launch(
            self._new_rows(form, heads, layer),
            layer,
            positions=step.positions,
            scratch=scratch.array,
            sinks=form.sinks,
            out=out.forms,
        )

    def _chunk(
        self,
        form: AttentionForm,
        heads: Heads,
        step: PlacedStep,
        layer: LayerKvCache,
        *,
        parts: Sequence[slice],
        out: Rows,
    ) -> None:
        """Any number of tokens, of which `parts` are computed one after the other."""
        prefill = self._prefill(form, layer)
        sizes = [part.stop - part.start for part in parts]
        scratch = self._device.empty(max(map(prefill.scratch_bytes, sizes)), np.uint8)
        q, k, v = heads
        for part, size in zip(parts, sizes, strict=True):
            some, target = heads, out.array
            if size < out.num_tokens:
                some, target = (q[part], k[part], v[part]), target[part]
            prefill.launch(
                self._new_rows(form, some, layer),
                layer,
                first_position=step.positions[part.start : part.start + 1],
                num_tokens=size,
                scratch=scratch,
                sinks=form.sinks,
                out=target,
            )

    def _tree(
        self, form: AttentionForm, heads: Heads, step: PlacedStep, cache_layer: int, out: Rows
    ) -> None:
        """A tree's W tokens; those that are accepted get into the cache."""
        layer, window = step.cache.layers[cache_layer], step.cache.windows[cache_layer]
        tree, branch = step.tree, step.branch
        assert tree is not None
        assert branch is not None
        key = self._shape(form, layer), step.bucket
        if key not in self._trees:
            self._trees[key] = TreeAttention(self._device, *key)
        attention = self._trees[key]
        nodes = branch.memory(("nodes", cache_layer), lambda: attention.new_nodes(out.num_tokens))
        scratch = self._buffers.take((attention.scratch_bytes,), np.uint8)
        attention.launch(
            self._new_rows(form, heads, layer),
            layer,
            branch,
            nodes=nodes,
            scratch=scratch.array,
            sinks=form.sinks,
            out=out.forms,
        )

        def accept(path: I32Array) -> None:
            window.begin(branch.position)
            window.advance(path.size)
            attention.accept(layer, branch, branch.path_on_device(path), nodes=nodes)

        tree.keep(accept)

    def _prefill(self, form: AttentionForm, layer: LayerKvCache) -> PrefillAttention:
        known, kv_type, window_rows = form.prefill, layer.kv_type, layer.window_rows
        if known is not None and known[0] is kv_type and known[1] == window_rows:
            return known[2]
        shape = self._shape(form, layer)
        if shape not in self._prefills:
            self._prefills[shape] = PrefillAttention(self._device, shape)
        form.prefill = kv_type, window_rows, self._prefills[shape]
        return self._prefills[shape]

    def _shape(self, form: AttentionForm, layer: LayerKvCache) -> AttentionShape:
        table = form.table
        return AttentionShape(
            form.num_heads,
            layer.kv,
            layer.kv_type,
            RopePairing.HALF_SPLIT if table is None else table.pairing,
            num_rotated=0 if table is None else table.num_rotated,
            use_mma=self._has_mma and layer.kv_type is not KvType.F32,
            is_tempered=form.temperature is not None,
            has_sinks=form.sinks is not None,
            window_rows=layer.window_rows,
        )

    def _new_rows(self, form: AttentionForm, heads: Heads, layer: LayerKvCache) -> NewRows:
        q, k, v = heads
        angles = factors = None
        if form.table is not None:
            angles = self._angles_of(form.table, layer.capacity)
        if form.temperature is not None:
            factors = self._factors_of(form.temperature, layer.capacity)
        return NewRows(
            q,
            k,
            v,
            angles,
            form.scale,
            query_weight=form.query_weight,
            key_weight=form.key_weight,
            eps=form.eps,
            query_factors=factors,
        )

    def _factors_of(self, temperature: AttentionTemperature, capacity: int) -> DeviceArray:
        key = temperature, capacity
        if key not in self._factors:
            positions = np.arange(capacity, dtype=np.int32)
            self._factors[key] = self._device.upload(temperature.factors(positions))
        return self._factors[key]

    def _angles_of(self, table: RopeTable, capacity: int) -> DeviceArray:
        key = id(table), capacity
        if key not in self._angles:  # the table is kept, so that its id stays its own
            angles = self._device.upload(rotation_angles(table, capacity))
            self._angles[key] = table, angles
        return self._angles[key][1]
