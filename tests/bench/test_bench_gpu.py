"""The GPU bench, what it does with figures: deadlines, arithmetic, tables, arguments, losses."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.gpu import LIMITS_S, parsed
from bench.gpu_parts import Parts, Result
from bench.gpu_record import GOALS, budget, figure, tables, verdicts
from bench.gpu_resident import ResidentBench, Work, prompt_of, random_ids, row_of
from bench.gpu_split import PEER_SPLITS, SPLITS, SplitWork
from bench.sides import SideError

from bench import gpu


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_parts_share_the_time_of_a_run() -> None:
    clock = Clock()
    parts = Parts(60.0, clock=clock)
    limits: list[float] = []

    def measure(result: Result, until_s: float) -> None:
        limits.append(until_s - clock.now_s)
        result["value"] = 1
        clock.now_s += 35.0

    for name in ("a", "b", "c"):
        parts.run(name, 40.0, measure)
    assert limits == [40.0, 25.0]
    assert parts.results["b"]["seconds"] == 35.0
    assert parts.results["c"]["errors"] == ["no time was left for it"]
    assert "value" not in parts.results["c"]
    assert parts.failed == ["c"]


def test_a_part_that_fails_keeps_what_it_had_found(capsys: pytest.CaptureFixture[str]) -> None:
    parts = Parts(60.0)

    def measure(result: Result, _until_s: float) -> None:
        result["rows"] = [1]
        raise RuntimeError("the device is gone")

    assert parts.run("a", 10.0, measure)["rows"] == [1]
    assert parts.run("b", 10.0, lambda result, _: None)["errors"] == []
    assert parts.failed == ["a"]
    assert "a: the device is gone" in capsys.readouterr().err


KERNELS: dict[str, Any] = {
    "context": 448,
    "step_s": 1e-3,
    "kernels": [
        {"label": "embed", "kernel": "embed", "reads": "token_embd", "count": 1, "gained_s": 1e-5},
        {"label": "q", "kernel": "linear", "reads": "attn_q", "count": 4, "gained_s": 4e-4},
        {"label": "down", "kernel": "down", "reads": "ffn_down_exps", "count": 4, "gained_s": 2e-4},
        {"label": "head", "kernel": "linear", "reads": "output", "count": 1, "gained_s": 1e-4},
        {"label": "sample", "kernel": "sample", "reads": "", "count": 1, "gained_s": 2e-5},
    ],
}
for _kernel in KERNELS["kernels"]:
    _kernel |= {"weight_bytes": 1e6 if _kernel["label"] == "q" else 0.0, "cache_bytes": 0.0}


def test_the_time_of_a_token_adds_up() -> None:
    times = budget(KERNELS, 1.5e-3)
    assert times["layers"] == pytest.approx(6e-4)
    assert times["head"] == pytest.approx(1e-4)
    assert times["embedding and choice of the token"] == pytest.approx(3e-5)
    assert times["overlap and gaps, in no single kernel"] == pytest.approx(2.7e-4)
    assert times["host, between steps"] == pytest.approx(5e-4)
    assert list(times)[-1] == "a token"
    assert times["a token"] == pytest.approx(1.5e-3)
    assert budget(KERNELS)["a token"] == pytest.approx(1e-3)


def results_with(**rows: dict[str, list[float]]) -> dict[str, Any]:
    """Results of parts, whose rows are of ours; ``_`` in a part's name is ``-`` there."""
    return {
        part.replace("_", "-"): {
            "title": part,
            "errors": [],
            "rows": [row_of(name, {"ours": values}) for name, values in of_part.items()],
        }
        for part, of_part in rows.items()
    }


def test_goals_are_met_missed_or_not_measured() -> None:
    results = results_with(
        resident={"decode at 448": [590.0, 610.0, 620.0], "prefill 4096": [20_000.0]},
        split_half={"decode at 448": [300.0], "prefill 4096": [15_000.0]},
        split_cpu={"decode at 448": [54.0]},
    )
    long = {"ours": [500.0, 400.0], "llama.cpp": [250.0, 250.0]}
    results["resident"]["rows"].append(row_of("decode at 8192", long))
    found = {(each["part"], each["row"], each["is_ratio"]): each for each in verdicts(results)}
    assert len(found) == len(GOALS)
    assert found["resident", "decode at 448", False]["found"] == 610.0
    assert found["resident", "decode at 8192", True]["found"] == pytest.approx(1.8)
    assert found["split-half", "decode at 448", True]["found"] == pytest.approx(300 / 610)
    assert found["split-half", "prefill 4096", True]["met"] is True
    met = [each["met"] for each in verdicts(results)]
    assert met.count(True) == 4
    assert met.count(False) == 2
    assert met.count(None) == len(GOALS) - 6


def test_what_idles_is_not_to_exceed_its_goals() -> None:
    results = results_with(idle={})
    results["idle"]["largest"] = {"GPU use": 1.0, "CPU of a process": 2.0}
    found = {each["row"]: each for each in verdicts(results) if each["part"] == "idle"}
    assert [(each["found"], each["met"]) for each in found.values()] == [(1.0, False), (2.0, True)]
    results["idle"]["largest"] = {"CPU of a process": 2.1}  # no vendor tells of GPUs
    met = {each["row"]: each["met"] for each in verdicts(results) if each["part"] == "idle"}
    assert met == {"GPU use": None, "CPU of a process": False}


def test_a_ratio_to_what_was_not_measured_is_none() -> None:
    results = results_with(split_half={"decode at 448": [300.0]}, resident={})
    assert all(figure(goal, results) is None for goal in GOALS)


def test_ours_is_compared_with_the_better_size_of_batches() -> None:
    values = {
        "ours": [20.0, 30.0],
        "llama.cpp, 512 at once": [9.0, 9.0],
        "llama.cpp, 2048 at once": [10.0, 10.0],
    }
    row = row_of("prefill 4096", values)
    assert row["peer"] == "llama.cpp, 2048 at once"
    assert row["ratio"] == {"median": 2.5, "smallest": 2.0, "largest": 3.0}
    assert "ratio" not in row_of("prefill 4096", {"ours": [1.0]})


def cells_of(shown: str, begin: str) -> list[str]:
    """The cells of the row that begins so, without the first."""
    (row,) = [line for line in shown.splitlines() if line.startswith(f"| {begin}")]
    return [cell.strip() for cell in row.split("|")[2:-1]]


def test_tables_show_everything() -> None:
    results = results_with(resident={"decode at 448": [600.0]}, split_cpu={"decode at 448": [60.0]})
    results["split-cpu"]["same_tokens"] = [128, 129]
    results["device"] = {
        "name": "a card",
        "driver": "1.2",
        "multiprocessors": 7,
        "copy_bytes_per_s": 5e9,
        "errors": [],
    }
    results["kernels"] = {"contexts": [KERNELS], "errors": ["Traceback\n  line\nended early"]}
    results["mail-three"] = results_with(mail_three={"decode at 448": [480.0]})["mail-three"]
    results["peer-rpc"] = {
        "title": "in an RPC server",
        "rows": [row_of("decode at 448", {"llama.cpp": [47.0]})],
        "errors": [],
    }
    results["idle"] = {
        "seconds_idle": 6.03,
        "cpu_percent": {"parent": 0.25, "daemon 1": 1.5},
        "gpu_percent": {"cuda:0": [0.0, 3.0], "cuda:1": None},
        "largest": {"CPU of a process": 1.5, "GPU use": 3.0},
        "errors": [],
    }
    shown = tables(results, [*SPLITS, *PEER_SPLITS])
    assert cells_of(shown, "mail_three: decode at 448") == ["480.0", "0.80", ""]
    assert cells_of(shown, "in an RPC server: decode at 448") == ["47.0", "", ""]
    assert cells_of(shown, "CPU of the daemon 1") == ["1.50 % of a core"]
    assert cells_of(shown, "GPU use of cuda:0, samples") == ["0, 3 %"]
    assert cells_of(shown, "GPU use of cuda:1, samples") == ["not known"]
    assert cells_of(shown, "mail-three: decode at 448 ÷") == ["0.75", "", "0.80", "met"]
    assert cells_of(shown, "idle: GPU use") == ["≤ 0 %", "", "3.0 %", "MISSED"]
    assert cells_of(shown, "idle: CPU") == ["≤ 2 %", "", "1.5 %", "met"]
    assert "a card, driver 1.2, 7 multiprocessors." in shown
    assert "128 of 129" in shown
    assert "split-cpu: decode at 448 " in shown
    assert "split-half: " not in shown  # which was not run
    assert "0.10" in shown  # of all on one GPU
    assert cells_of(shown, "q ") == ["4", "100.00", "400", "1.0", "2", "50%"]
    assert "* kernels: Traceback ended early" in shown
    a_token = next(line for line in shown.splitlines() if line.startswith("| a token"))
    assert "1667" in a_token  # what the engine's 600 tokens/s are


def test_arguments_have_defaults_for_a_long_and_a_short_run() -> None:
    options = parsed([])
    assert options.parts == [name for name in LIMITS_S if name != "tests"]
    assert options.contexts == [448, 8192, 32768]
    assert sum(LIMITS_S[name] for name in gpu._QUICK) < 8 * 60
    quick = parsed(["--quick", "--contexts", "16"])
    assert (quick.parts, quick.contexts, quick.prompts) == (list(gpu._QUICK), [16], [4096])
    split = parsed(["--split"])
    assert {"mail-three", "idle", "peer-rpc"} < set(split.parts)
    assert not {"kernels", "split-cpu", "peer-cpu", "tests"} & set(split.parts)
    with pytest.raises(SystemExit):
        parsed(["--parts", "nothing"])


def test_every_part_has_a_limit_and_something_to_do(tmp_path: Path) -> None:
    table = gpu.measures(parsed([]), tmp_path / "model.gguf", tmp_path, Parts(60.0))
    assert set(table) == set(LIMITS_S)


@pytest.mark.parametrize("num_gpus", [1, 2, 4])
def test_parts_that_need_more_gpus_are_left_out(
    num_gpus: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run: list[str] = []

    def measures(*_: object) -> dict[str, Any]:
        def fill(name: str, result: Result, _until_s: float) -> None:
            run.append(name)
            result |= {"gpus": ["a card"] * num_gpus} if name == "device" else {}

        return {name: partial(fill, name) for name in LIMITS_S}

    monkeypatch.setattr(gpu, "measures", measures)
    model = tmp_path / "model.gguf"
    model.touch()
    wanted = {1: ["resident", "split-cpu", "peer-cpu"], 2: ["mail-gpu", "idle", "peer-rpc"]}
    wanted[4] = ["mail-three"]
    names = [each for group in wanted.values() for each in group]
    arguments = ["--model", str(model), "--peer", "none", "--parts", *names]
    assert gpu.run(parsed(arguments)) == 0
    there = [each for size, group in wanted.items() if size <= num_gpus for each in group]
    assert run == ["device", *there]
    said = capsys.readouterr().err
    for name in set(names) - set(there):
        assert f"{name}: left out, it needs " in said


def test_sizes_of_works_leave_room_for_what_is_written() -> None:
    work = Work(contexts=[448, 8192], prompts=[4096], num_tokens=128, rounds=5)
    assert work.positions >= 8192 + 129
    assert [work.rounds_of(size) for size in (448, 8192)] == [5, 2]
    split = SplitWork(context=448, prompt=4096, num_tokens=128, rounds=3)
    assert split.positions >= 4096
    assert (split.decode, split.prefill) == ("decode at 448", "prefill 4096")


def test_prompts_of_all_parts_are_the_same_and_begin_otherwise_each_time() -> None:
    ids = random_ids(50)
    assert ids == random_ids(50)
    assert 0 <= min(ids) <= max(ids) < 50
    prompts = [prompt_of(ids, 32_768, number) for number in range(6)]
    assert {len(prompt) for prompt in prompts} == {32_768}
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 6


class FakeSide:
    """Answers at once, until it has answered `most` times."""

    def __init__(self, answer: float, most: int = 1000) -> None:
        self.answer, self.left, self.until_s = answer, most, None
        self.is_closed = False

    def call(self, method: str, *_args: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise SideError("gone")
        if method == "text":
            return [1, 2, 3]
        if method == "logits":
            return np.ones(4, np.float32)
        return {} if method == "opened" else self.answer

    def close(self) -> None:
        self.is_closed = True


def resident_result(peer: FakeSide) -> Result:
    sides: Any = {"ours": FakeSide(30.0), "llama.cpp": peer}
    result: Result = {"errors": []}
    work = Work(contexts=[16], prompts=[8], num_tokens=2, rounds=2)
    until_s = time.monotonic() + 60
    ResidentBench(sides, work, result, vocab_size=50, until_s=until_s).run()
    return result


def test_a_side_that_is_lost_leaves_the_others_rows() -> None:
    whole = resident_result(FakeSide(10.0))
    assert [row["work"] for row in whole["rows"]] == [
        "decode at 16",
        "decode at 16, temperature 0.8, top-p 0.9",
        "prefill 8",
    ]
    assert whole["rows"][0]["tokens_per_s"] == {"ours": [30.0, 30.0], "llama.cpp": [10.0, 10.0]}
    assert whole["rows"][2]["ratio"]["median"] == 3.0
    assert whole["texts"] == {"16": [1, 2, 3]}
    assert whole["logits_difference"] == 0.0
    peer = FakeSide(10.0, most=4)  # opened, logits, and two of three samples
    part = resident_result(peer)
    assert peer.is_closed
    assert part["errors"] == ["gone"]
    assert [set(row["tokens_per_s"]) for row in part["rows"]] == [{"ours"}] * 3
