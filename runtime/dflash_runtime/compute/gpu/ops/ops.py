"""Everything that layers of models launch on one device."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.backend import argmax_of
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.launch.decode_arrays import MOST_TOKENS
from dflash_runtime.compute.gpu.launch.decode_tokens import ArgmaxLogits
from dflash_runtime.compute.gpu.launch.row_kernels import ColumnsOf, Elementwise
from dflash_runtime.compute.gpu.layers.attention import AttentionLauncher
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.gpu.ops.chunk_experts import ChunkExperts
from dflash_runtime.compute.gpu.ops.chunks import ChunkKernels
from dflash_runtime.compute.gpu.ops.step_experts import StepExperts
from dflash_runtime.compute.gpu.ops.steps import StepKernels
from dflash_runtime.compute.gpu.transfers.payload import PayloadMover


class GpuOps:
    """Launches of steps, of chunks, and of what both have; shared by models and banks of a backend.

    Owns: buffers for results, which are taken when first needed.
    """

    def __init__(
        self, device: KernelDevice, *, max_chunk: int, scratch_bytes: int, lock: threading.RLock
    ) -> None:
        """`max_chunk` is the most tokens of a chunk, `scratch_bytes` are for matrices as halves;
        `lock`: see payload.PayloadMover."""
        self.device = device
        self.payload = PayloadMover(device, lock)
        self.steps = StepKernels(device)
        self.step_experts = StepExperts(device)
        self.chunks = ChunkKernels(device, max_chunk=max_chunk, scratch_bytes=scratch_bytes)
        self.chunk_experts = ChunkExperts(self.chunks, self.payload)
        self.attention = AttentionLauncher(device, self.steps.buffers)
        self.elementwise = Elementwise(device)
        self._argmax: dict[int, tuple[ArgmaxLogits, DeviceArray]] = {}

    def kernels_for(self, rows: Rows) -> StepKernels | ChunkKernels:
        """The kernels that compute from such rows."""
        return self.steps if rows.is_step else self.chunks

    def to_host(self, rows: Rows) -> F32Array:
        """The rows, once everything before them is done. Shapes: result [T, columns]."""
        array: F32Array = self.device.download(rows.array)
        return array

    def copy_rows(self, rows: Rows, out: DeviceArray) -> None:
        """Copy rows into an array. Shapes: out [T, columns] float32."""
        self.elementwise.take_columns(ColumnsOf.whole(rows.array), out)

    def joined(self, parts: Sequence[Rows]) -> Rows:
        """Rows, one after the other."""
        num_tokens = sum(part.num_tokens for part in parts)
        kernels = self.steps if num_tokens <= MOST_TOKENS else self.chunks
        joined, first = kernels.rows(num_tokens, parts[0].columns), 0
        for part in parts:
            self.device.copy(joined.array[first : first + part.num_tokens], part.array)
            first += part.num_tokens
        return joined

    def argmax(self, logits: Rows) -> I32Array:
        """See ComputeBackend.argmax; for a step it is computed on the device, where logits stay."""
        if not logits.partials:
            return argmax_of(self.to_host(logits))
        token_ids = self.device.empty((logits.num_tokens,), np.int32)
        first = 0
        for partials in logits.partials:
            end = first + partials.shape[1]
            self.write_argmax(partials, token_ids[first:end])
            first = end
        argmax: I32Array = self.device.download(token_ids)
        return argmax

    def write_argmax(self, partials: DeviceArray, token_ids: DeviceArray) -> None:
        """The most likely token of each row of up to MOST_TOKENS, from what a head has found.

        Shapes: partials [blocks, T] uint64; token_ids [T] int32.
        """
        size = token_ids.shape[0]
        if size not in self._argmax:
            argmax = ArgmaxLogits(self.device, num_tokens=size, advances=False)
            self._argmax[size] = argmax, self.device.zeros((size,), np.int32)
        argmax, positions = self._argmax[size]
        argmax.launch(partials, token_ids, positions)
