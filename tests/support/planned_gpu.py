"""A GPU to plan for, emulated or real: a test says what memory it has; its speed is made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.device import Device, DeviceKind
from dflash_runtime.compute.gpu.device.devices import DeviceMemory, GpuDescription
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine import planning, saved_plan
from dflash_runtime.engine.measuring import machine
from dflash_runtime.placement.box import Box, CopySpeed, Curve, DeviceSpeed
from dflash_runtime.placement.footprint import Memory, footprint
from support.emulated_gpu import EmulatedGpus, install_emulated_gpus

GPU = Device(DeviceKind.CUDA, 0)
CONTEXT = 48

_CPU_S_PER_BYTE = 1e-9
_GPU_S_PER_BYTE = 1e-11


def made_up_box(
    *gpus: Device,
    cpu_s_per_byte: float = _CPU_S_PER_BYTE,
    copies_per_s: float = 0.0,
    key: str = "key",
) -> Box:
    """The speeds of GPUs a hundred times as fast as the usual processor.

    `copies_per_s`: bytes from the page cache; 0: not measured, so that no expert is copied.
    """

    def speed(name: str, s_per_byte: float) -> DeviceSpeed:
        curve = {rows: Curve(((0.0, 0.0), (1e6, 1e6 * s_per_byte))) for rows in (1, 512)}
        return DeviceSpeed(name, curve, curve, curve, curve)

    names = [str(gpu) for gpu in gpus]
    speeds = {"cpu": speed("cpu", cpu_s_per_byte)}
    speeds |= {name: speed(name, _GPU_S_PER_BYTE) for name in names}
    stop = {name: Curve(((1.0, 1e-6),)) for name in names}
    copies = {name: CopySpeed(name, from_page_cache=copies_per_s) for name in names}
    return Box(key, speeds, copies=copies, host_stop=stop)


def install_planned_gpu(
    monkeypatch: pytest.MonkeyPatch,
    gpus: Sequence[Device],
    memory: Callable[[], DeviceMemory],
    box: Callable[[], Box] | None = None,
) -> None:
    """Let plans see GPUs of so much memory each, with the speeds of `box`; without, of
    `made_up_box`."""

    def described() -> list[GpuDescription]:
        return [
            GpuDescription(gpu, "it", str(gpu), "0000:01:00.0", memory(), None, None)
            for gpu in gpus
        ]

    def measured(*args: Any, **options: Any) -> Box:
        return made_up_box(*gpus) if box is None else box()

    monkeypatch.setattr(machine, "why_unusable", lambda kind: None)
    monkeypatch.setattr(planning, "gpus_of_machine", described)
    monkeypatch.setattr(saved_plan, "gpus_of_machine", described)
    monkeypatch.setattr(planning, "box_of_machine", measured)


class OneGpu:
    """An emulated GPU that the driver describes, and which was measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
        self.emulated: EmulatedGpus = install_emulated_gpus(monkeypatch)
        with GgufFile.open(model) as file:
            on_gpu = footprint(file, read_spec(file), Memory.GPU)
            needs = on_gpu.needs(
                num_positions=CONTEXT, kv_type=KvType.F16, chunk=512, num_remote_layers=2
            )
            self.needed = needs.total
            self.one_expert = on_gpu.experts_bytes({0: 1})
        self.room_bytes = 1 << 40
        self.num_measured = 0
        self.copies_per_s = 0.0
        self.key, self.cpu_ns = "key", 1.0
        self.gpus = [GPU]
        install_planned_gpu(monkeypatch, self.gpus, self._memory, self._box)
        monkeypatch.setattr(saved_plan, "key_of_machine", lambda *_: self.key)

    def make_room_for(self, num_experts: int) -> None:
        self.room_bytes = self.needed + num_experts * self.one_expert

    def _memory(self) -> DeviceMemory:
        return DeviceMemory(self.room_bytes, 1 << 40, is_shared_with_host=False)

    def _box(self) -> Box:
        self.num_measured += 1
        return made_up_box(
            *self.gpus,
            cpu_s_per_byte=self.cpu_ns * 1e-9,
            copies_per_s=self.copies_per_s,
            key=self.key,
        )
