"""Attention of a layer in steps, chunks and trees: picks the kernels, and keeps their scratch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from dflash_adapters.rope import AttentionTemperature, RopeTable
from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.device.buffers import Buffers
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.launch.decode_arrays import MOST_TOKENS
from dflash_runtime.compute.gpu.layers.attention import (
    DecodeAttention,
    NewRows,
    PrefillAttention,
    TokenRows,
    rotation_angles,
)
from dflash_runtime.compute.gpu.layers.attention_plan import AttentionShape, DecodePlan
from dflash_runtime.compute.gpu.layers.attention_tree import TreeAttention
from dflash_runtime.compute.gpu.layers.kv_rows import LayerKvCache
from dflash_runtime.compute.gpu.layers.placed_step import PlacedStep
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.kv_cache import KvType

Heads: TypeAlias = tuple[DeviceArray, DeviceArray, DeviceArray]
"""Projected queries, keys and values. Shapes: each [T, heads * D] float32."""


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
        return AttentionShape.of(
            form.num_heads,
            layer.kv,
            kv_type=layer.kv_type,
            table=form.table,
            has_mma=self._has_mma,
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
            TokenRows(q),
            TokenRows(k),
            TokenRows(v),
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
