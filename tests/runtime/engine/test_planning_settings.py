"""Each setting that says where experts are is obeyed or refused, whatever the parent computes on,
with and without daemons."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.device import CPU, Device
from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import load_settings
from dflash_protocol.wire.messages import Offer
from dflash_runtime import Engine
from dflash_runtime.engine import planning
from dflash_runtime.engine.planning import Planned, Planning
from dflash_runtime.placement import host_context
from dflash_runtime.placement.heat import HalfLives, Heat, layers_of
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from support.emulated_gpu import TINY
from support.placements import write_even_placement
from support.planned_gpu import CONTEXT, GPU, OneGpu
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


def planned(file: GgufFile, *, has_daemon: bool, **wishes: Any) -> Planned:
    spec = read_spec(file)
    settings = replace(load_settings(), context=CONTEXT, kv_type="f16", heat="off", **wishes)
    layer = spec.moe.layers[0]
    offer = Offer(
        device="cpu",
        device_name="it",
        numeric_class="cpu",
        free_bytes=1 << 30,
        total_bytes=2 << 30,
        held_bytes=0,
        num_threads=1,
        can_mail=False,
        layer_ids=(layer.layer_id,),
        expert_bytes=(layer.expert_bytes,),
        one_s=(1e-6,),
        used_s=(3e-6,),
        chunk_tokens=512,
        chunk_pairs_per_s=(1e6,),
    )
    offers = {"d0": offer} if has_daemon else {}
    heat = Heat(layers_of(spec.moe), HalfLives())
    found = Planning(file, spec, settings, heat=heat, on_progress=lambda *progress: None)
    before = found.before_daemons([*offers])
    return found.with_daemons(before, offers, numeric_class="") if has_daemon else before


def numbers(found: Planned) -> dict[str, int] | None:
    if found.placement is None:
        return None
    owners = zip(found.placement.owner_names, found.placement.owners, strict=True)
    return {name: owned.num_experts for name, owned in owners if owned.num_experts}


@pytest.mark.parametrize(
    ("wishes", "alone", "with_daemon"),
    [
        ({"cpu_moe": True}, UNPLANNED, ALL_HERE),
        ({"cpu_moe": False}, UNPLANNED, UNPLANNED),
        ({"n_cpu_moe": 1}, UNPLANNED, ALL_HERE),
        ({"override_tensor": ((r"blk\.1\.", "d0"),)}, "owners are local", HALF_IN_DAEMON),
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
        ({"override_tensor": ((r"blk\.1\.", "d0"),)}, "owners are local", HALF_IN_DAEMON),
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
