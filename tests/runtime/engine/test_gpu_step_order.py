"""Experts on processors beside a GPU, emulated here, on every registered architecture: where the
GPU computes prompts, all logits are those of a model that is on the GPU as a whole, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dflash_adapters.registry import ARCHITECTURES
from dflash_protocol.device import Device, DeviceKind
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.device.devices import DeviceMemory
from dflash_runtime.placement.split import HOST_OWNER
from support.emulated_gpu import TINY, install_emulated_gpus
from support.gpu_models import SHAPES
from support.logprobs import Bits, bits_of
from support.planned_gpu import install_planned_gpu
from support.random_gguf import write_model
from support.undisturbed import settings_with

PROMPT = [5, 9, 2, 40, 11, 3, 17, 8, 1, 30, 22]
NUM_TOKENS = 5


@dataclass(frozen=True)
class Resident:
    """A model, and what it computes with all of its experts on the device."""

    path: Path
    num_experts: int
    bits: Bits


def install_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install_emulated_gpus(monkeypatch)
    memory = DeviceMemory(1 << 40, 1 << 40, is_shared_with_host=False)
    install_planned_gpu(monkeypatch, [Device(DeviceKind.CUDA, 0)], lambda: memory)


def opened(path: Path, *, daemons: tuple[str, ...] = (), **wishes: Any) -> Engine:
    settings = replace(settings_with(), context=48, prefill_offload="on", **wishes)
    return Engine.open(path, device="cuda:0", daemons=daemons, settings=settings)


BY_DEFAULT = "qwen3moe", "gpt-oss", "llama4"
"""The plainest, one with biases and another activation, one whose experts get scaled rows."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow)
        for name in ARCHITECTURES
    ],
)
def resident(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Resident]:
    shape = SHAPES.get(request.param.replace("-", "_"), TINY)
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    write_model(path, shape, seed=2, tensor_type="Q8_0")
    with pytest.MonkeyPatch.context() as patch:
        install_gpu(patch)
        with opened(path) as engine:
            yield Resident(path, shape.num_experts, bits_of(engine, PROMPT, num_tokens=NUM_TOKENS))


def test_beside_the_parents_processor(resident: Resident, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpu(monkeypatch)
    with opened(resident.path, local_experts=resident.num_experts // 2) as engine:
        assert bits_of(engine, PROMPT, num_tokens=NUM_TOKENS) == resident.bits
        assert engine.stats().owners[HOST_OWNER].pairs > 0


def test_in_a_daemon_whose_replies_are_all_checked(
    resident: Resident, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_gpu(monkeypatch)
    with opened(resident.path, daemons=("cpu",), local_experts=1, check_replies=1) as engine:
        assert bits_of(engine, PROMPT, num_tokens=NUM_TOKENS) == resident.bits
        stats = engine.stats().owners["cpu0"]
        assert stats.pairs > 0
        assert stats.wrong_replies == 0
