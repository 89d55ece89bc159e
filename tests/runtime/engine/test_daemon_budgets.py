"""Budgets of daemons: what each gets at most of experts, however they are placed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.device import CPU, Device
from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import DaemonSetting, load_settings
from dflash_runtime import Engine
from dflash_runtime.cli.main import _run
from dflash_runtime.engine.planning import Planned
from dflash_runtime.placement.budgets import ExpertBudget
from dflash_runtime.placement.plan_text import plan_text
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from support.emulated_gpu import TINY
from support.planned_gpu import GPU, OneGpu
from support.planned_settings import numbers, planned, settings_with
from support.random_models import write_qwen3moe

EVERY = TINY.num_layers * TINY.num_experts
HALF = ExpertBudget(percent=50)
NONE = ExpertBudget(num_mib=0)


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
    gpu = OneGpu(monkeypatch, model)
    gpu.cpu_ns = 1000.0  # daemons are wanted
    gpu.make_room_for(2)
    return gpu


def owned(found: Planned) -> dict[str, int]:
    result = numbers(found)
    assert result is not None
    assert sum(result.values()) == EVERY
    return result


@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_daemon_gets_no_more_than_its_budget(gpu: OneGpu, file: GgufFile, device: Device) -> None:
    wishes: dict[str, Any] = {"has_daemon": True, "device": device, "swap_max": 0}
    alone = {LOCAL_OWNER, HOST_OWNER} if device == GPU else {LOCAL_OWNER}
    wide = owned(planned(file, budgets={"d0": ExpertBudget(percent=100)}, **wishes))
    assert wide["d0"] > EVERY // 2
    half = planned(file, budgets={"d0": HALF}, **wishes)
    assert owned(half)["d0"] == EVERY // 2
    assert half.plan is not None
    [budget] = [each for each in half.plan.budgets if each.name == "d0"]
    assert budget.limit_bytes is not None
    assert budget.expert_bytes <= budget.limit_bytes
    assert "were asked for)" in plan_text(half.plan)
    assert {*owned(planned(file, budgets={"d0": NONE}, **wishes))} <= alone


@pytest.mark.parametrize("device", [CPU, GPU])
def test_budgets_are_of_one_daemon_each(gpu: OneGpu, file: GgufFile, device: Device) -> None:
    """Though these are alike."""
    wishes: dict[str, Any] = {"has_daemon": True, "device": device, "daemon_names": ("a", "b")}
    for first, second in (("a", "b"), ("b", "a")):
        found = owned(planned(file, budgets={first: NONE}, **wishes))
        assert first not in found
        assert found[second] > EVERY // 2


@pytest.mark.parametrize(
    "wishes",
    [
        {"override_tensor": ((r"exps", "d0"),)},
        {"moe_mode": "remote"},
    ],
    ids=str,
)
def test_what_is_asked_for_beyond_a_budget_is_refused(
    gpu: OneGpu, file: GgufFile, wishes: dict[str, Any]
) -> None:
    for device in (CPU, GPU):
        asked = {"has_daemon": True, "device": device, "swap_max": 0, **wishes}
        assert owned(planned(file, **asked)) == {"d0": EVERY}
        with pytest.raises(SettingsError) as caught:
            planned(file, budgets={"d0": HALF}, **asked)
        assert "\n" not in str(caught.value)
        if "override_tensor" in wishes:
            assert "of daemon d0, whose budget is" in str(caught.value)


def test_a_plan_is_kept_for_one_budget(gpu: OneGpu, file: GgufFile, tmp_path: Path) -> None:
    def reason(percent: int) -> str:
        found = planned(
            file,
            has_daemon=True,
            heat=str(tmp_path / "it.heat"),
            swap_max=0,
            budgets={"d0": ExpertBudget(percent=percent)},
        )
        assert found.plan is not None
        return found.plan.reason

    reason(50)
    assert "The kept plan is used" in reason(50)
    assert "other settings were given" in reason(40)


@pytest.mark.parametrize("backend", [pytest.param("auto", marks=pytest.mark.slow), "cpu"])
def test_an_engine_gives_its_daemon_no_more(model: Path, backend: str) -> None:
    def opened(daemon: DaemonSetting, **options: Any) -> Engine:
        settings = settings_with(backend=backend, device=CPU)
        return Engine.open(model, daemons=[daemon], settings=settings, **options)

    half = DaemonSetting("cpu", name="d0", expert_budget_pct=50, source="moe.toml: daemon[0]")
    where = r"moe\.toml: daemon\[0\]\.expert_budget_pct"
    with opened(half, local_experts=3) as engine:
        assert engine.logits([5, 9, 2, 40]).any()
        held = dict(zip(engine.placement.owner_names, engine.placement.owners, strict=True))
        assert (held[LOCAL_OWNER].num_experts, held["d0"].num_experts) == (6, 4)
        placement = engine.placement
    with pytest.raises(SettingsError, match=f"no place; .*{where}"):
        opened(half, local_experts=1)
    none = DaemonSetting("cpu", name="d0", expert_budget_mb=0, source="moe.toml: daemon[0]")
    with pytest.raises(
        SettingsError, match=r"daemon\[0\]\.expert_budget_mb: daemon d0 gets at most"
    ):
        opened(none, placement=placement)
    opened(half, placement=placement).close()


def test_a_parent_on_the_processor_computes_what_a_daemon_does_not_get(
    gpu: OneGpu, model: Path
) -> None:
    daemon = DaemonSetting("cpu", name="d0", expert_budget_pct=30)
    settings = settings_with(device=CPU)
    with Engine.open(model, daemons=[daemon], settings=settings) as engine:
        held = dict(zip(engine.placement.owner_names, engine.placement.owners, strict=True))
        assert held["d0"].num_experts <= 3
        assert held[LOCAL_OWNER].num_experts == EVERY - held["d0"].num_experts
        assert engine.logits([5, 9, 2, 40]).any()


def test_a_budget_of_a_file_is_shown_or_refused(
    gpu: OneGpu, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "moe.toml"
    path.write_text('[[daemon]]\nname = "ram"\nexpert_budget_mb = 512\n')
    assert load_settings({}, file=path).daemons[0].expert_budget_mb == 512
    arguments = [str(model), "--settings", str(path)]
    assert _run(["plan", *arguments, "-c", "48", "--swap-max", "0"]) == 0
    [line] = [each for each in capfd.readouterr().out.splitlines() if each.startswith("ram ")]
    assert "512 MiB" in line
    path.write_text('[[daemon]]\nname = "ram"\nexpert_budget_mb = -512\n')
    for command in ("plan", "generate", "serve", "doctor"):
        assert _run([command, *arguments]) == 2
        [line] = capfd.readouterr().err.splitlines()
        assert f"{path}: daemon[0].expert_budget_mb=-512: must be " in line
