"""The sweep beside imposed daemons: turns, medians, and that the plan is no candidate."""

from __future__ import annotations

import math
from typing import Any

import pytest
from bench.placement_regret import Measured, in_turns, row_of, sweep_of

FOUND = Measured(
    planned="local 40%, link0 60%",
    has_plan=True,
    forecast="",
    even="link0 100%",
    planned_s=[0.9, 5.0, 0.8],
    sweep_s={"link0 100%": [3.0, 2.0, 0.1], "local 100%": [1.0, 1.1, 1.2]},
)


def test_medians_count_and_the_planned_is_none_of_the_sweep() -> None:
    assert FOUND.best == "local 100%"
    assert FOUND.loss(FOUND.planned_s) == pytest.approx(0.9 / 1.1 - 1)
    assert row_of("slow", FOUND)[3:] == ["local 100%", "1.100", "-18.2%", "+81.8%", "467%"]


def test_every_other_round_goes_the_other_way_until_time_is_over() -> None:
    asked: list[str] = []

    def times_of(placement: Any) -> list[float]:
        asked.append(placement)
        return [1.0, 2.0]

    placements: dict[str, Any] = {"a": "a", "b": "b"}
    found = in_turns(placements, times_of, rounds=3, until_s=math.inf)
    assert asked == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [1.0, 2.0] * 3, "b": [1.0, 2.0] * 3}
    asked.clear()
    assert in_turns(placements, times_of, rounds=3, until_s=-math.inf)["b"] == [1.0, 2.0]
    assert asked == ["a", "b"]


def test_the_sweep_has_every_division() -> None:
    found = [str(each) for each in sweep_of(["link0", "link1"], 2)]
    assert len(found) == len(set(found)) == 6
    assert "local 50%, link1 50%" in found
