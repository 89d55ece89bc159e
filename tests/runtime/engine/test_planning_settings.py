"""Each setting that says where experts are is obeyed or refused, whatever the parent computes on,
with and without daemons."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.device import CPU, Device, DeviceKind
from dflash_protocol.errors import SettingsError
from dflash_protocol.hotness import Hotness, write_hotness
from dflash_protocol.settings import Settings, load_settings
from dflash_protocol.settings.table import KNOBS
from dflash_runtime import Engine
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.room import staged_slots
from dflash_runtime.engine import planning, replacing
from dflash_runtime.engine.deciding import plan_of_file
from dflash_runtime.engine.planning import Planned
from dflash_runtime.placement import host_context
from dflash_runtime.placement.footprint import Memory, footprint
from dflash_runtime.placement.moves import MovePolicy
from dflash_runtime.placement.plan import Alternative, Plan
from dflash_runtime.placement.plan_record import as_json, summary_of
from dflash_runtime.placement.plan_text import plan_text
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from support.emulated_gpu import TINY
from support.placements import write_even_placement
from support.planned_gpu import CONTEXT, GPU, OneGpu
from support.planned_settings import numbers, planned, settings_with
from support.random_models import write_qwen3moe

A_LAYER, EVERY = TINY.num_experts, TINY.num_layers * TINY.num_experts
ALL_HERE, UNPLANNED = {LOCAL_OWNER: EVERY}, None
HALVES = {LOCAL_OWNER: A_LAYER, HOST_OWNER: A_LAYER}
HALF_IN_DAEMON = {LOCAL_OWNER: A_LAYER, "d0": A_LAYER}

Found = Mapping[str, int] | str | None
"""Experts by owner; a part of the refusal; None: as without a plan, all here or an even split."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


@pytest.fixture
def file(model: Path) -> Iterator[GgufFile]:
    with GgufFile.open(model) as file:
        yield file


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, model: Path) -> OneGpu:
    return OneGpu(monkeypatch, model)


@pytest.mark.parametrize(
    ("wishes", "alone", "with_daemon"),
    [
        ({"cpu_moe": True}, UNPLANNED, ALL_HERE),
        ({"cpu_moe": False}, UNPLANNED, UNPLANNED),
        ({"n_cpu_moe": 1}, UNPLANNED, ALL_HERE),
        ({"override_tensor": ((r"blk\.1\.", "d0"),)}, "owners are cpu", HALF_IN_DAEMON),
        ({"override_tensor": ((r"blk\.1\.", "cpu"),)}, UNPLANNED, ALL_HERE),
        ({"moe_mode": "resident"}, UNPLANNED, ALL_HERE),
        ({"moe_mode": "cpu-moe"}, UNPLANNED, ALL_HERE),
        ({"moe_mode": "remote"}, "--moe-mode=remote and", {"d0": EVERY}),
        ({"moe_mode": "hot"}, "--moe-mode=hot and", "--moe-mode=hot"),
        ({"moe_mode": "layers"}, "--moe-mode=layers and", "--moe-mode=layers"),
        ({"expert_budget_pct": 0}, "--expert-budget-pct and", {"d0": EVERY}),
        ({"expert_budget_mb": 0}, "--expert-budget-mb and", {"d0": EVERY}),
        ({"device_memory_mb": 99}, "--device-memory-mb and", "--device-memory-mb and"),
        ({"fit": "off"}, UNPLANNED, UNPLANNED),
        ({"fit": "off", "moe_mode": "hot"}, "--moe-mode and --fit", "--moe-mode and --fit"),
        ({"fit": "off", "cpu_moe": True}, "--cpu-moe and --fit", "--cpu-moe and --fit"),
        ({"local_experts": 2}, UNPLANNED, UNPLANNED),
        ({"plan": "it", "local_experts": 2}, "--local-experts and --plan", "--local-experts and"),
        ({"plan": "it", "cpu_moe": True}, "--cpu-moe and --plan", "--cpu-moe and --plan"),
    ],
)
@pytest.mark.parametrize("where", ["--device=cpu", "-ngl 0", "no GPU"])
def test_a_parent_on_the_processor(
    gpu: OneGpu,
    file: GgufFile,
    monkeypatch: pytest.MonkeyPatch,
    wishes: dict[str, Any],
    alone: Found,
    with_daemon: Found,
    where: str,
) -> None:
    on_cpu: dict[str, Any] = {}
    if where == "--device=cpu":
        on_cpu["device"] = CPU
    elif where == "-ngl 0":
        on_cpu["gpu_layers"] = 0
    else:
        monkeypatch.setattr(planning, "gpus_of_machine", list)
    for has_daemon, expected in ((False, alone), (True, with_daemon)):
        check(file, expected, has_daemon=has_daemon, **on_cpu, **wishes)
        if isinstance(expected, str) and expected.endswith("and") and "plan" not in wishes:
            check(file, where, has_daemon=has_daemon, **on_cpu, **wishes)


@pytest.mark.parametrize(
    ("wishes", "alone", "with_daemon"),
    [
        ({"cpu_moe": True}, {HOST_OWNER: EVERY}, {HOST_OWNER: EVERY}),
        ({"n_cpu_moe": 1}, HALVES, HALVES),
        ({"override_tensor": ((r"blk\.1\.", "d0"),)}, "owners are cuda:0, cpu", HALF_IN_DAEMON),
        ({"override_tensor": ((r"blk\.1\.", "cpu"),)}, HALVES, HALVES),
        ({"moe_mode": "resident"}, ALL_HERE, ALL_HERE),
        ({"moe_mode": "cpu-moe"}, {HOST_OWNER: EVERY}, {HOST_OWNER: EVERY}),
        ({"moe_mode": "remote"}, "--moe-mode=remote", {"d0": EVERY}),
        ({"expert_budget_pct": 0}, {HOST_OWNER: EVERY}, "no experts here"),
        ({"expert_budget_mb": 0}, {HOST_OWNER: EVERY}, "no experts here"),
        ({"device_memory_mb": 0}, "cuda:0", "cuda:0"),
        ({"fit": "off"}, UNPLANNED, UNPLANNED),
        ({"fit": "off", "moe_mode": "hot"}, "--moe-mode and --fit", "--moe-mode and --fit"),
        ({"gpu_layers": 99}, UNPLANNED, ALL_HERE),
        ({"local_experts": 2}, UNPLANNED, UNPLANNED),
        ({"plan": "it", "n_cpu_moe": 1}, "--n-cpu-moe and --plan", "--n-cpu-moe and --plan"),
    ],
)
def test_a_parent_on_a_gpu(
    gpu: OneGpu, file: GgufFile, wishes: dict[str, Any], alone: Found, with_daemon: Found
) -> None:
    for has_daemon, expected in ((False, alone), (True, with_daemon)):
        check(file, expected, has_daemon=has_daemon, device=GPU, **wishes)


def check(file: GgufFile, expected: Found, *, has_daemon: bool, **wishes: Any) -> None:
    if expected == "no experts here":
        found = numbers(planned(file, has_daemon=has_daemon, **wishes))
        assert found is not None
        assert LOCAL_OWNER not in found
    elif isinstance(expected, str):
        with pytest.raises(SettingsError, match=re.escape(expected)) as caught:
            planned(file, has_daemon=has_daemon, **wishes)
        assert "\n" not in str(caught.value)
    else:
        assert numbers(planned(file, has_daemon=has_daemon, **wishes)) == expected


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_settings_that_nothing_obeys_are_refused_when_a_model_is_opened(
    model: Path, tmp_path: Path, backend: str
) -> None:
    path, _ = write_even_placement(tmp_path, model)
    wishes: list[tuple[dict[str, Any], str]] = [
        ({"cpu_moe": True}, "--cpu-moe"),
        ({"moe_mode": "hot"}, "--moe-mode"),
        ({"expert_budget_pct": 50}, "--expert-budget-pct"),
    ]
    if backend == "auto":
        wishes.append(({"plan": "it"}, "--plan"))
    for wish, flag in wishes:
        given = {**wish, "placement": str(path)} if backend == "auto" else wish
        other = "--placement" if backend == "auto" else f"--backend={backend}"
        settings = replace(load_settings(), heat="off", backend=backend, **given)
        with pytest.raises(SettingsError) as caught:
            Engine.open(model, settings=settings)
        assert flag in str(caught.value)
        assert other in str(caught.value)


def test_layers_of_a_backend_or_a_placement(model: Path) -> None:
    for layers, device, words in ((99, None, "--backend=cpu"), (99, CPU, "contradict")):
        settings = replace(load_settings(), backend="cpu", gpu_layers=layers, device=device)
        with pytest.raises(SettingsError, match=words):
            Engine.open(model, settings=settings)


def test_memory_of_the_processor_bounds_its_context(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_context, "process_room", lambda: 0)  # not known
    settings = replace(load_settings(), heat="off", device=CPU, context=CONTEXT, host_memory_mb=0)
    with ExitStack() as undo, pytest.raises(SettingsError, match="this process can have 0 MiB"):
        undo.enter_context(Engine.open(model, settings=settings))


@pytest.mark.parametrize(
    "wishes", [{"override_tensor": ((r"blk\.1\.", "d0"),)}, {"moe_mode": "remote"}]
)
def test_daemons_that_are_named_are_asked_by_the_best_device(
    gpu: OneGpu, file: GgufFile, wishes: dict[str, Any]
) -> None:
    found = planned(file, has_daemon=True, **wishes)
    assert found.settings.device == GPU
    expected = HALF_IN_DAEMON if "override_tensor" in wishes else {"d0": EVERY}
    assert numbers(found) == expected


@pytest.mark.parametrize("device", [CPU, GPU])
def test_an_engine_has_its_experts_where_they_were_asked_for(
    gpu: OneGpu, model: Path, device: Device
) -> None:
    asked = ((r"blk\.1\.", "cpu0"),)
    settings = replace(
        load_settings(), heat="off", context=CONTEXT, device=device, override_tensor=asked
    )
    with Engine.open(model, daemons=["cpu"], settings=settings) as engine:
        engine.logits([5, 9, 2, 40])
        assert engine.plan is not None
        assert {*engine.placement.owner_names} == {LOCAL_OWNER, "cpu0"}
        owners = engine.stats().owners
    assert owners[LOCAL_OWNER].pairs == owners["cpu0"].pairs > 0


def plan_of(found: Planned) -> Plan:
    assert found.plan is not None
    return found.plan


# -- context and type of keys and values ----------------------------------------------------------


@pytest.mark.parametrize("has_daemon", [False, True])
@pytest.mark.parametrize(("context", "kv_type"), [(1, "f16"), (40, "q8_0"), (256, "f32")])
def test_context_and_kv_type_are_those_that_were_given(
    gpu: OneGpu, file: GgufFile, context: int, kv_type: str, has_daemon: bool
) -> None:
    wishes: dict[str, Any] = {"context": context, "kv_type": kv_type}
    found = planned(file, has_daemon=has_daemon, device=GPU, expert_budget_pct=50, **wishes)
    plan = plan_of(found)
    assert (found.settings.context, found.settings.kv_type) == (context, kv_type)
    assert (plan.setup.context, str(plan.setup.kv_type)) == (context, kv_type)
    needs = footprint(file, read_spec(file), Memory.GPU).needs(
        num_positions=context, kv_type=KvType(kv_type), chunk=plan.setup.chunk, num_remote_layers=2
    )
    assert plan.budgets[0].cache_bytes == needs.cache > 0
    assert f"keys and values ({context:,}, {kv_type})" in plan_text(plan)


@pytest.mark.parametrize("has_daemon", [False, True])
@pytest.mark.parametrize("wishes", [{"device": CPU}, {"gpu_layers": 0}, {}], ids=str)
def test_context_and_kv_type_of_a_processor_are_those_that_were_given(
    gpu: OneGpu, file: GgufFile, wishes: dict[str, Any], has_daemon: bool
) -> None:
    if not wishes:
        gpu.room_bytes = 0  # so that only the processor has room
    asked: dict[str, Any] = {"context": 250, "kv_type": "f32"}
    settings = planned(file, has_daemon=has_daemon, **asked, **wishes).settings
    assert (settings.context, settings.kv_type) == (250, "f32")


@pytest.mark.parametrize("wishes", [{"context": 256}, {"context": 256, "kv_type": "f32"}], ids=str)
def test_a_context_without_room_is_refused_with_those_that_fit(
    gpu: OneGpu, file: GgufFile, wishes: dict[str, Any]
) -> None:
    gpu.room_bytes = gpu.needed
    with pytest.raises(SettingsError, match=r"context of 256 \(f") as caught:
        planned(file, has_daemon=False, device=GPU, **wishes)
    assert "\n" not in str(caught.value)
    fitting = re.findall(r"--context (\d+) with --kv-type (\w+)", str(caught.value))
    assert fitting[0][1] == wishes.get("kv_type", "f16")
    for context, kv_type in fitting:
        assert 0 < int(context) < 256
        asked: dict[str, Any] = {"context": int(context), "kv_type": kv_type}
        found = planned(file, has_daemon=False, device=GPU, **asked)
        assert plan_of(found).setup.context == int(context)


@pytest.mark.parametrize("wishes", [{"context": 257}, {"context": 1 << 20}], ids=str)
def test_a_context_that_the_model_does_not_have_is_refused(
    gpu: OneGpu, file: GgufFile, wishes: dict[str, Any]
) -> None:
    gpu.make_room_for(5)
    with pytest.raises(SettingsError, match=rf"^context={wishes['context']}: .* 256$"):
        planned(file, has_daemon=False, **wishes)


@pytest.mark.parametrize(
    ("wishes", "flag"),
    [
        ({"context": 40}, "--context=40"),
        ({"kv_type": "q8_0"}, "--kv-type=q8_0"),
        ({"device": CPU}, "--device=cpu"),
        ({"gpu_layers": 0}, "-ngl 0"),
    ],
    ids=str,
)
def test_a_saved_plan_changes_no_setting_in_silence(
    gpu: OneGpu, file: GgufFile, tmp_path: Path, wishes: dict[str, Any], flag: str
) -> None:
    gpu.make_room_for(5)
    path = tmp_path / "plan.json"
    path.write_text(as_json(plan_of(planned(file, has_daemon=False))))
    for same in ({}, {"device": GPU}, {"gpu_layers": 99}, {"context": None, "kv_type": "auto"}):
        found = planned(file, has_daemon=False, plan=str(path), **same)
        assert found.settings.device == GPU
        assert (found.settings.context, found.settings.kv_type) == (CONTEXT, "f16")
    with pytest.raises(SettingsError, match=f"^{flag} and --plan ") as caught:
        planned(file, has_daemon=False, plan=str(path), **wishes)
    assert "\n" not in str(caught.value)


# -- heat, and moves ------------------------------------------------------------------------------


def hotness_file(path: Path, hot: int) -> Path:
    """An older table of counts, in which one expert of each layer is chosen nearly always."""
    counts = np.ones((TINY.num_layers, TINY.num_experts), np.uint64)
    counts[:, hot] = 100_000
    write_hotness(path, Hotness(counts, TINY.num_experts_used))
    return path


def experts_here(found: Planned) -> set[tuple[int, int]]:
    """Layers and ids of the parent's experts."""
    assert found.placement is not None
    if LOCAL_OWNER not in found.placement.owner_names:
        return set()
    owned = found.placement.owners[found.placement.owner_names.index(LOCAL_OWNER)]
    return {(layer, each) for layer, ids in owned.by_layer.items() for each in ids.tolist()}


@pytest.mark.parametrize("hot", range(TINY.num_experts))
def test_the_hot_experts_of_a_file_are_on_the_gpu(
    gpu: OneGpu, file: GgufFile, tmp_path: Path, hot: int
) -> None:
    gpu.make_room_for(4)
    gpu.cpu_ns = 1000.0
    table = hotness_file(tmp_path / "older.csv", hot)
    found = planned(file, has_daemon=False, moe_mode="hot", hotness=str(table))
    assert {(layer, hot) for layer in range(TINY.num_layers)} <= experts_here(found)
    assert "heat of 50.0 k tokens" in plan_text(plan_of(found))
    unknown = planned(file, has_daemon=False, moe_mode="hot")
    assert plan_of(unknown).share_here < plan_of(found).share_here


def gpu_with_moves(gpu: OneGpu, file: GgufFile, most: int) -> OneGpu:
    """With room for five experts, and for so many that are about to move there."""
    gpu.copies_per_s = 1e12
    gpu.make_room_for(5)
    gpu.room_bytes += staged(file, most)
    return gpu


def staged(file: GgufFile, most: int) -> int:
    num_slots, slot_bytes = staged_slots(read_spec(file).moe.layers, most)
    return num_slots * slot_bytes


def test_a_plan_keeps_memory_for_the_moves_that_are_allowed(gpu: OneGpu, file: GgufFile) -> None:
    gpu_with_moves(gpu, file, 3)
    works = {
        most: plan_of(planned(file, has_daemon=False, moe_mode="hot", swap_max=most))
        .budgets[0]
        .work_bytes
        for most in (0, 1, 3)
    }
    assert works[1] - works[0] == staged(file, 1) > 0
    assert works[3] - works[0] == staged(file, 3)


class NotedPolicy(MovePolicy):
    """Notes what it was made with."""

    noted: list[tuple[int, float]]

    def __init__(self, *args: Any, most: int, min_gain: float) -> None:
        self.noted.append((most, min_gain))
        super().__init__(*args, most=most, min_gain=min_gain)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """How many experts may move, and what they have to save, of each engine that moves some."""
    monkeypatch.setattr(NotedPolicy, "noted", [], raising=False)
    monkeypatch.setattr(replacing, "MovePolicy", NotedPolicy)
    return NotedPolicy.noted


def open_and_close(model: Path, **wishes: Any) -> None:
    settings = settings_with(moe_mode="hot", prefill_offload="off", **wishes)
    with Engine.open(model, settings=settings) as engine:
        assert engine.plan is not None


def test_moves_are_as_many_and_gain_as_much_as_was_asked_for(
    gpu: OneGpu, file: GgufFile, model: Path, noted: list[tuple[int, float]]
) -> None:
    gpu_with_moves(gpu, file, 3)
    open_and_close(model, swap_max=3, swap_min_gain=7)
    assert noted == [(3, 7)]
    open_and_close(model, swap_max=0, swap_min_gain=7)
    assert noted == [(3, 7)]
    open_and_close(model, swap_max=1, swap_min_gain=0)
    assert noted == [(3, 7), (1, 0)]


# -- variables, the older system's too ------------------------------------------------------------


PLANNED = {"context": "40", "expert_budget_mb": "0", "expert_budget_pct": "30", "swap_max": "0"}
"""Values, by field, with which another plan is made."""
VARIABLES = [
    (knob.field, variable)
    for knob in KNOBS
    for variable in (knob.variable, *knob.older_variables)
    if knob.older_variables
]


@pytest.mark.parametrize(("field", "variable"), [each for each in VARIABLES if each[0] in PLANNED])
def test_a_variable_makes_the_plan_that_its_flag_makes(
    gpu: OneGpu, file: GgufFile, monkeypatch: pytest.MonkeyPatch, field: str, variable: str
) -> None:
    gpu_with_moves(gpu, file, Settings().swap_max)
    always: dict[str, Any] = {"host_memory_mb": 64}  # what is free changes all the time
    usual = planned(file, **always)
    wish: dict[str, Any] = {field: int(PLANNED[field])}
    asked = planned(file, **always, **wish)
    monkeypatch.setenv(variable, PLANNED[field])
    found = planned(file, **always)
    assert summary_of(plan_of(found)) == summary_of(plan_of(asked)) != summary_of(plan_of(usual))
    assert experts_here(found) == experts_here(asked)


@pytest.mark.parametrize("variable", [name for field, name in VARIABLES if field == "hotness"])
def test_a_variable_names_the_file_of_hot_experts(
    gpu: OneGpu, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    gpu.make_room_for(4)
    gpu.cpu_ns = 1000.0
    monkeypatch.setenv(variable, str(hotness_file(tmp_path / "older.csv", 3)))
    settings = settings_with(model=str(model), moe_mode="hot")
    found = plan_of_file(settings, on_progress=lambda *progress: None)
    assert {(layer, 3) for layer in range(TINY.num_layers)} <= experts_here(
        Planned(settings, found.placement)
    )


@pytest.mark.parametrize("variable", [name for field, name in VARIABLES if "swap" in field])
def test_a_variable_bounds_moves(
    gpu: OneGpu,
    file: GgufFile,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    noted: list[tuple[int, float]],
    variable: str,
) -> None:
    gpu_with_moves(gpu, file, 3)
    monkeypatch.setenv(variable, "1")
    is_number = variable.endswith("SWAP_MAX")
    open_and_close(model, **({} if is_number else {"swap_max": 3}))
    assert noted == [(1, Settings().swap_min_gain) if is_number else (3, 1)]


@pytest.mark.parametrize("wishes", [{}, {"cpu_moe": True}, {"expert_budget_mb": 0}], ids=str)
def test_memory_for_moves_is_no_reason_to_refuse_a_plan(
    gpu: OneGpu, file: GgufFile, wishes: dict[str, Any]
) -> None:
    """It was, with the default number of moves, and the advice was what had been asked for."""
    gpu_with_moves(gpu, file, 0)
    gpu.make_room_for(1)
    asked = {"device": GPU, "host_memory_mb": 64, **wishes}
    found = plan_of(planned(file, **asked))
    assert HOST_OWNER in found.placement.owner_names
    fewer = plan_of(planned(file, swap_max=0, **asked))
    assert found.budgets == fewer.budgets


SECOND = Device(DeviceKind.CUDA, 1)


def offered_gpu(found: Planned) -> Alternative | None:
    named = {each.name: each for each in plan_of(found).alternatives}
    return named.get(f"--daemon {SECOND}")


def test_what_a_second_gpu_would_bring_is_said(gpu: OneGpu, file: GgufFile) -> None:
    gpu.gpus.append(SECOND)
    gpu.make_room_for(4)
    gpu.cpu_ns = 1000.0
    found = planned(file, host_memory_mb=64)
    better = offered_gpu(found)
    assert better is not None
    assert better.forecast is not None
    assert better.device == str(GPU)
    assert better.forecast.decode > 2.0 * plan_of(found).forecast.decode
    assert f"--daemon {SECOND} not given: would be " in plan_text(plan_of(found))


def test_a_second_gpu_that_brings_nothing_is_not_named(gpu: OneGpu, file: GgufFile) -> None:
    gpu.gpus.append(SECOND)
    gpu.cpu_ns = 1000.0
    gpu.make_room_for(4)
    assert offered_gpu(planned(file, host_memory_mb=64, cpu_moe=True)) is None
    gpu.make_room_for(EVERY)
    assert offered_gpu(planned(file, host_memory_mb=64, moe_mode="hot")) is None
    gpu.gpus.remove(SECOND)
    gpu.make_room_for(4)
    assert offered_gpu(planned(file, host_memory_mb=64)) is None
