"""Attention of steps, chunks and trees: picks the kernels of a call, and keeps their scratch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dflash_adapters.rope import AttentionTemperature, RopeTable
from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.device.buffers import Buffers
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.layers.attention import (
    DecodeAttention,
    NewRows,
    PrefillAttention,
    TokenRows,
    rotation_angles,
)
from dflash_runtime.compute.gpu.layers.attention_plan import AttentionShape, DecodePlan
from dflash_runtime.compute.gpu.layers.attention_tree import TreeAttention
from dflash_runtime.compute.gpu.layers.branch import Branch
from dflash_runtime.compute.gpu.layers.kv_cache import DeviceKvCache
from dflash_runtime.compute.gpu.layers.values import F32Rows, HeadRows, StepPositions

_KINDS_OF_LAYERS = 8
"""Most different kinds of attention layers in a model."""


class AttentionLauncher:
    """Launches of attention; one object serves a whole model."""

    def __init__(self, device: KernelDevice, buffers: Buffers) -> None:
        self._device = device
        self._buffers = buffers
        self._has_mma = device.capabilities.mma and device.lanes == 32
        self._decodes: dict[DecodePlan, DecodeAttention] = {}
        self._prefills: dict[AttentionShape, PrefillAttention] = {}
        self._known_prefills: deque[tuple[object, RopeTable | None, PrefillAttention]] = deque(
            maxlen=_KINDS_OF_LAYERS
        )
        self._trees: dict[tuple[AttentionShape, int], TreeAttention] = {}
        self._angles: dict[tuple[int, int], tuple[RopeTable, DeviceArray]] = {}
        self._factors: dict[tuple[AttentionTemperature, int], DeviceArray] = {}

    def step(
        self,
        heads: tuple[HeadRows, HeadRows, HeadRows],
        cache: DeviceKvCache,
        cache_layer: int,
        *,
        positions: StepPositions,
        scale: float,
        sinks: DeviceArray | None,
        out: F32Rows,
    ) -> None:
        """1 to 8 tokens. Shapes: sinks [heads]; out [T, heads * D], with sides if wanted."""
        layer = cache.layers[cache_layer]
        shape = self._shape(heads, cache, cache_layer, has_sinks=sinks is not None)
        plan = DecodePlan(shape, out.num_tokens, positions.bucket, self._device.lanes)
        if plan not in self._decodes:
            self._decodes[plan] = DecodeAttention(self._device, plan)
        scratch = self._buffers.take((plan.scratch_bytes,), np.uint8)
        self._decodes[plan].launch(
            self._new_rows(heads, cache, scale),
            layer,
            positions=positions.array,
            scratch=scratch.array,
            sinks=sinks,
            out=out.to_fill,
        )

    def chunk(
        self,
        heads: tuple[HeadRows, HeadRows, HeadRows],
        cache: DeviceKvCache,
        cache_layer: int,
        *,
        positions: StepPositions,
        scale: float,
        sinks: DeviceArray | None,
        out: F32Rows,
        parts: Sequence[slice],
    ) -> None:
        """Any number of tokens, of which `parts` are computed one after the other.

        Shapes: sinks [heads]; out [T, heads * D].
        """
        prefill = self._prefill(heads, cache, cache_layer, has_sinks=sinks is not None)
        sizes = [part.stop - part.start for part in parts]
        scratch = self._device.empty(max(map(prefill.scratch_bytes, sizes)), np.uint8)
        q, k, v = heads
        for part, size in zip(parts, sizes, strict=True):
            some, target = heads, out.array
            if size < out.num_tokens:
                target = target[part]
                some = (
                    replace(q, rows=q.rows[part]),
                    replace(k, rows=k.rows[part]),
                    replace(v, rows=v.rows[part]),
                )
            prefill.launch(
                self._new_rows(some, cache, scale),
                cache.layers[cache_layer],
                first_position=positions.array[part.start : part.start + 1],
                num_tokens=size,
                scratch=scratch,
                sinks=sinks,
                out=target,
            )

    def tree(
        self,
        heads: tuple[HeadRows, HeadRows, HeadRows],
        cache: DeviceKvCache,
        cache_layer: int,
        *,
        tree: Branch,
        scale: float,
        sinks: DeviceArray | None,
        out: F32Rows,
    ) -> None:
        """A tree's W tokens; those that are accepted get into the cache.

        Shapes: sinks [heads]; out [W, heads * D], with sides if wanted.
        """
        layer, window = cache.layers[cache_layer], cache.windows[cache_layer]
        shape = self._shape(heads, cache, cache_layer, has_sinks=sinks is not None)
        key = shape, tree.positions.bucket
        if key not in self._trees:
            self._trees[key] = TreeAttention(self._device, *key)
        attention = self._trees[key]
        nodes = tree.memory(("nodes", cache_layer), lambda: attention.new_nodes(out.num_tokens))
        scratch = self._buffers.take((attention.scratch_bytes,), np.uint8)
        attention.launch(
            self._new_rows(heads, cache, scale),
            layer,
            tree,
            nodes=nodes,
            scratch=scratch.array,
            sinks=sinks,
            out=out.to_fill,
        )

        def accept(path: I32Array) -> None:
            window.begin(tree.position)
            window.advance(path.size)
            attention.accept(layer, tree, tree.path_on_device(path), nodes=nodes)

        tree.keep(accept)

    def _prefill(
        self,
        heads: tuple[HeadRows, HeadRows, HeadRows],
        cache: DeviceKvCache,
        cache_layer: int,
        *,
        has_sinks: bool,
    ) -> PrefillAttention:
        """That of such a layer: what its shape is made of is compared, not the shape, as layers are
        asked for again and again."""
        query, layer = heads[0], cache.layers[cache_layer]
        table = None if query.rotation is None else query.rotation.table
        is_tempered = query.temperature is not None
        key = query.num_heads, layer.kv, layer.kv_type, layer.window_rows, is_tempered, has_sinks
        for known_key, known_table, prefill in self._known_prefills:
            if known_table is table and known_key == key:
                return prefill
        shape = self._shape(heads, cache, cache_layer, has_sinks=has_sinks)
        if shape not in self._prefills:
            self._prefills[shape] = PrefillAttention(self._device, shape)
        self._known_prefills.append((key, table, self._prefills[shape]))
        return self._prefills[shape]

    def _shape(
        self,
        heads: tuple[HeadRows, HeadRows, HeadRows],
        cache: DeviceKvCache,
        cache_layer: int,
        *,
        has_sinks: bool,
    ) -> AttentionShape:
        query, layer = heads[0], cache.layers[cache_layer]
        return AttentionShape.of(
            query.num_heads,
            layer.kv,
            kv_type=layer.kv_type,
            table=None if query.rotation is None else query.rotation.table,
            has_mma=self._has_mma,
            is_tempered=query.temperature is not None,
            has_sinks=has_sinks,
            window_rows=layer.window_rows,
        )

    def _new_rows(
        self, heads: tuple[HeadRows, HeadRows, HeadRows], cache: DeviceKvCache, scale: float
    ) -> NewRows:
        q, k, v = heads
        angles = query_weight = key_weight = factors = None
        eps = 0.0
        if q.rotation is not None and k.rotation is not None:
            angles = self._angles_of(q.rotation.table, cache.capacity)
            query_weight, key_weight, eps = q.rotation.weight, k.rotation.weight, q.rotation.eps
        if q.temperature is not None:
            factors = self._factors_of(q.temperature, cache.capacity)
        return NewRows(
            TokenRows(q.rows.array),
            TokenRows(k.rows.array),
            TokenRows(v.rows.array),
            angles,
            scale,
            query_weight=query_weight,
            key_weight=key_weight,
            eps=eps,
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
