"""Files and numbers that say where experts live, and are wrong: one line, and nothing starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_protocol.settings.kinds import Whole
from dflash_protocol.settings.table import EXPERT_COMPUTE, KNOBS
from dflash_runtime.cli.main import _run
from support.emulated_gpu import TINY
from support.random_models import write_qwen3moe

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model, another one, and the plan of each."""
    folder = tmp_path_factory.mktemp("plans")
    for seed, name in ((4, "m"), (5, "other")):
        model = write_qwen3moe(folder / f"{name}.gguf", TINY, seed=seed)
        assert _run(["plan", str(model), "--save", str(folder / f"{name}.json")]) == 0
    return folder


def refusal(
    folder: Path, capfd: pytest.CaptureFixture[str], *arguments: str, command: str = "generate"
) -> str:
    """The one line that a command ends with."""
    more = ["--token-ids", "1,2", "-n", "1"] if command == "generate" else []
    capfd.readouterr()
    assert _run([command, str(folder / "m.gguf"), *more, *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("dflash-moe: error: ")
    assert len(line) < 400
    return line


def experts(record: dict[str, Any]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = record["owners"][0]["experts"]
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(version=99),
        lambda record: record.update(model="0" * 64),
        lambda record: experts(record)["0"].append(experts(record)["0"][0]),
        lambda record: experts(record).update({"0": [0] * TINY.num_experts}),
        lambda record: experts(record)["0"].pop(),
        lambda record: experts(record).update({"0": [*range(TINY.num_experts - 1), 1 << 40]}),
        lambda record: experts(record).update({"0": [*range(TINY.num_experts - 1), -1]}),
        lambda record: experts(record).update({"77": [0]}),
        lambda record: record["owners"][0].update(name="nowhere"),
        lambda record: record["owners"].append(record["owners"][0]),
        lambda record: record["budgets"][0].update(free_bytes=-1),
        lambda record: record["setup"].update(context=1 << 60),
    ],
)
def test_a_plan_that_is_wrong(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: Change
) -> None:
    record = json.loads((folder / "m.json").read_text())
    change(record)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(record))
    assert str(path) in refusal(folder, capfd, "--plan", str(path))


def test_a_plan_of_another_model_or_cut_off_or_none(
    folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cut.json").write_text((folder / "m.json").read_text()[:-40])
    for path in (folder / "other.json", tmp_path / "cut.json", tmp_path, Path("/dev/zero")):
        assert str(path) in refusal(folder, capfd, "--plan", str(path))
        monkeypatch.setenv(f"{EXPERT_COMPUTE}PLAN", str(path))
        assert str(path) in refusal(folder, capfd)
        monkeypatch.delenv(f"{EXPERT_COMPUTE}PLAN")


@pytest.mark.parametrize(
    "layers",
    [
        [[0, 0], []],
        [[TINY.num_experts], []],
        [[-1], []],
        [[1 << 70], []],
        [[0]],
        [[0], [], [0]],
        [[0.5], []],
        [["0"], []],
    ],
)
def test_a_placement_that_is_wrong(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], layers: list[list[Any]]
) -> None:
    path = tmp_path / "placement.json"
    document = {
        "version": 1, "n_layer": 2, "n_expert": TINY.num_experts, "hot_expert_ids": layers
    }  # fmt: skip
    path.write_text(json.dumps(document))
    assert str(path) in refusal(folder, capfd, "--placement", str(path))


BUDGETS = {
    "--expert-budget-mb": "EXPERT_BUDGET_MB",
    "--expert-budget-pct": "EXPERT_BUDGET_PCT",
    "--device-memory-mb": "DEVICE_MEMORY_MB",
    "--host-memory-mb": "HOST_MEMORY_MB",
    "--n-cpu-moe": "N_CPU_MOE",
    "--gpu-layers": "GPU_LAYERS",
    "--context": "CONTEXT",
    "--local-experts": "LOCAL_EXPERTS",
    "--swap-max": "SWAP_MAX",
    "--swap-min-gain": "SWAP_MIN_GAIN",
    "--kv-type": "KV_TYPE",
}


@pytest.mark.parametrize("flag", BUDGETS)
def test_a_budget_that_is_negative_or_absurd(
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
) -> None:
    variable = EXPERT_COMPUTE + BUDGETS[flag]
    for value in ("-1", "1e9", "nan", "99999999999999999999", "much", ""):
        for command in ("generate", "plan"):
            assert flag in refusal(folder, capfd, flag, value, command=command)
            monkeypatch.setenv(variable, value)
            assert variable in refusal(folder, capfd, command=command)
            monkeypatch.delenv(variable)


@pytest.mark.parametrize(
    "variable",
    [name for knob in KNOBS for name in knob.older_variables if isinstance(knob.kind, Whole)],
)
def test_an_older_variable_with_such_a_budget(
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    monkeypatch.setenv(variable, "-5")
    assert variable in refusal(folder, capfd)


@pytest.mark.parametrize("command", ["generate", "plan"])
@pytest.mark.parametrize("asked", ["exps=nowhere", "exps=cuda:7", "no_such_tensor=cpu", "(=cpu"])
def test_an_owner_or_tensors_that_do_not_exist(
    folder: Path, capfd: pytest.CaptureFixture[str], asked: str, command: str
) -> None:
    pattern = asked.partition("=")[0]
    assert pattern in refusal(folder, capfd, "--device", "cpu", "-ot", asked, command=command)


@pytest.mark.parametrize("text", ["", "1,2\n3\n", "-1,2,3\n", "not heat"])
def test_heat_that_is_wrong(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "some.heat"
    path.write_text(text)
    assert str(path) in refusal(folder, capfd, "--hotness", str(path))


def test_heat_that_cannot_be_written_is_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = "/proc/self/no/such/folder/heat"
    arguments = ["generate", str(folder / "m.gguf"), "--token-ids", "1,2", "-n", "1"]
    assert _run([*arguments, "--heat", path]) == 0
    [record] = [each for each in caplog.records if each.levelname == "WARNING"]
    assert path in record.getMessage()
