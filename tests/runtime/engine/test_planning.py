"""Opening by plan: what is decided where a GPU is too small, what was asked for, and what is wrong.

The GPU is emulated, and its speed made up; real ones are planned for in `bench`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.device import CPU, Device, DeviceKind
from dflash_protocol.errors import SettingsError, UnsupportedModel
from dflash_protocol.settings import Settings, load_settings
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.device.devices import DeviceMemory, GpuDescription
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine import planning
from dflash_runtime.engine.measuring import machine
from dflash_runtime.engine.planning import plan_of_file
from dflash_runtime.placement.box import Box, CopySpeed, Curve, DeviceSpeed
from dflash_runtime.placement.footprint import Memory, footprint
from dflash_runtime.placement.plan_record import as_json
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from support.emulated_gpu import TINY, EmulatedGpus, install_emulated_gpus
from support.random_models import write_qwen3moe

PROMPT = [5, 9, 2, 40, 11, 3, 17, 8, 1, 30, 22]
GPU = Device(DeviceKind.CUDA, 0)
CONTEXT = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


class OneGpu:
    """A GPU that the driver describes, and which was measured."""

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
        monkeypatch.setattr(machine, "why_unusable", lambda kind: None)
        monkeypatch.setattr(planning, "gpus_of_machine", self._gpus)
        monkeypatch.setattr(planning, "box_of_machine", self._box)

    def make_room_for(self, num_experts: int) -> None:
        self.room_bytes = self.needed + num_experts * self.one_expert

    def _gpus(self) -> list[GpuDescription]:
        memory = DeviceMemory(self.room_bytes, 1 << 40, is_shared_with_host=False)
        return [GpuDescription(GPU, "it", "uuid", "0000:01:00.0", memory, None, None)]

    def _box(self, file: GgufFile, settings: Settings, **options: Any) -> Box:
        self.num_measured += 1

        def speed(name: str, ns: float) -> DeviceSpeed:
            curve = {rows: Curve(((0.0, 0.0), (1e6, 1e6 * ns * 1e-9))) for rows in (1, 512)}
            return DeviceSpeed(name, curve, curve, curve, curve)

        devices = {"cpu": speed("cpu", 1.0), str(GPU): speed(str(GPU), 0.01)}
        stop = {str(GPU): Curve(((1.0, 1e-6),))}
        return Box("key", devices, copies={str(GPU): CopySpeed(str(GPU))}, host_stop=stop)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, model: Path) -> OneGpu:
    return OneGpu(monkeypatch, model)


def settings_of(model: Path, **wishes: Any) -> Settings:
    options = {"context": CONTEXT, "kv_type": "f16", **wishes}
    return replace(load_settings(), model=str(model), **options)


def opened(model: Path, **wishes: Any) -> Engine:
    return Engine.open(model, settings=settings_of(model, **wishes))


def test_where_all_fits_nothing_is_measured(gpu: OneGpu, model: Path) -> None:
    with opened(model) as engine:
        assert engine.backend_name == "cupy"
        assert engine.placement.owner_names == (LOCAL_OWNER,)
        assert engine.plan is None
    assert gpu.num_measured == 0


@pytest.mark.parametrize("device", [None, GPU])
def test_where_it_does_not_fit_the_processor_has_the_rest(
    gpu: OneGpu, model: Path, device: Device | None
) -> None:
    gpu.make_room_for(5)
    with opened(model, device=device) as engine:
        plan, placement = engine.plan, engine.placement
        logits = engine.logits(PROMPT)
    assert plan is not None
    assert plan.setup.device == GPU
    assert {*placement.owner_names} == {LOCAL_OWNER, HOST_OWNER}
    assert 0 < placement.owners[placement.owner_names.index(LOCAL_OWNER)].num_experts <= 5
    with opened(model, device=GPU, fit="off") as fresh:
        assert fresh.plan is None
    with Engine.open(
        model, placement=placement, settings=settings_of(model, device=GPU, prefill_offload="off")
    ) as fresh:
        np.testing.assert_array_equal(fresh.logits(PROMPT), logits)


def test_what_is_asked_for_is_obeyed(gpu: OneGpu, model: Path) -> None:
    gpu.make_room_for(100)
    layers = {each: range(TINY.num_experts) for each in range(TINY.num_layers)}

    def here(**wishes: Any) -> dict[int, list[int]]:
        with opened(model, **wishes) as engine:
            placement = engine.placement
        if LOCAL_OWNER not in placement.owner_names:
            return {}
        owned = placement.owners[placement.owner_names.index(LOCAL_OWNER)]
        return {layer_id: sorted(ids.tolist()) for layer_id, ids in owned.by_layer.items()}

    assert here(cpu_moe=True) == {}
    assert here(n_cpu_moe=1) == {1: [*layers[1]]}
    assert here(override_tensor=((r"blk\.1\.", "cpu"),)) == {0: [*layers[0]]}
    assert sum(map(len, here(expert_budget_pct=50).values())) <= 5
    with opened(model, gpu_layers=0) as engine:
        assert engine.backend_name == "cpu"


def test_a_saved_plan_is_used(gpu: OneGpu, model: Path, tmp_path: Path) -> None:
    gpu.make_room_for(5)
    found = plan_of_file(settings_of(model), on_progress=lambda *progress: None)
    path = tmp_path / "plan.json"
    path.write_text(as_json(found))
    gpu.num_measured = 0
    with opened(model, plan=str(path)) as engine:
        assert engine.placement.routing.keys() == found.placement.routing.keys()
        for layer_id, routing in engine.placement.routing.items():
            expected = found.placement.routing[layer_id]
            np.testing.assert_array_equal(routing.owner_index, expected.owner_index)
    assert gpu.num_measured == 0
    path.write_text(as_json(found)[:-40])
    with pytest.raises(SettingsError, match=r"plan\.json"):
        opened(model, plan=str(path))
    path.write_text(as_json(found).replace(found.origin.model_identity, "0" * 64))
    with pytest.raises(SettingsError, match="another model"):
        opened(model, plan=str(path))


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"gpu_layers": 1}, "--n-cpu-moe 1"),
        ({"cpu_moe": True, "n_cpu_moe": 1}, "--cpu-moe and --n-cpu-moe"),
        ({"expert_budget_mb": 1, "expert_budget_pct": 1}, "--expert-budget"),
        ({"override_tensor": (("nothing", "cpu"),)}, "matches no tensor"),
        ({"override_tensor": (("exps", "nobody"),)}, "owners are"),
        ({"device": CPU, "gpu_layers": 99}, "contradict"),
    ],
)
def test_contradictions_and_wishes_that_cannot_be_had_are_errors(
    gpu: OneGpu, model: Path, wishes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        opened(model, **wishes)


def test_a_gpu_without_room_for_the_rest_says_what_would_fit(gpu: OneGpu, model: Path) -> None:
    gpu.room_bytes = gpu.needed // 2
    with pytest.raises(SettingsError, match="cuda:0: the model without its experts"):
        opened(model, device=GPU)
    with opened(model) as engine:  # the processor has room
        assert engine.backend_name == "cpu"


def test_without_a_gpu_one_cannot_be_asked_for(model: Path) -> None:
    with pytest.raises(SettingsError, match="no GPU"):
        opened(model, gpu_layers=99)


def test_daemons_are_planned_for_once_they_have_said_what_they_have(
    gpu: OneGpu, model: Path
) -> None:
    gpu.make_room_for(5)
    settings = settings_of(model)
    with Engine.open(model, daemons=["cpu"], settings=settings) as engine:
        plan = engine.plan
        tokens = [each.token_id for each in engine.generate(PROMPT, 8, ignore_eos=True)]
        names = engine.placement.owner_names
        owners = engine.stats().owners
    assert plan is not None
    assert len(tokens) == 8
    assert "cpu0" in names
    assert sum(each.pairs for each in owners.values()) > 0


def test_a_model_without_gpu_kernels_is_computed_on_the_processor(
    gpu: OneGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    narrow = replace(TINY, ffn_size=52)
    path = write_qwen3moe(tmp_path / "narrow.gguf", narrow, seed=4, tensor_type="F16")
    with opened(path) as engine:
        assert engine.backend_name == "cpu"
    assert "there are no GPU kernels" in caplog.text
    with pytest.raises(UnsupportedModel, match="no GPU kernels"):
        opened(path, device=GPU)
