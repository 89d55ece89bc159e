"""Attention of steps, chunks and trees: which kernels a call takes, and the memory between them."""

from __future__ import annotations

import numpy as np

from dflash_adapters.rope import RopeTable
from dflash_protocol.ids import I32Array
from dflash_runtime.compute.cupy.attention import (
    DecodeAttention,
    NewRows,
    PrefillAttention,
    TokenRows,
    rotation_angles,
)
from dflash_runtime.compute.cupy.attention_plan import AttentionShape, DecodePlan
from dflash_runtime.compute.cupy.attention_tree import TreeAttention
from dflash_runtime.compute.cupy.branch import Branch
from dflash_runtime.compute.cupy.buffers import Buffers, array_of
from dflash_runtime.compute.cupy.decode_experts import Rows as StepRows
from dflash_runtime.compute.cupy.device import DeviceArray, KernelDevice
from dflash_runtime.compute.cupy.kv_cache import DeviceKvCache
from dflash_runtime.compute.cupy.values import Heads, Rows, StepPositions


class AttentionLauncher:
    """One serves a whole model."""

    def __init__(self, device: KernelDevice, buffers: Buffers) -> None:
        self._device = device
        self._buffers = buffers
        self._has_mma = device.capabilities.mma and device.lanes == 32
        self._decodes: dict[DecodePlan, DecodeAttention] = {}
        self._prefills: dict[AttentionShape, PrefillAttention] = {}
        self._trees: dict[tuple[AttentionShape, int], TreeAttention] = {}
        self._angles: dict[tuple[int, int], tuple[RopeTable, DeviceArray]] = {}

    def step(
        self,
        heads: tuple[Heads, Heads, Heads],
        cache: DeviceKvCache,
        cache_layer: int,
        *,
        positions: StepPositions,
        scale: float,
        out: Rows,
    ) -> None:
        """1 to 8 tokens. Shapes: out [T, heads * D], with sides if they are wanted."""
        sides = out.sides
        layer = cache.layers[cache_layer]
        plan = DecodePlan(self._shape(heads, cache, cache_layer), out.num_tokens, positions.bucket)
        if plan not in self._decodes:
            self._decodes[plan] = DecodeAttention(self._device, plan)
        scratch = self._buffers.take((plan.scratch_bytes,), np.uint8)
        self._decodes[plan].launch(
            self._new_rows(heads, cache, scale),
            layer,
            positions=positions.array,
            scratch=scratch.array,
            out=StepRows(
                values=out.array,
                quants=None if sides is None else array_of(sides.quants),
                meta=None if sides is None else array_of(sides.meta),
            ),
        )

    def chunk(
        self,
        heads: tuple[Heads, Heads, Heads],
        cache: DeviceKvCache,
        cache_layer: int,
        *,
        positions: StepPositions,
        scale: float,
        out: Rows,
    ) -> None:
        """Any number of tokens. Shapes: out [T, heads * D]."""
        shape = self._shape(heads, cache, cache_layer)
        if shape not in self._prefills:
            self._prefills[shape] = PrefillAttention(self._device, shape)
        prefill = self._prefills[shape]
        scratch = self._device.empty(prefill.scratch_bytes(out.num_tokens), np.uint8)
        prefill.launch(
            self._new_rows(heads, cache, scale),
            cache.layers[cache_layer],
            first_position=positions.array[:1],
            num_tokens=out.num_tokens,
            scratch=scratch,
            out=out.array,
        )

    def tree(
        self,
        heads: tuple[Heads, Heads, Heads],
        cache: DeviceKvCache,
        cache_layer: int,
        *,
        tree: Branch,
        scale: float,
        out: Rows,
    ) -> None:
        """A tree's W tokens, of which the accepted ones are to be in the cache.

        Shapes: out [W, heads * D], with sides if they are wanted.
        """
        sides, layer = out.sides, cache.layers[cache_layer]
        key = self._shape(heads, cache, cache_layer), tree.positions.bucket
        if key not in self._trees:
            self._trees[key] = TreeAttention(self._device, *key)
        attention = self._trees[key]
        nodes = attention.new_nodes(out.num_tokens)
        scratch = self._buffers.take((attention.scratch_bytes,), np.uint8)
        attention.launch(
            self._new_rows(heads, cache, scale),
            layer,
            tree,
            nodes=nodes,
            scratch=scratch.array,
            out=StepRows(
                values=out.array,
                quants=None if sides is None else array_of(sides.quants),
                meta=None if sides is None else array_of(sides.meta),
            ),
        )

        def accept(path: I32Array) -> None:
            attention.accept(layer, tree, tree.path_on_device(path), nodes=nodes)

        tree.keep(accept)

    def _shape(
        self, heads: tuple[Heads, Heads, Heads], cache: DeviceKvCache, cache_layer: int
    ) -> AttentionShape:
        query, layer = heads[0], cache.layers[cache_layer]
        assert query.rotation is not None
        table = query.rotation.table
        return AttentionShape.of(
            query.num_heads,
            layer.kv,
            kv_type=layer.kv_type,
            table=table,
            has_mma=self._has_mma,
        )

    def _new_rows(
        self, heads: tuple[Heads, Heads, Heads], cache: DeviceKvCache, scale: float
    ) -> NewRows:
        q, k, v = heads
        assert q.rotation is not None
        assert k.rotation is not None
        return NewRows(
            TokenRows(q.rows.array),
            TokenRows(k.rows.array),
            TokenRows(v.rows.array),
            self._angles_of(q.rotation.table, cache.capacity),
            scale,
            query_weight=q.rotation.weight,
            key_weight=k.rotation.weight,
            eps=q.rotation.eps,
        )

    def _angles_of(self, table: RopeTable, capacity: int) -> DeviceArray:
        key = id(table), capacity
        if key not in self._angles:  # the table is kept, so that its id stays its own
            angles = self._device.upload(rotation_angles(table, capacity))
            self._angles[key] = table, angles
        return self._angles[key][1]
