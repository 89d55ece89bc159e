"""CPU-MoE on every registered architecture, the GPU emulated: trunk and shared experts on the
device, routed experts, or half of each layer's, on the processor. The text is that of a model which
is on the device as a whole.

Float files, whose products differ by rounding alone between devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dflash_adapters.registry import ARCHITECTURES
from dflash_protocol.device import Device, DeviceKind
from dflash_protocol.ids import F32Array
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.device.devices import DeviceMemory
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from support.emulated_gpu import TINY, install_emulated_gpus
from support.gpu_models import SHAPES, largest_error
from support.planned_gpu import install_planned_gpu
from support.random_gguf import write_model
from support.undisturbed import settings_with

PROMPT = [5, 9, 2, 40, 11, 3, 17, 8, 1, 30, 22]
NUM_TOKENS = 5
BOUND = 1e-4


@dataclass(frozen=True)
class Resident:
    """A model, and what it computes with all of its experts on the device."""

    path: Path
    num_experts: int
    tokens: list[int]
    logits: F32Array


def install_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install_emulated_gpus(monkeypatch)
    memory = DeviceMemory(1 << 40, 1 << 40, is_shared_with_host=False)
    install_planned_gpu(monkeypatch, [Device(DeviceKind.CUDA, 0)], lambda: memory)


def opened(path: Path, **wishes: Any) -> Engine:
    settings = replace(
        settings_with(check_replies=0), context=48, prefill_offload="off", kv_type="f32", **wishes
    )
    return Engine.open(path, device="cuda:0", settings=settings)


def results_of(engine: Engine) -> tuple[list[int], F32Array]:
    tokens = [each.token_id for each in engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True)]
    return tokens, engine.logits([*PROMPT, *tokens])


@pytest.fixture(scope="module", params=ARCHITECTURES)
def resident(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Resident]:
    shape = SHAPES.get(request.param.replace("-", "_"), TINY)
    path = write_model(tmp_path_factory.mktemp("model") / "m.gguf", shape, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        install_gpu(patch)
        with opened(path) as engine:
            assert engine.placement.owner_names == (LOCAL_OWNER,)
            yield Resident(path, shape.num_experts, *results_of(engine))


@pytest.mark.wide(1)
@pytest.mark.parametrize("part", ["none", "half"])
def test_text_is_that_of_a_resident_model(
    resident: Resident, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    install_gpu(monkeypatch)
    most = resident.num_experts
    wishes = {"cpu_moe": True} if part == "none" else {"local_experts": most // 2}
    with opened(resident.path, **wishes) as engine:
        owned = dict(zip(engine.placement.owner_names, engine.placement.owners, strict=True))
        tokens, logits = results_of(engine)
        pairs = {name: owner.pairs for name, owner in engine.stats().owners.items()}
    assert {*owned} == ({HOST_OWNER} if part == "none" else {LOCAL_OWNER, HOST_OWNER})
    assert all(pairs[name] > 0 for name in owned)
    if part == "half":
        layers = owned[LOCAL_OWNER].by_layer
        assert all(ids.tolist() == [*range(most // 2)] for ids in layers.values())
    assert tokens == resident.tokens
    assert largest_error(logits, resident.logits) < BOUND
