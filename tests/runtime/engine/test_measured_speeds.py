"""Measured speeds: of what was timed, and of prompts about as long as those that are predicted."""

from __future__ import annotations

import pytest

from dflash_runtime.engine.generation import GenerationStats
from dflash_runtime.engine.measured_speeds import SPEEDS, MeasuredSpeeds, plan_report


def generation(num_prompt: int, num_generated: int, *, reused: int = 0) -> GenerationStats:
    return GenerationStats(
        num_prompt, reused, num_generated, prefill_s=0.5, decode_s=2.0 * (num_generated > 1)
    )


def test_nothing_is_said_before_there_was_something() -> None:
    assert MeasuredSpeeds().rates == dict.fromkeys(SPEEDS)
    assert plan_report(None, MeasuredSpeeds()) is None


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        (generation(10, 5), {"decode": 2.0}),
        (generation(10, 1), {}),
        (generation(500, 0), {}),
        (generation(500, 1), {"prompt_512": 1000.0}),
        (generation(255, 1), {}),
        (generation(4000, 1, reused=3500), {"prompt_512": 1000.0}),
        (generation(4000, 3), {"prompt_4096": 8000.0, "decode": 1.0}),
        (generation(9000, 1), {}),
    ],
)
def test_a_generation_counts_for_what_it_is_like(
    stats: GenerationStats, expected: dict[str, float]
) -> None:
    speeds = MeasuredSpeeds()
    speeds.add(stats)
    assert speeds.rates == {**dict.fromkeys(SPEEDS), **expected}


def test_old_generations_are_forgotten() -> None:
    speeds = MeasuredSpeeds()
    speeds.add(generation(10, 101))
    speeds.add(generation(10, 51))
    assert speeds.rates["decode"] == pytest.approx(150 / 4)
    for _ in range(100):
        speeds.add(generation(10, 5))
    assert speeds.rates["decode"] == pytest.approx(2.0)
