"""The profile of a card with 12 GB: published models whose experts do not fit it, planned from
metadata alone through `dflash-moe plan`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.device import Device, DeviceKind
from dflash_protocol.settings import Settings
from dflash_runtime.cli.main import _run
from dflash_runtime.compute.gpu.device.devices import DeviceMemory, GpuDescription
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine import planning
from dflash_runtime.engine.measuring import machine
from dflash_runtime.placement.box import Box, CopySpeed, Curve
from dflash_runtime.placement.footprint import Memory, footprint
from support.planned_boxes import CARD, CORES_16, GIB
from support.sparse_models import REAL_SIZES, write_sparse

GPU = Device(DeviceKind.CUDA, 0)
LIMIT = 12 * GIB
MODELS = {
    "Qwen3-Coder-30B": ("qwen3moe", 48, "Q4_K"),
    "OLMoE": ("olmoe", 16, "F16"),
    "OLMoE, quantised": ("olmoe", 16, "Q8_0"),
}


def _one_card() -> list[GpuDescription]:
    """A card of 80 GB, so that only what is asked for keeps a plan within 12."""
    memory = DeviceMemory(79 * GIB, 80 * GIB, is_shared_with_host=False)
    return [GpuDescription(GPU, "it", "uuid", "0000:01:00.0", memory, None, None)]


def _box(file: GgufFile, settings: Settings, **options: Any) -> Box:
    devices = {"cpu": CORES_16.of("cpu"), str(GPU): CARD.of(str(GPU))}
    copies = {str(GPU): CopySpeed(str(GPU), from_page_cache=20e9, to_host=10e9)}
    return Box("key", devices, copies=copies, host_stop={str(GPU): Curve(((1.0, 60e-6),))})


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    architecture, num_layers, tensor_type = MODELS[request.param]
    monkeypatch.setattr(machine, "why_unusable", lambda kind: None)
    monkeypatch.setattr(planning, "gpus_of_machine", _one_card)
    monkeypatch.setattr(planning, "box_of_machine", _box)
    shape: Any = replace(REAL_SIZES[architecture][0], num_layers=num_layers)  # type: ignore[type-var]
    return write_sparse(tmp_path / "model.gguf", shape, tensor_type)


def test_every_layers_trunk_is_on_the_card_and_the_experts_budget_is_printed(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", str(model), "--device-memory-mb", str(LIMIT >> 20), "--heat", "off"]
    assert _run([*arguments, "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["setup"]["device"] == str(GPU)
    card = plan["budgets"][0]
    with GgufFile.open(model) as file:
        spec = read_spec(file)
        on_card = footprint(file, spec, Memory.GPU)
    needs = on_card.needs(
        num_positions=plan["setup"]["context"],
        kv_type=KvType(plan["setup"]["kv_type"]),
        chunk=plan["setup"]["chunk"],
    )
    # Embedding, head, and every layer but for its routed experts.
    assert card["trunk_bytes"] == needs.weights
    assert needs.weights > sum(layer.trunk for layer in on_card.layers) > 0
    used = [card[f"{use}_bytes"] for use in ("trunk", "cache", "work", "expert")]
    assert sum(used) <= card["free_bytes"] <= LIMIT
    total = spec.moe.num_experts_total
    assert 0.4 * total < card["num_experts"] <= total
    assert sum(each["num_experts"] for each in plan["budgets"]) == total
    # What is left beside the rest is used.
    missing = total - card["num_experts"]
    assert not missing or sum(used) > 0.9 * LIMIT

    assert _run(arguments) == 0
    text = capfd.readouterr().out
    [line] = [each for each in text.splitlines() if each.startswith(str(GPU))]
    assert re.search(rf"\d\.\d experts: {card['num_experts']:,} of {total:,}$", line)
    assert f"{card['expert_bytes'] / GIB:.1f} experts" in line
