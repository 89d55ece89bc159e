"""`dflash-moe plan` says how a model is opened with the same settings, or refuses them in the same
line. The GPU is emulated, and its speed made up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_protocol.device import CPU, Device, DeviceKind
from dflash_protocol.placement import Placement
from dflash_runtime import Engine
from dflash_runtime.cli.main import _run
from dflash_runtime.compute.gpu.device.devices import DeviceMemory, GpuDescription
from dflash_runtime.engine import planning
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from support.emulated_gpu import TINY
from support.placements import write_even_placement
from support.planned_gpu import CONTEXT, GPU, OneGpu
from support.processes import running_daemon
from support.random_models import write_qwen3moe

EVERY = TINY.num_layers * TINY.num_experts
USUAL = ("--context", str(CONTEXT), "--kv-type", "f16", "--heat", "off")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, model: Path) -> OneGpu:
    return OneGpu(monkeypatch, model)


@pytest.fixture
def no_gpu(gpu: OneGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "gpus_of_machine", list)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, list[int]]]]:
    """What engines were opened with: positions, and each owner's experts by layer."""
    found = []
    closed = Engine.close

    def close(engine: Engine) -> None:
        found.append((engine.num_positions, numbers_of(engine.placement)))
        closed(engine)

    monkeypatch.setattr(Engine, "close", close)
    return found


def numbers_of(placement: Placement) -> dict[str, list[int]]:
    owned = zip(placement.owner_names, placement.owners, strict=True)
    return {
        name: [ids.size for ids in each.by_layer.values()] for name, each in owned if each.by_layer
    }


def planned(
    model: Path, capfd: pytest.CaptureFixture[str], arguments: Sequence[str]
) -> dict[str, Any]:
    capfd.readouterr()
    assert _run(["plan", str(model), *arguments, "--json"]) == 0, capfd.readouterr().err
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def check_same(
    model: Path,
    capfd: pytest.CaptureFixture[str],
    opened: list[tuple[int, dict[str, list[int]]]],
    arguments: Sequence[str],
) -> dict[str, Any]:
    """The plan that is printed, which is how the model is opened."""
    found = planned(model, capfd, arguments)
    asked = ["--token-ids", "1,2", "-n", "1", *arguments]
    assert _run(["generate", str(model), *asked]) == 0, capfd.readouterr().err
    [(num_positions, numbers)] = opened
    assert found["setup"]["context"] == num_positions
    owners = {
        each["name"]: [*map(len, each["experts"].values())]
        for each in found["owners"]
        if any(each["experts"].values())
    }
    assert owners == {name: each for name, each in numbers.items() if any(each)}
    assert found["forecast"]["decode"] > 0
    assert found["reason"]
    return found


def check_refused(model: Path, capfd: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    """The line with which both commands end."""
    lines = []
    for more in (["plan", str(model)], ["generate", str(model), "--token-ids", "1,2", "-n", "1"]):
        capfd.readouterr()
        assert _run([*more, *arguments]) == 2
        out, err = capfd.readouterr()
        assert out == ""
        lines += err.splitlines()
    assert len(lines) == 2
    assert lines[0] == lines[1]
    return lines[0]


@pytest.mark.parametrize(
    ("num_experts", "arguments"),
    [
        (5, ()),
        (100, ()),
        (100, ("--context", "auto")),
        (5, ("--cpu-moe",)),
        (5, ("--n-cpu-moe", "1")),
        (5, ("--moe-mode", "hot")),
        (100, ("--local-experts", "2", "--device", "cuda:0")),
        (100, ("--local-experts", "2")),
        (100, ("--expert-budget-pct", "40")),
        (100, ("--fit", "off")),
        (100, ("--fit", "off", "--device", "cuda:0")),
        (100, ("--backend", "cpu")),
        (100, ("-ngl", "0")),
        (100, ("--device", "cpu", "--context", "auto")),
        (100, ("--device", "cpu", "--moe-mode", "cpu-moe")),
    ],
    ids=str,
)
def test_a_plan_is_how_a_model_is_opened(
    gpu: OneGpu,
    model: Path,
    opened: list[Any],
    capfd: pytest.CaptureFixture[str],
    num_experts: int,
    arguments: Sequence[str],
) -> None:
    gpu.make_room_for(num_experts)
    check_same(model, capfd, opened, [*USUAL, *arguments])


def test_without_a_gpu_it_is_the_processors(
    no_gpu: None, model: Path, opened: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    found = check_same(model, capfd, opened, [*USUAL, "--context", "auto"])
    assert found["setup"]["device"] == "cpu"
    assert found["budgets"][0]["num_experts"] == EVERY


def test_a_text_comes_with_its_plan(
    gpu: OneGpu, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu.make_room_for(5)
    found = planned(model, capfd, USUAL)
    assert _run(["generate", str(model), "--token-ids", "1,2", "-n", "1", *USUAL]) == 0
    said = capfd.readouterr().err
    assert all(each["name"] in said for each in (found, *found["budgets"]))
    assert found["reason"] in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--fit", "off", "--cpu-moe"), ("--fit", "--cpu-moe")),
        (("--fit", "off", "--expert-budget-mb", "3"), ("--fit", "--expert-budget-mb")),
        (("--device", "cpu", "--device-memory-mb", "9"), ("--device=cpu", "--device-memory-mb")),
        (("--device", "cpu", "--expert-budget-mb", "9"), ("--device=cpu", "--expert-budget-mb")),
        (("--device", "cpu", "--moe-mode", "hot"), ("--device=cpu", "--moe-mode=hot")),
        (("--backend", "cpu", "--cpu-moe"), ("--backend=cpu", "--cpu-moe")),
        (("--plan", "it.json", "--cpu-moe"), ("--plan", "--cpu-moe")),
        (("--plan", "it.json", "--fit", "off"), ("--plan", "--fit=off")),
        (("--plan", "it.json", "--placement", "it"), ("--plan", "--placement")),
        (("--plan", "/no/such/plan"), ("/no/such/plan",)),
        (("--placement", "/no/such/placement"), ("/no/such/placement",)),
        (("--placement", "it", "--local-experts", "3"), ("--placement", "--local-experts")),
        (("--context", "99999999"), ("context=99999999",)),
        (("-ngl", "1"), ("-ngl 1", "--n-cpu-moe 1")),
    ],
)
def test_what_opening_refuses_is_not_planned(
    gpu: OneGpu,
    model: Path,
    capfd: pytest.CaptureFixture[str],
    arguments: Sequence[str],
    named: Sequence[str],
) -> None:
    line = check_refused(model, capfd, arguments)
    assert all(each in line for each in named)


@pytest.mark.parametrize("arguments", [("-ngl", "99"), ("--expert-budget-mb", "4")])
def test_without_a_gpu_what_needs_one_is_refused(
    no_gpu: None, model: Path, capfd: pytest.CaptureFixture[str], arguments: Sequence[str]
) -> None:
    assert "GPU" in check_refused(model, capfd, arguments)


def test_a_plan_and_a_placement_that_are_given_are_shown(
    gpu: OneGpu,
    model: Path,
    opened: list[Any],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    gpu.make_room_for(5)
    saved = tmp_path / "plan.json"
    first = planned(model, capfd, [*USUAL, "--save", str(saved)])
    gpu.make_room_for(100)
    found = check_same(model, capfd, opened, ["--heat", "off", "--plan", str(saved)])
    assert found == first
    opened.clear()
    placement, _ = write_even_placement(tmp_path, model)
    options = ["--device", "cuda:0", "--placement", str(placement)]
    found = check_same(model, capfd, opened, [*USUAL, *options])
    assert {each["name"] for each in found["owners"]} == {LOCAL_OWNER, HOST_OWNER}


def test_daemons_are_asked_and_those_that_are_not_there_are_named(
    gpu: OneGpu,
    model: Path,
    opened: list[Any],
    capfd: pytest.CaptureFixture[str],
    run_dir: Path,
) -> None:
    gpu.make_room_for(5)
    here, away = f"ipc://{run_dir}/here.sock", f"ipc://{run_dir}/away.sock"
    remote = [*USUAL, "--moe-mode", "remote"]
    waits = ["--connect-timeout-ms", "300"]
    with running_daemon(model, here):
        found = check_same(model, capfd, opened, [*remote, "--connect", here])
        assert [each["name"] for each in found["owners"] if any(each["experts"].values())] == [
            "link0"
        ]
        both = [*remote, *waits, "--connect", away, "--connect", here]
        others = planned(model, capfd, both)["alternatives"]
        assert [each["why_not"] for each in others if "link0" in each["name"]] == ["not connected"]
    # A plan without them, in which they are named.
    found = planned(model, capfd, [*USUAL, *waits, "--connect", away])
    assert [each["name"] for each in found["owners"]] == [LOCAL_OWNER, HOST_OWNER]
    assert [each["why_not"] for each in found["alternatives"] if "link0" in each["name"]] == [
        "not connected"
    ]


def test_a_daemon_of_a_processor_that_is_not_there_is_named(
    no_gpu: None, model: Path, capfd: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    away = ["--connect-timeout-ms", "300", "--connect", f"ipc://{run_dir}/away.sock"]
    found = planned(model, capfd, [*USUAL, *away])
    assert found["setup"]["device"] == "cpu"
    assert [(each["name"], each["why_not"]) for each in found["alternatives"]] == [
        ("daemon link0", "not connected")
    ]


def test_a_gpu_of_the_other_vendor_is_named_with_what_adds_it(
    gpu: OneGpu, model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Device(DeviceKind.HIP, 0)
    memory = DeviceMemory(1 << 40, 1 << 40, is_shared_with_host=False)
    described = [
        GpuDescription(device, "it", "uuid", "0000:01:00.0", memory, None, None)
        for device in (GPU, other)
    ]
    monkeypatch.setattr(planning, "gpus_of_machine", lambda: described)
    monkeypatch.setattr(planning, "devices_to_measure", lambda settings, gpus: (CPU, GPU))
    gpu.make_room_for(5)
    capfd.readouterr()
    assert _run(["plan", str(model), *USUAL]) == 0
    [line] = [each for each in capfd.readouterr().out.splitlines() if str(other) in each]
    assert "[[daemon]]" in line
