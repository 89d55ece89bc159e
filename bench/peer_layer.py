"""llama.cpp's expert layers: the graph that it builds for the experts of one layer, run by ggml.

The graph is that of llama.cpp's `build_moe_ffn` between routing and the residual: `mul_mat_id` for
up and gate, SwiGLU, `mul_mat_id` for down, the weights, the sum over experts. Weights are read from
the mapped file, as in llama.cpp; with `repack` those that it would repack are copied in that order.
Graphs are built once for each layer and number of tokens.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench.llama_api import TensorHead
from bench.machine import touch_pages
from bench.peer import GgmlInitParams, PeerError, open_peer
from bench.workload import Work

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import ExpertProjection, MoeLayer
from dflash_protocol.ids import F32Array

_F32, _I32 = 0, 26
_USAGE_WEIGHTS = 1
_GRAPH_NODES = 256


@dataclass(frozen=True)
class _MappedFile:
    """A file in memory, and llama.cpp's buffer of it."""

    mapping: mmap.mmap
    address: int
    buffer: int


class PeerLayers:
    """The expert layers of one file, with `num_threads` threads.

    Owns the mapping, the graphs and their buffers until the process ends.
    """

    def __init__(self, folder: Path, path: Path, *, num_threads: int, repack: bool) -> None:
        self._peer = open_peer(folder)
        self._file = self._mapped(path)
        with GgufFile.open(path) as file:
            layers = read_spec(file).moe.layers
        self._backend = self._peer.ggml_backend_cpu_init()
        self._peer.ggml_backend_cpu_set_n_threads(self._backend, num_threads)
        self._context = self._new_context(4 * len(layers), 0)
        self._extra_types = self._extra_buffer_types() if repack else []
        self._repacked: set[str] = set()
        self._layers = layers
        self._weights = [[self._weight(layer, p) for p in layer.projections] for layer in layers]
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._allocators: dict[int, int] = {}
        """By number of tokens. Layers share a buffer, whose pages exist after the first layer."""

    def repacked_types(self) -> list[str]:
        """Repacked tensor types, each with the name of the order."""
        return sorted(self._repacked)

    def run(self, works: list[Work]) -> float:
        """Seconds for the layers of these works, without copying inputs and results."""
        seconds = 0.0
        for work in works:
            graph = self._graph(work)
            graph.set_inputs(work)
            started_s = time.perf_counter()
            status = self._peer.ggml_backend_graph_compute(self._backend, graph.graph)
            seconds += time.perf_counter() - started_s
            if status:
                raise PeerError(f"ggml_backend_graph_compute: status {status}")
        return seconds

    def result(self, work: Work) -> F32Array:
        """Shapes: result [T, H] float32."""
        self.run([work])
        return self._graph(work).result()

    def end_row(self) -> None:
        """Free graphs and their buffers before other numbers of tokens."""
        for graph in self._graphs.values():
            graph.close()
        for allocator in self._allocators.values():
            self._peer.ggml_gallocr_free(allocator)
        self._graphs.clear()
        self._allocators.clear()

    def _mapped(self, path: Path) -> _MappedFile:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = np.frombuffer(mapping, np.uint8)
        touch_pages(view)
        buffer = self._peer.ggml_backend_cpu_buffer_from_ptr(view.ctypes.data, view.size)
        self._peer.ggml_backend_buffer_set_usage(buffer, _USAGE_WEIGHTS)
        return _MappedFile(mapping, view.ctypes.data, buffer)

    def _new_context(self, num_tensors: int, num_nodes: int) -> int:
        peer = self._peer
        size = num_tensors * peer.ggml_tensor_overhead()
        if num_nodes:
            size += peer.ggml_graph_overhead_custom(num_nodes, False)
        return int(peer.ggml_init(GgmlInitParams(size, None, True)))

    def _extra_buffer_types(self) -> list[int]:
        """Repacking buffer types, in the order in which llama.cpp tries them."""
        peer = self._peer
        registry = peer.ggml_backend_cpu_reg()
        self._device = peer.ggml_backend_reg_dev_get(registry, 0)
        address = peer.ggml_backend_reg_get_proc_address(
            registry, b"ggml_backend_dev_get_extra_bufts"
        )
        if not address:
            return []
        listed = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(
            self._device
        )
        types: list[int] = []
        while listed and listed[len(types)]:
            types.append(listed[len(types)])
        return types

    def _weight(self, layer: MoeLayer, projection: ExpertProjection) -> int:
        peer = self._peer
        shape = (projection.columns, projection.rows, layer.num_experts)
        type_id = int(projection.tensor_type)
        tensor = peer.ggml_new_tensor_3d(self._context, type_id, *shape)
        place = self._file.address + projection.offset_bytes
        for buffer_type in self._extra_types:
            if self._is_supported(buffer_type, type_id, shape):
                size = peer.ggml_backend_buft_get_alloc_size(buffer_type, tensor)
                buffer = peer.ggml_backend_buft_alloc_buffer(buffer_type, size)
                peer.ggml_backend_buffer_set_usage(buffer, _USAGE_WEIGHTS)
                base = peer.ggml_backend_buffer_get_base(buffer)
                peer.ggml_backend_tensor_alloc(buffer, tensor, base)
                num_bytes = peer.ggml_nbytes(tensor)
                peer.ggml_backend_tensor_set(tensor, place, 0, num_bytes)
                name = peer.ggml_backend_buft_name(buffer_type).decode()
                self._repacked.add(f"{projection.tensor_type.name} in {name}")
                return int(tensor)
        if peer.ggml_backend_tensor_alloc(self._file.buffer, tensor, place):
            raise PeerError(f"{projection.tensor_name}: ggml does not take the mapping")
        return int(tensor)

    def _is_supported(self, buffer_type: int, type_id: int, shape: tuple[int, int, int]) -> bool:
        """Ask llama.cpp: does the device multiply such a weight in such a buffer?"""
        peer = self._peer
        context = self._new_context(8, 0)
        try:
            weight = peer.ggml_new_tensor_3d(context, type_id, *shape)
            x = peer.ggml_new_tensor_3d(context, _F32, shape[0], 8, 512)
            ids = peer.ggml_new_tensor_2d(context, _I32, 8, 512)
            product = peer.ggml_mul_mat_id(context, weight, x, ids)
            empty = peer.ggml_backend_buft_alloc_buffer(buffer_type, 0)
            TensorHead.from_address(weight).buffer = empty
            supported = bool(peer.ggml_backend_dev_supports_op(self._device, product))
            peer.ggml_backend_buffer_free(empty)
            return supported
        finally:
            peer.ggml_free(context)

    def _graph(self, work: Work) -> _Graph:
        key = work.layer_index, work.num_tokens
        if key not in self._graphs:
            context = self._new_context(_GRAPH_NODES, _GRAPH_NODES)
            weights = self._weights[work.layer_index]
            hidden_size = self._layers[work.layer_index].hidden_size
            graph = _Graph(
                self._peer, context, weights, hidden_size, work.num_tokens, work.num_used
            )
            if work.num_tokens not in self._allocators:
                buffer_type = self._peer.ggml_backend_cpu_buffer_type()
                self._allocators[work.num_tokens] = self._peer.ggml_gallocr_new(buffer_type)
            allocator = self._allocators[work.num_tokens]
            if not self._peer.ggml_gallocr_alloc_graph(allocator, graph.graph):
                raise PeerError("ggml has no memory for the graph")
            self._graphs[key] = graph
        return self._graphs[key]


class _Graph:
    """One layer for one number of tokens."""

    def __init__(
        self,
        peer: Any,
        context: int,
        weights: list[int],
        hidden_size: int,
        num_tokens: int,
        num_used: int,
    ) -> None:
        self._peer, self._context = peer, context
        self._shape = num_tokens, hidden_size
        gate, up, down = weights
        self.graph = graph = peer.ggml_new_graph_custom(context, _GRAPH_NODES, False)
        self._x = peer.ggml_new_tensor_3d(context, _F32, hidden_size, 1, num_tokens)
        self._ids = peer.ggml_new_tensor_2d(context, _I32, num_used, num_tokens)
        self._weights = peer.ggml_new_tensor_3d(context, _F32, 1, num_used, num_tokens)
        for tensor in (self._x, self._ids, self._weights):
            peer.ggml_set_input(tensor)
        up_out = peer.ggml_mul_mat_id(context, up, self._x, self._ids)
        gate_out = peer.ggml_mul_mat_id(context, gate, self._x, self._ids)
        activation = peer.ggml_swiglu_split(context, gate_out, up_out)
        experts = peer.ggml_mul_mat_id(context, down, activation, self._ids)
        experts = peer.ggml_mul(context, experts, self._weights)
        peer.ggml_build_forward_expand(graph, experts)
        row, token = 4 * hidden_size, 4 * hidden_size * num_used
        views = [
            peer.ggml_view_2d(context, experts, hidden_size, num_tokens, token, index * row)
            for index in range(num_used)
        ]
        for view in views:
            peer.ggml_build_forward_expand(graph, view)
        total = views[0]
        for view in views[1:]:
            total = peer.ggml_add(context, total, view)
            peer.ggml_build_forward_expand(graph, total)
        peer.ggml_set_output(total)
        self._total = total

    def set_inputs(self, work: Work) -> None:
        for tensor, values in (
            (self._x, work.hidden),
            (self._ids, work.expert_ids),
            (self._weights, work.weights),
        ):
            assert values.flags.c_contiguous
            self._peer.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)

    def result(self) -> F32Array:
        out = np.empty(self._shape, np.float32)
        self._peer.ggml_backend_tensor_get(self._total, out.ctypes.data, 0, out.nbytes)
        return out

    def close(self) -> None:
        self._peer.ggml_free(self._context)
