"""Predictions are stale once a minute of service was off in one direction."""

from __future__ import annotations

import pytest

from dflash_runtime.engine.predictions import PredictionWatch


def served(watch: PredictionWatch, ratio: float, seconds: float, step_s: float = 0.05) -> None:
    for _ in range(round(seconds / step_s)):
        watch.add(predicted_s=step_s / ratio, measured_s=step_s)


@pytest.mark.parametrize("ratio", [0.5, 0.7, 1.3, 3.0])
def test_a_minute_off(ratio: float) -> None:
    watch = PredictionWatch()
    served(watch, ratio, 50)
    assert not watch.is_stale
    assert watch.ratio == pytest.approx(ratio)
    served(watch, ratio, 15)
    assert watch.is_stale
    served(watch, 1.0, 100)
    assert watch.is_stale


@pytest.mark.parametrize("ratio", [0.8, 1.0, 1.24])
def test_nearly_right_forever(ratio: float) -> None:
    watch = PredictionWatch()
    served(watch, ratio, 600)
    assert not watch.is_stale


def test_a_break_begins_anew() -> None:
    watch = PredictionWatch()
    for _ in range(10):
        served(watch, 1.5, 45)
        served(watch, 1.0, 10)
    assert not watch.is_stale
    for _ in range(10):  # off, but not in one direction
        served(watch, 1.5, 30)
        served(watch, 0.5, 30)
    assert not watch.is_stale


def test_single_steps_may_vary() -> None:
    watch = PredictionWatch()
    for _ in range(3000):
        watch.add(predicted_s=0.05, measured_s=0.01)
        watch.add(predicted_s=0.05, measured_s=0.09)
    assert not watch.is_stale


def test_times_that_are_none_are_ignored() -> None:
    watch = PredictionWatch()
    for predicted_s, measured_s in ((0.0, 100.0), (100.0, 0.0), (-1.0, 99.0), (float("nan"), 99.0)):
        watch.add(predicted_s=predicted_s, measured_s=measured_s)
    assert not watch.is_stale
    assert watch.ratio == 1.0
