"""A box is filled with real passes of a small model, on the processor and on a GPU, emulated
here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.device import CPU
from dflash_protocol.settings import Settings
from dflash_runtime.compute import BackendName, make_backend
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine.measuring import copies, machine, passes
from dflash_runtime.engine.measuring.machine import box_of_machine
from dflash_runtime.engine.measuring.measure import MeasuredDevice, measure_box
from dflash_runtime.placement.box import Box, Curve, DeviceSpeed
from support.architectures import RANDOM
from support.emulated_gpu import TINY, EmulatedGpus
from support.random_gguf import write_model
from support.random_models import write_qwen3moe

QUICK_S = 0.05
KV = KvType.F16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


@pytest.fixture
def host() -> Iterator[MeasuredDevice]:
    backend = make_backend(BackendName.AUTO, num_threads=1)
    yield MeasuredDevice("cpu", backend)
    backend.close()


def measured(
    path: Path, *devices: MeasuredDevice, known: Box | None = None, limit_s: float = QUICK_S
) -> Box:
    with GgufFile.open(path) as file:
        return measure_box(file, devices, key="k", kv_type=KV, known=known, limit_s=limit_s)


def is_sound(curve: Curve) -> bool:
    return all(math.isfinite(seconds) and seconds >= 0.0 for _, seconds in curve.points)


def check_device(box: Box, name: str, *, rows: set[int]) -> None:
    device = box.devices[name]
    assert set(device.trunk) == set(device.experts) == set(device.head) == rows
    assert set(device.attention) <= rows
    for num_rows, curve in device.experts.items():
        assert curve.points[0] == (0.0, 0.0)
        assert curve.points[-1][0] == num_rows * TINY.num_experts_used * 6528  # bytes of an expert
        assert curve.points[-1][1] >= curve.points[1][1]
    curves = (device.trunk, device.experts, device.head, device.attention)
    assert all(is_sound(curve) for each in curves for curve in each.values())
    assert all(seconds > 0.0 for _, seconds in device.trunk[1].points)


def test_the_host(model: Path, host: MeasuredDevice) -> None:
    box = measured(model, host, limit_s=5.0)
    assert box.key == "k"
    assert set(box.devices) == {"cpu"}
    check_device(box, "cpu", rows={1, 2, 4, 8, 64, 512})
    assert not box.host_stop
    assert not box.copies


def test_a_gpu_beside_the_host(
    model: Path, host: MeasuredDevice, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "STEPS_IN_A_ROW", 1)
    monkeypatch.setattr(copies, "COPY_BYTES", 1 << 15)
    backend: Any = gpus.open(EmulatedGpus.device)
    before = gpus.held()
    box = measured(model, host, MeasuredDevice("cuda:0", backend, lambda: "gen 4 x8"))
    check_device(box, "cuda:0", rows={1, backend.chunking.preferred})
    assert [rows for rows, _ in box.host_stop["cuda:0"].points] == [1.0, 20.0]
    rates = box.copies["cuda:0"]
    assert min(rates.from_locked, rates.from_page_cache, rates.to_host, rates.kernel_reads) > 0.0
    assert rates.pcie == "gen 4 x8"
    assert [(each.first, each.second) for each in box.together] == [
        ("experts of cpu", "copies to cuda:0"),
        ("experts of cpu", "steps of cuda:0"),
    ]
    assert all(min(each.first_factor, each.second_factor) >= 1.0 for each in box.together)
    backend.close()
    del backend
    assert gpus.held()["pieces of memory"] <= before["pieces of memory"]


def test_ctrl_c_gives_all_memory_back(model: Path, gpus: EmulatedGpus) -> None:
    """What stays is the backend's: buffers that are used again, and a model's rotary angles."""
    backend: Any = gpus.open(EmulatedGpus.device)

    def interrupt(what: str, num_done: int, num_total: int) -> None:
        if num_done == 1:
            raise KeyboardInterrupt

    def held_after() -> dict[str, int]:
        with GgufFile.open(model) as file, pytest.raises(KeyboardInterrupt):
            measure_box(
                file,
                [MeasuredDevice("cuda:0", backend)],
                key="k",
                kv_type=KV,
                limit_s=QUICK_S,
                on_progress=interrupt,
            )
        return gpus.held()

    first = held_after()
    assert held_after()["pieces of memory"] <= first["pieces of memory"] + 1
    backend.close()


def test_what_is_known_is_not_measured_again(model: Path, host: MeasuredDevice) -> None:
    known = measured(model, host)
    again = measured(model, host, known=known)
    assert again == known


@pytest.mark.parametrize("architecture", ["qwen35moe", "llama4", "gpt_oss"])
def test_layers_of_several_kinds(architecture: str, tmp_path: Path, host: MeasuredDevice) -> None:
    path = write_model(tmp_path / "m.gguf", RANDOM[architecture].SMALL, seed=1)
    box = measured(path, host)
    device = box.devices["cpu"]
    for each in (device.trunk, device.experts, device.head, device.attention):
        assert all(is_sound(curve) for curve in each.values())


def test_a_box_is_kept_for_the_next_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def measure(file: GgufFile, devices: list[MeasuredDevice], *, key: str, **_: object) -> Box:
        calls.append([each.name for each in devices])
        return Box(key, {each.name: DeviceSpeed(each.name, {}) for each in devices})

    monkeypatch.setattr(machine, "measure_box", measure)
    settings = Settings(backend="reference", cache_dir=str(tmp_path))
    with GgufFile.open(model) as file:
        first = box_of_machine(file, settings, devices=(CPU,))
        assert box_of_machine(file, settings, devices=(CPU,)) == first
        assert calls == [["cpu"]]
        box_of_machine(file, settings, devices=(CPU,), measures_all=True)
        assert len(calls) == 2
        other = box_of_machine(file, replace(settings, kv_type="q8_0"), devices=(CPU,))
        assert other.key != first.key
        assert len(calls) == 3
