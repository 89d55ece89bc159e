"""A box is filled with real passes of a small model, on the processor and on a GPU, emulated here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.device import CPU
from dflash_protocol.settings import Settings
from dflash_runtime.engine.measuring import machine
from dflash_runtime.engine.measuring.machine import box_of_machine
from dflash_runtime.placement.box import Box, Curve
from support.emulated_gpu import TINY, EmulatedGpus, install_emulated_gpus
from support.random_models import write_qwen3moe


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    return install_emulated_gpus(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


def is_sound(curve: Curve) -> bool:
    return all(math.isfinite(y) and y >= 0.0 for _, y in curve.points)


def test_a_gpu(
    model: Path, gpus: EmulatedGpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "LIMIT_S", 0.2)
    settings = Settings(cache_dir=str(tmp_path), threads=1)
    with GgufFile.open(model) as file:
        box = box_of_machine(file, settings, devices=(CPU, EmulatedGpus.device), measures_all=True)
    print(box)
