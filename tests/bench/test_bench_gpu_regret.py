"""Planned placements beside a sweep of others, on an emulated GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.gpu_parts import Parts, Result
from bench.gpu_regret import (
    MINIMISED,
    PLANNED,
    budgets_of,
    largest_that,
    measure_budget,
    parsed,
    parts_of,
    regret_table,
    regrets,
    seconds_of,
    speeds_table,
)
from bench.gpu_turns import DECODE, REQUEST, Bench
from bench.texts import Texts
from hypothesis import given
from hypothesis import strategies as st

from dflash_runtime.placement.situation import PlannedRequest
from support.emulated_gpu import TINY
from support.in_this_process import InThisProcess
from support.planned_gpu import CONTEXT, GPU, OneGpu
from support.random_models import write_qwen3moe

IDS = [(5 * position) % TINY.vocab_size for position in range(CONTEXT)]
TEXTS = Texts(
    learnt=[IDS[:9]],
    decode=[IDS[3:9]],
    later=[],
    prompts={8: [IDS[4:12]]},
    request=IDS[:7],
    decoded=3,
    written=4,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")


@pytest.mark.slow
def test_each_placement_is_opened_in_turn_within_the_budget(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = OneGpu(monkeypatch, model)
    gpu.copies_per_s = 1e9
    gpu.make_room_for(7)
    gpu.room_bytes += 1 << 20  # for experts that move, and copies
    bench = Bench(model, str(GPU), CONTEXT, TEXTS, tmp_path, InThisProcess)
    found: Result = {}
    num_kept = 0

    def keep() -> None:
        nonlocal num_kept
        num_kept += 1

    options = parsed(["--model", str(model), "--grid", "1", "--rounds", "1"])
    parts = Parts(options.limit)
    measure_budget("7", bench, parts, found, options=options, keep=keep)
    assert not parts.failed
    turns = found["turns"]
    kinds = {name.partition(" ")[0] for name in turns}
    assert {PLANNED, "hot", "layers", "CPU-MoE", "old"} <= kinds
    assert num_kept == len(turns)
    for each in turns.values():
        assert {*each["seconds_of"]} == {DECODE, REQUEST, "prompt 8"}
        assert all(len(times) == 1 for times in each["seconds_of"].values())
    old = next(name for name in turns if name.startswith("old"))
    number = int(old.split()[1].rstrip(","))
    assert turns[old]["plan"]["share_here"] == turns[PLANNED]["plan"]["share_here"]  # as saved
    assert turns[old]["owners"]["local"]["pairs"]
    assert 0 < number < TINY.num_experts
    assert found["sweep"][old]["forecast"] is None
    assert found["sweep"]["CPU-MoE"]["forecast"]["decode"] > 0
    assert {*regrets(turns)} == {DECODE, REQUEST, "prompt 8"}
    assert "7: decode" in regret_table({"7": found})
    assert "7: CPU-MoE" in speeds_table({"7": found})


def test_a_regret_may_be_negative_and_the_planned_is_none_of_the_sweep() -> None:
    turns: dict[str, Result] = {
        PLANNED: {"seconds_of": {DECODE: [0.9, 1.0, 0.8]}},
        "hot 2": {"seconds_of": {DECODE: [1.0, 1.3]}},
        "old 1": {"seconds_of": {DECODE: [1.8, 0.1, 2.0]}},
        "layers 1": {"refused": "no room"},
    }
    assert regrets(turns) == {DECODE: (0.9 / 1.15 - 1, "hot 2", 1.15)}
    row = regret_table({"b": {"turns": turns}}).splitlines()[-1]
    assert "-21.7%" in row
    assert "2.00" in row
    speeds = {"b": {"turns": turns, "sweep": {"hot 2": {"forecast": {"decode": 1.0}}}}}
    assert "0.9 (1.0, +15%)" in speeds_table(speeds)
    assert "no room" in speeds_table(speeds)


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_largest_that_fits_is_found(limit: int, most: int) -> None:
    assert largest_that(lambda number: number <= limit, most) == min(limit, most)


@given(st.integers(0, 128), st.integers(1, 6))
def test_parts_of_the_largest_are_distinct(largest: int, grid: int) -> None:
    found = parts_of(largest, grid)
    assert len(found) <= grid
    assert found == sorted(found, reverse=True)
    assert (found[0] == largest and found[-1] > 0) if largest else not found


def test_budgets_hold_parts_of_the_experts(model: Path) -> None:
    options = parsed(["--model", str(model), "--context", str(CONTEXT)])
    sizes = [*budgets_of(options).values()]
    assert sizes == sorted(sizes)
    assert budgets_of(replace_budgets(options, [2.5])) == {"2.5 GiB": 5 << 29}


def replace_budgets(options: Any, budgets: list[float]) -> Any:
    options.budgets = budgets
    return options


def test_what_plans_minimise_is_a_row() -> None:
    """The request, and so many long prompts as plans expect for each."""
    wanted = PlannedRequest()
    long = f"prompt {wanted.long_prompt}"
    turn = {"seconds_of": {REQUEST: [2.0, 1.0, 3.0], long: [0.5]}}
    assert seconds_of(turn)[MINIMISED] == pytest.approx(2.0 + 0.5 * wanted.long_share)
    assert MINIMISED not in seconds_of({"seconds_of": {REQUEST: [2.0]}})
    turns = {PLANNED: turn, "hot 2": {"seconds_of": {REQUEST: [1.8], long: [4.0]}}}
    regret, name, _ = regrets(turns)[MINIMISED]
    assert regret < 0.0
    assert name == "hot 2"
    assert regrets(turns)[REQUEST][0] > 0.0
