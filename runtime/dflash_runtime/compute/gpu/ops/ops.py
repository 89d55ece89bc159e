"""Everything that layers of models launch on one device."""

from __future__ import annotations

import threading

import numpy as np

from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.launch.decode_tokens import ArgmaxLogits
from dflash_runtime.compute.gpu.launch.row_kernels import Elementwise
from dflash_runtime.compute.gpu.layers.attention import AttentionLauncher
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.gpu.ops.choice_notes import ChoiceNotes
from dflash_runtime.compute.gpu.ops.chunks import ChunkExperts, ChunkKernels
from dflash_runtime.compute.gpu.ops.steps import StepExperts, StepKernels
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
        self.notes = ChoiceNotes()
        self.steps = StepKernels(device, self.notes)
        self.step_experts = StepExperts(device)
        self.chunks = ChunkKernels(
            device, self.notes, max_chunk=max_chunk, scratch_bytes=scratch_bytes
        )
        self.chunk_experts = ChunkExperts(self.chunks, self.payload)
        self.attention = AttentionLauncher(device, self.steps.buffers)
        self.elementwise = Elementwise(device)
        self._argmax: dict[int, tuple[ArgmaxLogits, DeviceArray]] = {}

    def kernels_for(self, rows: Rows) -> StepKernels | ChunkKernels:
        """The kernels that compute from such rows."""
        return self.steps if rows.is_step else self.chunks

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
