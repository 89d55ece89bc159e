"""The kernels that are compiled ahead for a model are those that measuring and an engine launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.errors import DeviceUnavailable
from dflash_runtime import Engine
from dflash_runtime.compute import BackendName, make_backend
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.device.kernel_sources import Defines, define_options
from dflash_runtime.compute.gpu.device.noting_device import NotingDevice
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine import kernels_ahead
from dflash_runtime.engine.kernels_ahead import compile_kernels
from dflash_runtime.engine.measuring import copies, passes
from dflash_runtime.engine.measuring.measure import MeasuredDevice, measure_box
from dflash_runtime.placement.split import HOST_OWNER
from support import emulated_gpu
from support.architectures import RANDOM
from support.emulated_device import EmulatedDevice
from support.emulated_gpu import TINY, EmulatedGpus
from support.random_gguf import RandomShape, write_model
from support.random_models import write_qwen3moe
from support.undisturbed import settings_with

Modules = set[tuple[str, tuple[str, ...]]]


def noting(device: EmulatedDevice, on_module: Callable[[str, Defines], None]) -> NotingDevice:
    return NotingDevice(
        device.capabilities,
        lanes=device.lanes,
        num_multiprocessors=device.num_multiprocessors,
        max_shared_bytes=device.max_shared_bytes,
        on_module=on_module,
    )


class AheadDevice(EmulatedDevice):
    """Says what is to be compiled ahead, and what is asked for after that and was not."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead: Modules | None = None
        self.missing: Modules = set()

    def compile_ahead(self, *given: Any) -> None:
        _, launch, _ = given
        ahead = self.ahead = set()

        def note(file: str, defines: Defines) -> None:
            ahead.add((file, define_options(defines)))

        launch(noting(self, note))

    def module(self, file: str | Path, defines: Defines) -> Any:
        key = str(file), define_options(defines)
        if self.ahead is not None and key not in self.ahead:
            self.missing.add(key)
        return self.asked(file, defines)

    def asked(self, file: str | Path, defines: Defines) -> Any:
        return super().module(file, defines)


class IdleDevice(AheadDevice):
    """The same, but runs nothing."""

    def __init__(self) -> None:
        super().__init__()
        idle = noting(self, lambda file, defines: None)
        for name in (
            *("empty", "zeros", "upload", "download", "write", "copy", "launch", "capture"),
            *("map_host", "mark", "new_stream", "side_stream", "trim", "synchronize"),
        ):
            setattr(self, name, getattr(idle, name))
        setattr(self, "asked", idle.module)  # noqa: B010 - as a method it has another type


SHAPES = {"qwen3moe": TINY} | {name: each.SHAPE_ON_GPU for name, each in RANDOM.items()}


@pytest.mark.wide(1)
@pytest.mark.parametrize("num_here", [None, 1])
@pytest.mark.parametrize("architecture", SHAPES)
def test_all_that_opening_an_engine_asks_for(
    architecture: str,
    num_here: int | None,
    tmp_path: Path,
    gpus: EmulatedGpus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(emulated_gpu, "EmulatedDevice", IdleDevice)
    shape: RandomShape = SHAPES[architecture]
    model = write_model(tmp_path / "m.gguf", shape, seed=1, tensor_type="Q8_0")
    settings = replace(settings_with(check_replies=0), context=48, prefill_offload="off")
    with Engine.open(model, device="cuda:0", local_experts=num_here, settings=settings) as engine:
        assert (HOST_OWNER in engine.stats().owners) == (num_here is not None)
        (device,) = gpus.opened
        assert isinstance(device, IdleDevice)
        assert device.ahead
        assert not device.missing


def test_all_that_measuring_asks_for(
    tmp_path: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated_gpu, "EmulatedDevice", AheadDevice)
    monkeypatch.setattr(passes, "STEPS_IN_A_ROW", 1)
    monkeypatch.setattr(copies, "COPY_BYTES", 1 << 15)
    model = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    with GgufFile.open(model) as file, contextlib.ExitStack() as undo:
        host: Any = make_backend(BackendName.AUTO, num_threads=1)
        gpu: Any = gpus.open(EmulatedGpus.device)
        for each in (host, gpu):
            undo.callback(each.close)
        compile_kernels(
            gpu, file, kv_type=KvType.F16, asks_host=True, on_progress=lambda *progress: None
        )
        devices = [MeasuredDevice("cpu", host), MeasuredDevice("cuda:0", gpu)]
        measure_box(file, devices, key="k", kv_type=KvType.F16, limit_s=0.05, for_plan=True)
    (device,) = gpus.opened
    assert isinstance(device, AheadDevice)
    assert device.ahead
    assert not device.missing


def test_trouble_ahead_is_left_to_those_who_need_the_kernels(
    tmp_path: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DeviceUnavailable("no kernel")

    monkeypatch.setattr(kernels_ahead, "_launch_all", fail)
    monkeypatch.setattr(emulated_gpu, "EmulatedDevice", AheadDevice)
    model = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    settings = replace(settings_with(check_replies=0), context=48)
    with Engine.open(model, device="cuda:0", settings=settings) as engine:
        assert len([*engine.generate([1, 2, 3], 2, ignore_eos=True)]) == 2
    (device,) = gpus.opened
    assert isinstance(device, AheadDevice)
    assert device.ahead is not None
    assert "linear_decode.cu" not in {file for file, _ in device.ahead}


def test_a_device_that_runs_nothing_takes_no_memory_for_its_arrays() -> None:
    device: KernelDevice = noting(EmulatedDevice(), lambda file, defines: None)
    large = device.empty((1 << 20, 1 << 12), "u1")
    others = [device.zeros((7, 1 << 10), "f4") for _ in range(3)]
    assert {id(each.view("u1").base) for each in (large, *others)} == {id(large.base)}  # type: ignore[attr-defined]
    assert not device.download(others[0]).any()
