"""The GPU backend: a device, its operations, and the experts on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.moe_spec import MoeLayer
from dflash_adapters.ops import KvType
from dflash_adapters.quant import TensorType
from dflash_protocol.device import Device
from dflash_protocol.ids import F32Array, I32Array, Phase
from dflash_runtime.compute.backend import ExpertBank
from dflash_runtime.compute.cupy.cupy_device import CupyDevice
from dflash_runtime.compute.cupy.device import KernelDevice
from dflash_runtime.compute.cupy.experts import CupyExpertBank
from dflash_runtime.compute.cupy.matrix import Uploader
from dflash_runtime.compute.cupy.moe import ComputeElsewhere, DeviceMoe
from dflash_runtime.compute.cupy.ops import CupyOps
from dflash_runtime.compute.cupy.resident import load_resident

MAX_CHUNK = 4096
"""Tokens of a chunk of a prompt: the more, the less often matrices are made halves of."""

_SCRATCH_BYTES = 1 << 30
"""For matrices as halves: all experts of a layer of a 30B model at once."""

KERNEL_VERSION = 1
"""To be raised with every change that changes bits."""


class CupyBackend:
    """Implements backend.ComputeBackend.

    Owns: the device, and with it all memory on it.
    """

    name = "cupy"

    def __init__(
        self,
        device: Device | KernelDevice,
        *,
        max_chunk: int = MAX_CHUNK,
        scratch_bytes: int = _SCRATCH_BYTES,
    ) -> None:
        """Raises: DeviceUnavailable, KernelCompileError."""
        self._undo = contextlib.ExitStack()
        if isinstance(device, Device):
            opened = CupyDevice(device)
            self._undo.callback(opened.close)
            device = opened
        self.device: KernelDevice = device
        self.numeric_class = f"cupy-{KERNEL_VERSION}/{device.capabilities.architecture}"
        self._uploader = Uploader(device)
        self.ops = CupyOps(device, self._uploader, max_chunk=max_chunk, scratch_bytes=scratch_bytes)

    def load_experts(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> CupyExpertBank:
        """Raises: UnsupportedModel, DeviceOutOfMemory."""
        by_global, by_local = load_resident(
            self.device, self._uploader, file, layer, global_expert_ids=global_expert_ids
        )
        self.ops.chunks.expect_experts(by_global)
        return CupyExpertBank(self.ops, by_global, by_local, int(global_expert_ids.size))

    def drop_experts(self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array) -> None:
        """Nothing: a bank's memory goes with it."""

    def moe(
        self,
        banks: Mapping[int, ExpertBank],
        phase: Phase,
        elsewhere: ComputeElsewhere | None,
    ) -> DeviceMoe:
        """The experts of a whole model: `banks` hold what is on this device, of every layer."""
        resident = {
            layer_id: bank.by_global
            for layer_id, bank in banks.items()
            if isinstance(bank, CupyExpertBank)
        }
        return DeviceMoe(self.ops, resident, phase, elsewhere)

    def to_host(self, rows: object) -> F32Array:
        """As backend.ComputeBackend.to_host."""
        return self.ops.to_host(rows)

    def warm_up(
        self,
        tensor_types: Iterable[TensorType],
        *,
        kv_type: KvType | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Nothing: kernels are compiled for a model's shapes, when it is first run."""

    def rest(self) -> None:
        """Nothing: no thread here waits for work."""

    def close(self) -> None:
        self.device.synchronize()
        self._undo.close()
