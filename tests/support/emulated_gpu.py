"""``cuda:N`` without a GPU: opening a device gives the backend on an emulated one. Or a real GPU
behind the same interface."""

from __future__ import annotations

import gc

import pytest

from dflash_protocol.device import Device, DeviceKind
from dflash_protocol.errors import DeviceUnavailable
from dflash_runtime.compute import ComputeBackend, devices, open_backend
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.compute.gpu.chunk_room import GROUP_TOKENS
from dflash_runtime.compute.gpu.device.cupy_device import CupyDevice
from dflash_runtime.compute.gpu.device.devices import DeviceMemory
from dflash_runtime.compute.slot_pins import NO_PINS, WarmPins
from dflash_runtime.engine.measuring import copied_experts
from support.driver_use import DriverUse
from support.emulated_device import EmulatedDevice
from support.gpu_devices import first_gpu, used_bytes
from support.random_gpt_oss import GptOssShape
from support.random_llama4 import Llama4Shape
from support.random_models import Qwen3MoeShape

TINY = Qwen3MoeShape(
    "tiny",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=5,
    num_experts_used=2,
    ffn_size=32,
    vocab_size=67,
)
"""A model that is small enough for the emulation."""

TINY_LLAMA4 = Llama4Shape(
    "tiny llama4",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=5,
    ffn_size=32,
    vocab_size=67,
)
"""The same with one expert per token, whose input is scaled (llama4)."""

TINY_GPT_OSS = GptOssShape(
    num_layers=TINY.num_layers,
    hidden_size=96,
    num_heads=4,
    head_dim=16,
    num_experts=TINY.num_experts,
    num_experts_used=2,
    ffn_size=96,
    vocab_size=TINY.vocab_size,
)
"""The same with biases (gpt-oss)."""

NUM_GPUS = 8
MAX_CHUNK = 20
SCRATCH_BYTES = 1 << 20


class EmulatedGpus:
    """Gives each backend that is opened an emulated device of its own, and lists them in order."""

    device = Device(DeviceKind.CUDA, 0)
    kernel_device = EmulatedDevice
    """The class of the devices; tests replace it to make calls fail."""
    kept_bytes = 0
    """Most bytes that may stay in use after everything is closed."""
    least_rounds = 1
    """Least number of rounds in which failures are tried; memory must not grow after the first."""

    def __init__(self) -> None:
        self.free_bytes = 1 << 40
        self.overlapped_from = MAX_CHUNK + 1
        """`overlapped_from` of backends that are opened from now on."""
        self.group_tokens = GROUP_TOKENS
        """`group_tokens` of these."""
        self.opened: list[EmulatedDevice] = []

    def open(
        self,
        device: Device,
        cache_dir: str | None = None,
        max_chunk: int = MAX_CHUNK,
        cache_slots: int = 0,
        slot_pins: WarmPins = NO_PINS,
    ) -> CupyBackend:
        if device.index >= NUM_GPUS:
            raise DeviceUnavailable(f"{device}: the driver sees {NUM_GPUS} devices of this kind")
        emulated = EmulatedDevice()
        self.opened.append(emulated)
        return CupyBackend(
            emulated,
            max_chunk=max_chunk,
            scratch_bytes=SCRATCH_BYTES,
            overlapped_from=self.overlapped_from,
            group_tokens=self.group_tokens,
            cache_slots=cache_slots,
            slot_pins=slot_pins,
            memory=self._memory,
        )

    def open_first(self) -> ComputeBackend:
        """The backend of ``cuda:0``, through `open_backend`."""
        return open_backend(Device(DeviceKind.CUDA, 0))

    def used_bytes(self) -> int:
        """Bytes in use on all devices."""
        return sum(each.num_bytes for each in self.opened)

    def held(self) -> dict[str, int]:
        """Bytes of all arrays, and the number of memory ranges that kernels may access."""
        gc.collect()
        num_pieces = sum(device.num_ranges for device in self.opened)
        return {"bytes of arrays": self.used_bytes(), "pieces of memory": num_pieces}

    def _memory(self) -> DeviceMemory:
        return DeviceMemory(self.free_bytes, 1 << 40, is_shared_with_host=False)


class RealGpu:
    """A real GPU with the interface of EmulatedGpus."""

    kernel_device = CupyDevice
    kept_bytes = 2 << 20
    """One of the driver's blocks: the last failure's traceback keeps memory until the next device
    is opened. Measured on an H200."""
    least_rounds = 4

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = device
        self.held = DriverUse(monkeypatch).held

    def open(
        self,
        device: Device,
        cache_dir: str | None = None,
        max_chunk: int = MAX_CHUNK,
        cache_slots: int = 0,
        slot_pins: WarmPins = NO_PINS,
    ) -> CupyBackend:
        return CupyBackend(
            device,
            max_chunk=MAX_CHUNK,
            scratch_bytes=SCRATCH_BYTES,
            cache_slots=cache_slots,
            slot_pins=slot_pins,
            cache_dir=cache_dir,
        )

    def used_bytes(self) -> int:
        """Bytes in use on the device by all processes, as the driver counts."""
        return used_bytes(self.device)


def install_emulated_gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    """Make `open_backend` open emulated GPUs."""
    gpus = EmulatedGpus()
    monkeypatch.setattr(devices, "why_unusable", lambda kind: None)
    monkeypatch.setattr(devices, "_open_gpu", gpus.open)
    # A group of so small chunks would have a hundred of them.
    monkeypatch.setattr(copied_experts, "_GROUP_TOKENS", 3 * MAX_CHUNK)
    return gpus


def install_real_gpu(monkeypatch: pytest.MonkeyPatch) -> RealGpu:
    """Make `open_backend` open the real GPU; skips the test if there is none."""
    gpu = RealGpu(first_gpu(), monkeypatch)
    monkeypatch.setattr(devices, "_open_gpu", gpu.open)
    return gpu
