"""Forecasts of plans beside what an emulated GPU's engines are measured with."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.gpu_parts import Result
from bench.gpu_predictions import (
    SETUPS,
    SetUp,
    chosen_setups,
    errors_of,
    measure_all,
    parsed,
    predictions_table,
)
from bench.gpu_turns import DECODE, LATER, Bench
from bench.texts import Texts, walk_of

from support.emulated_gpu import TINY
from support.in_this_process import InThisProcess
from support.planned_gpu import CONTEXT, GPU, OneGpu
from support.random_models import write_qwen3moe

IDS = [(5 * position) % TINY.vocab_size for position in range(CONTEXT)]
TEXTS = Texts(
    learnt=[IDS[:9]],
    decode=[IDS[3:9]],
    later=[IDS[2:14]],
    prompts={8: [IDS[4:12]]},
    decoded=3,
    written=4,
)


@pytest.mark.parametrize("more", [(), ("--kept-box",)])
def test_setups_are_opened_as_asked_and_forecast(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    gpu = OneGpu(monkeypatch, model)
    gpu.make_room_for(7)
    monkeypatch.setattr("bench.gpu_predictions.is_gpu", lambda device: False)
    options = parsed(["--model", str(model), *more])
    results: dict[str, Result] = {}
    num_kept = 0

    def keep() -> None:
        nonlocal num_kept
        num_kept += 1

    def bench_of(of: SetUp) -> Bench:
        return Bench(model, of.device or str(GPU), CONTEXT, TEXTS, tmp_path, InThisProcess)

    setups = {"small": SetUp(), "cpu": SetUp(device="cpu"), "other": SetUp(daemons=("gone",))}
    parts = measure_all(setups, results, options=options, bench_of=bench_of, keep=keep)
    assert parts.failed == ["other"]
    assert num_kept == 3
    for name in ("small", "cpu"):
        assert {*results[name]["seconds_of"]} == {DECODE, LATER, "prompt 8"}
        assert {*errors_of(results[name])} == {DECODE, LATER}
    shown = predictions_table(results)
    assert "error, decode and prompts" in shown
    assert "gone" in shown


def test_errors_are_of_medians() -> None:
    result: Result = {
        "forecast": {"decode": 90.0, "prompt_512": 1024.0},
        "seconds_of": {DECODE: [0.01, 0.01, 5.0], "prompt 512": [0.4]},
    }
    assert errors_of(result) == {
        DECODE: pytest.approx(-0.1),
        "prompt 512": pytest.approx(-0.2),
    }
    shown = predictions_table({"8gib": result}).splitlines()
    assert "90.0 / 100.0 (-10.0%)" in shown[2]
    assert "median 15.0%, worst 20.0%" in shown[3]


def test_only_setups_with_a_file_are_measured() -> None:
    assert {each.file for each in chosen_setups(parsed(["--olmoe", "o.gguf"])).values()} == {
        "olmoe"
    }
    only = parsed(["--model", "m.gguf", "--only", "cpu", "olmoe-half"])
    assert chosen_setups(only) == {"cpu": SETUPS["cpu"]}


def test_a_file_without_planted_routing_has_texts_too(tmp_path: Path) -> None:
    model = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    assert sorted(walk_of(model).token_ids) == [*range(TINY.vocab_size)]
