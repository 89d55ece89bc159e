"""Launches attention of a tree's tokens: checks shapes and memory, fills in arguments.

Keys and values of the tokens stay beside the cache until a path is accepted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import ArrayChecker, StepRows
from dflash_runtime.compute.gpu.layers.attention_args import (
    AttentionMergeArgs,
    NewRows,
    attention_rows,
    check_layer,
    layer_cache,
    merge_args,
    scratch_address,
)
from dflash_runtime.compute.gpu.layers.attention_plan import AttentionShape, DecodePlan
from dflash_runtime.compute.gpu.layers.branch import Branch
from dflash_runtime.compute.gpu.layers.kv_rows import LayerKvCache, new_layer_cache
from dflash_runtime.compute.step_order import MOST_TOKENS
from dflash_runtime.compute.trees import MOST_NODES

_NODES_WARPS = 8

AttentionTreeArgs = kernel_struct("attention_tree.cu", "AttentionTreeArgs")
AttentionNodesArgs = kernel_struct("attention_nodes.cu", "AttentionNodesArgs")
AttentionAcceptArgs = kernel_struct("attention_nodes.cu", "AttentionAcceptArgs")


class TreeAttention:
    """Attention of trees, over contexts of one bucket.

    Results have the bits of DecodeAttention, with each token as the last one of a sequence.
    """

    def __init__(self, device: KernelDevice, shape: AttentionShape, bucket: int) -> None:
        self.plan = DecodePlan(shape, MOST_TOKENS, bucket, device.lanes)
        """Of as many tokens as are computed at once: kernels do not depend on their number."""
        self.shape = shape
        self._device, self._arrays = device, ArrayChecker(device)
        nodes = device.module("attention_nodes.cu", shape.defines())
        self._nodes = nodes.kernel("attention_nodes", AttentionNodesArgs)
        self._accept = nodes.kernel("attention_accept", AttentionAcceptArgs)
        defines = self.plan.defines()
        del defines["NUM_TOKENS"]
        tree = device.module("attention_tree.cu", defines)
        self._tree = tree.kernel("attention_tree", AttentionTreeArgs)
        merge = device.module("attention_merge.cu", self.plan.merge_defines())
        self._merge = merge.kernel("attention_merge", AttentionMergeArgs)

    @property
    def scratch_bytes(self) -> int:
        """What a launch needs, whatever the tree: tokens go by eights."""
        return self.plan.scratch_bytes

    def new_nodes(self, num_tokens: int) -> LayerKvCache:
        """Memory for keys and values of so many tokens. Raises: DeviceOutOfMemory."""
        return new_layer_cache(
            self._device, self.shape.kv, capacity=num_tokens, kv_type=self.shape.kv_type
        )

    def launch(
        self,
        rows: NewRows,
        layer: LayerKvCache,
        branch: Branch,
        *,
        nodes: LayerKvCache,
        scratch: DeviceArray,
        out: StepRows,
        sinks: DeviceArray | None = None,
    ) -> None:
        """Write the tokens' keys and values to `nodes`; then each sees the sequence and its path.

        Positions lie inside the bucket and the cache, which the caller has checked.
        Shapes: nodes as `new_nodes` of the tree's W tokens; scratch [scratch_bytes] uint8; `out` as
        DecodeAttention.launch has it, of W tokens; sinks [heads], if compiled with them.
        """
        num_tokens, shape, device = branch.num_tokens, self.shape, self._device
        check_layer(shape, layer, rows)
        if (nodes.kv, nodes.kv_type, nodes.capacity) != (shape.kv, shape.kv_type, num_tokens):
            raise ValueError(f"{nodes.capacity} rows of {nodes.kv} for {num_tokens} of {shape.kv}")
        cache, of_nodes = layer_cache(layer), layer_cache(nodes)
        positions = branch.positions
        warps = 2 * shape.kv.num_heads
        device.launch(
            self._nodes,
            (num_tokens, -(-warps // _NODES_WARPS), 1),
            _NODES_WARPS * device.lanes,
            AttentionNodesArgs(
                rows=attention_rows(self._arrays, shape, rows, num_tokens=num_tokens),
                positions=self._arrays.address("positions", positions, np.int32, T=num_tokens),
                nodes=of_nodes,
            ),
        )
        begin = self._arrays.address("begin", branch.begin, np.int32, one=1)
        partials = scratch_address(scratch, self.scratch_bytes)
        statistics = partials + self.scratch_bytes - self.plan.statistics_bytes
        for first in range(0, num_tokens, MOST_TOKENS):
            part = slice(first, min(first + MOST_TOKENS, num_tokens))
            count = part.stop - first
            where = self._arrays.address("positions", positions[part], np.int32, T=count)
            some = replace(
                rows,
                queries=rows.queries[part],
                keys=rows.keys[part],
                values=rows.values[part],
            )
            merging = merge_args(
                self._arrays,
                shape,
                out[part],
                num_tokens=count,
                sinks=sinks,
            )
            merging.positions = where
            merging.partials, merging.statistics = partials, statistics
            device.launch(
                self._tree,
                replace(self.plan, num_tokens=count).grid_of(self.plan.row_warps),
                self.plan.threads(device.lanes),
                AttentionTreeArgs(
                    rows=attention_rows(self._arrays, shape, some, num_tokens=count),
                    positions=where,
                    ancestors=self._arrays.address(
                        "paths", branch.paths[part], np.int32, T=count, nodes=MOST_NODES
                    ),
                    begin=begin,
                    cache=cache,
                    nodes=of_nodes,
                    results=(partials, statistics),
                    num_tokens=count,
                ),
            )
            device.launch(
                self._merge, (shape.num_heads, count, 1), self.plan.merge_threads, merging
            )

    def accept(
        self, layer: LayerKvCache, branch: Branch, path: DeviceArray, *, nodes: LayerKvCache
    ) -> None:
        """Keys and values of a path go where those of a sequence are. Shapes: path [L]."""
        (length,) = path.shape
        self._device.launch(
            self._accept,
            (length, self.shape.kv.num_heads, 1),
            _NODES_WARPS * self._device.lanes,
            AttentionAcceptArgs(
                path=self._arrays.address("path", path, np.int32, L=length),
                begin=self._arrays.address("begin", branch.begin, np.int32, one=1),
                nodes=layer_cache(nodes),
                cache=layer_cache(layer),
            ),
        )
