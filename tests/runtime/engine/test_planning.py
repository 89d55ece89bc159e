"""Opening by plan: what is decided where a GPU is too small, what was asked for, and what is wrong.

The GPU is emulated, and its speed made up; real ones are planned for in `bench`.
"""

from __future__ import annotations

import logging
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.device import CPU, Device
from dflash_protocol.errors import SettingsError, UnsupportedModel
from dflash_protocol.ids import Phase
from dflash_protocol.numeric_class import class_in_phase
from dflash_protocol.settings import Settings, load_settings
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.chunk_room import GPU_CHUNKS
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine import kept_plan, planning
from dflash_runtime.engine.deciding import plan_of_file
from dflash_runtime.engine.generation import GenerationStats
from dflash_runtime.engine.predictions import Predictions
from dflash_runtime.placement.footprint import Memory, footprint
from dflash_runtime.placement.plan import Plan
from dflash_runtime.placement.plan_record import as_json, summary_of
from dflash_runtime.placement.plan_text import plan_text
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from dflash_runtime.placement.wishes import Wishes
from support.emulated_gpu import TINY
from support.faults import fill, small_file_system
from support.planned_gpu import CONTEXT, GPU, OneGpu
from support.processes import START_S, running_daemon
from support.random_models import write_qwen3moe

PROMPT = [5, 9, 2, 40, 11, 3, 17, 8, 1, 30, 22]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, model: Path) -> OneGpu:
    return OneGpu(monkeypatch, model)


def settings_of(model: Path, **wishes: Any) -> Settings:
    options = {"context": CONTEXT, "kv_type": "f16", "heat": "off", **wishes}
    return replace(load_settings(), model=str(model), **options)


def text_of(engine: Engine) -> list[int]:
    return [each.token_id for each in engine.generate(PROMPT, 8, ignore_eos=True)]


def opened(model: Path, **wishes: Any) -> Engine:
    return Engine.open(model, settings=settings_of(model, **wishes))


def test_where_all_fits_nothing_is_measured(gpu: OneGpu, model: Path) -> None:
    with opened(model) as engine:
        assert engine.backend_name == "cupy"
        assert engine.placement.owner_names == (LOCAL_OWNER,)
        assert engine.plan is None
    assert gpu.num_measured == 0


def test_where_all_fits_the_context_is_the_largest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shape = replace(TINY, context_length=16_384)
    model = write_qwen3moe(tmp_path / "m.gguf", shape, seed=4, tensor_type="Q8_0")
    gpu = OneGpu(monkeypatch, model)
    with opened(model, context=None) as engine:
        assert engine.num_positions == 16_384
    with GgufFile.open(model) as file:
        found = footprint(file, read_spec(file), Memory.GPU)
    needs = found.needs(num_positions=16_384, kv_type=KvType.F16, chunk=GPU_CHUNKS[0])
    gpu.room_bytes = needs.total + found.every_expert - 1
    with opened(model, context=None) as engine:
        assert (engine.num_positions, engine.plan) == (8192, None)
    with opened(model, context=100) as engine:
        assert engine.num_positions == 100
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


def test_generations_are_compared_with_predictions(
    gpu: OneGpu, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.make_room_for(5)
    noted: list[tuple[int, float, bool]] = []

    def note(_: Predictions, stats: GenerationStats, elapsed_s: float) -> None:
        noted.append((stats.num_generated_tokens, stats.decode_s, elapsed_s >= stats.decode_s))

    monkeypatch.setattr(Predictions, "note", note)
    with opened(model) as engine:
        assert engine.predictions.plan is engine.plan is not None
        list(engine.generate(PROMPT, 5, ignore_eos=True))
        for _ in engine.generate(PROMPT, 5, ignore_eos=True):
            break
        decode_s = engine.last_generation.decode_s
    assert [num for num, _, _ in noted] == [5, 1]
    assert noted[1][1] == decode_s
    assert all(is_more for *_, is_more in noted)


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


@pytest.mark.parametrize("daemons", [[], ["cpu"]])
@pytest.mark.parametrize("copies_per_s", [0.0, 1e12])
def test_what_was_asked_for_is_priced_for_prompts(
    gpu: OneGpu, model: Path, copies_per_s: float, daemons: list[str]
) -> None:
    gpu.copies_per_s = copies_per_s
    settings = settings_of(model, local_experts=1, check_replies=0)
    with Engine.open(model, daemons=daemons, settings=settings) as engine:
        assert engine.plan is None
        engine.logits(PROMPT)
        assert (engine.stats().hits.offloaded > 0) == (copies_per_s > 0)
        assert engine._owners.runtime.may_offload_now == (copies_per_s > 0)
        placement = engine.placement
    assert gpu.num_measured == 1
    if not daemons:
        settings = settings_of(model, device=GPU)
        with Engine.open(model, placement=placement, settings=settings) as engine:
            engine.logits(PROMPT)
            assert (engine.stats().hits.offloaded > 0) == (copies_per_s > 0)


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
    longer = replace(found, setup=replace(found.setup, context=1 << 29))
    path.write_text(as_json(longer))
    with pytest.raises(SettingsError, match="was made for up to"):
        opened(model, plan=str(path), context=None)
    path.write_text(as_json(found))
    gpu.key = "other"
    with pytest.raises(SettingsError, match="another machine, driver or version"):
        opened(model, plan=str(path))


class KeptPlans:
    """Openings with a heat file of their own, beside which the plan is kept."""

    def __init__(self, model: Path, heat: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.model, self.heat, self.place = model, heat, heat.with_name(heat.name + ".plan")
        self.caplog = caplog
        caplog.set_level(logging.INFO)

    def opened(self, **wishes: Any) -> tuple[Plan, str]:
        """The plan of an opening, and what was logged of kept ones."""
        self.caplog.clear()
        with opened(self.model, heat=str(self.heat), **wishes) as engine:
            found = engine.plan
        assert found is not None
        texts = self.caplog.messages
        told = [each for each in self.caplog.records if each.msg.startswith("the kept plan")]
        assert len(told) <= 1
        for record in told:  # as in the plan's reason, but not in the file that is kept
            assert isinstance(record.args, tuple)
            assert str(record.args[0]) in found.reason
            assert not self.place.is_file() or str(record.args[0]) not in self.place.read_text()
        assert ("The kept plan" in found.reason) == bool(told)
        return found, " ".join(each for each in texts if "kept plan" in each or "not kept" in each)


@pytest.fixture
def kept(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> KeptPlans:
    return KeptPlans(model, tmp_path / "it.heat", caplog)


def local_counts(found: Plan) -> list[int]:
    return [owned.num_experts for owned in found.placement.owners]


def test_a_kept_plan_is_replaced_only_for_a_gain(
    gpu: OneGpu, kept: KeptPlans, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept_plan.LEAST_GAIN == 1.05
    gpu.make_room_for(5)
    first, told = kept.opened()
    assert told == ""
    content = kept.place.read_bytes()
    gpu.make_room_for(6)
    gpu.cpu_ns = 0.9
    with monkeypatch.context() as patched:
        patched.setattr(kept_plan, "LEAST_GAIN", 1.5)
        second, told = kept.opened()
    assert re.search(r"is used: a new one is predicted to be [1-9]\d* % faster", told)
    with monkeypatch.context() as patched:
        patched.setattr(kept_plan, "LEAST_GAIN", 1.5)
        settings = settings_of(kept.model, heat=str(kept.heat))
        asked = plan_of_file(settings, on_progress=lambda *progress: None)
    assert asked.reason == second.reason
    assert second.reason in plan_text(asked)
    assert summary_of(asked)["reason"] == second.reason
    assert local_counts(second) == local_counts(first)
    assert second.forecast != first.forecast
    assert kept.place.read_bytes() == content
    gpu.cpu_ns = 1000.0
    gpu.make_room_for(100)
    third, told = kept.opened()
    assert "is replaced: a new one is predicted" in told
    assert local_counts(third) != local_counts(first)
    assert kept.place.read_bytes() != content
    content = kept.place.read_bytes()
    gpu.make_room_for(3)
    assert "does not fit" in kept.opened()[1]
    assert kept.place.read_bytes() != content


def test_a_kept_plan_is_of_one_box_model_and_wishes(
    gpu: OneGpu, kept: KeptPlans, tmp_path: Path
) -> None:
    gpu.make_room_for(5)
    kept.opened()
    assert "other settings" in kept.opened(plan_for="64:64")[1]
    assert "is used" in kept.opened(plan_for="64:64")[1]
    gpu.key = "other"
    assert "another machine" in kept.opened(plan_for="64:64")[1]
    kept.place.write_bytes(kept.place.read_bytes()[:100])
    assert "not JSON" in kept.opened(plan_for="64:64")[1]
    other = write_qwen3moe(tmp_path / "other.gguf", TINY, seed=5, tensor_type="Q8_0")
    kept.model = other
    assert "another model" in kept.opened(plan_for="64:64")[1]


def test_a_plan_that_cannot_be_kept_is_a_warning(
    gpu: OneGpu, kept: KeptPlans, tmp_path: Path
) -> None:
    gpu.make_room_for(5)
    kept.place.mkdir()
    assert "the plan is not kept" in kept.opened()[1]
    kept.place.rmdir()
    kept.opened()
    content = kept.place.read_bytes()
    plan_of_file(
        settings_of(kept.model, heat=str(kept.heat), plan_for="9:9"), on_progress=lambda *_: None
    )
    assert kept.place.read_bytes() == content  # nothing was opened


def test_a_full_disk_keeps_no_plan_and_no_heat(
    gpu: OneGpu, kept: KeptPlans, model: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    with small_file_system(disk) as is_mounted:
        if not is_mounted:
            pytest.skip("may not mount a tmpfs")
        gpu.make_room_for(5)
        heat = disk / "it.heat"
        texts: list[list[int]] = []
        files: list[dict[str, bytes]] = []
        for has_room in (True, False, True):
            filler = fill(disk)
            if has_room:
                filler.unlink()
            caplog = kept.caplog
            caplog.clear()
            with opened(model, heat=str(heat), plan_for=f"64:{64 + len(texts)}") as engine:
                texts.append(text_of(engine))
            warned = [each for each in caplog.records if each.levelno == logging.WARNING]
            assert len(warned) == (0 if has_room else 2)
            assert all(str(heat) in each.getMessage() for each in warned)
            filler.unlink(missing_ok=True)
            files.append({path.name: path.read_bytes() for path in disk.iterdir()})
    assert texts[1:] == texts[:1] * 2
    assert {*files[0]} == {"it.heat", "it.heat.plan"}
    assert files[1] == files[0]  # whole, as they were
    assert all(files[2][name] != content for name, content in files[0].items())


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
    gpu: OneGpu, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.make_room_for(5)
    settings = settings_of(model)
    kept_for: list[Wishes] = []
    digest = kept_plan.digest_of_wishes

    def noted(wishes: Wishes, *args: Any, **options: Any) -> str:
        kept_for.append(wishes)
        return digest(wishes, *args, **options)

    monkeypatch.setattr(planning, "digest_of_wishes", noted)
    with Engine.open(model, daemons=["cpu"], settings=settings) as engine:
        plan = engine.plan
        tokens = [each.token_id for each in engine.generate(PROMPT, 8, ignore_eos=True)]
        names = engine.placement.owner_names
        owners = engine.stats().owners
        classes = engine._owners.runtime.class_map.classes
    assert plan is not None
    assert len(tokens) == 8
    assert "cpu0" in names
    # The device is open already: a plan with chunks of another size is not for this start.
    assert [wishes.chunk for wishes in kept_for] == [plan.setup.chunk]
    # Daemons and processor are of one class, between which experts may move at any step; decode
    # steps are of one class everywhere.
    local, daemon = owners[LOCAL_OWNER].numeric_class, owners["cpu0"].numeric_class
    assert {*classes} == {local, daemon, class_in_phase(local, Phase.DECODE)}
    assert len(classes) == 3
    if HOST_OWNER in owners:
        assert owners[HOST_OWNER].numeric_class == owners["cpu0"].numeric_class
    assert sum(each.pairs for each in owners.values()) > 0


def test_equal_daemons_with_room_left_over_get_second_copies(
    gpu: OneGpu, model: Path, run_dir: Path
) -> None:
    with GgufFile.open(model) as file:
        on_gpu = footprint(file, read_spec(file), Memory.GPU)
    gpu.room_bytes = gpu.one_expert + on_gpu.needs(
        num_positions=CONTEXT, kv_type=KvType.F16, chunk=512, num_remote_layers=2, num_daemons=2
    ).total  # fmt: skip
    room = on_gpu.needs(num_positions=0, kv_type=KvType.F16, chunk=512, is_parent=False).total
    room += on_gpu.experts_bytes({0: 4, 1: 4})
    settings = settings_of(model, plan_for="1000:1", host_memory_mb=0, device=GPU)
    with ExitStack() as undo:
        endpoints = [f"ipc://{run_dir}/{name}" for name in "ab"]
        victims = [
            undo.enter_context(
                running_daemon(
                    model,
                    endpoint,
                    module="support.offering_daemon",
                    DFLASHTEST_FREE_BYTES=str(room),
                )
            )
            for endpoint in endpoints
        ]
        texts = []
        with Engine.open(model, connect=endpoints, settings=settings) as engine:
            plan, placement = engine.plan, engine.placement
            texts.append(text_of(engine))
            owners = engine.stats().owners
        assert plan is not None
        assert "second copy" in plan.reason
        assert placement.answering
        num_held = sum(owned.num_experts for owned in placement.owners)
        num_copies = sum(each.num_replicas for each in plan.budgets)
        assert num_held - num_copies == TINY.num_layers * TINY.num_experts
        for index, name in enumerate(placement.owner_names):
            assert owners[name].num_experts == placement.owners[index].num_experts
        with Engine.open(model, connect=endpoints, settings=settings) as engine:  # it is kept
            again = engine.placement
            texts.append(text_of(engine))
        assert [each.fingerprint for each in again.owners] == [
            each.fingerprint for each in placement.owners
        ]
        for layer_id, routing in placement.routing.items():
            assert (again.routing[layer_id].owner_index == routing.owner_index).all()
        # Without a choice the first answers; with one of them gone the other has its copies.
        given = replace(placement, answering={})
        with Engine.open(model, connect=endpoints, placement=given, settings=settings) as engine:
            texts.append(text_of(engine))
        with Engine.open(
            model, connect=endpoints, placement=placement, settings=settings
        ) as engine:
            victims[1].terminate()
            victims[1].wait(START_S)
            texts.append(text_of(engine))
        assert texts[1:] == texts[:1] * 3


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
