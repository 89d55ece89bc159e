"""16-bit payloads change little: logits of the demo model on a text that it has never seen."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.processes import ROOT, environment

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

Figures = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def figures() -> Figures:
    """By payload type, what differs from f32: a prompt in chunks, then 32 tokens one by one."""
    command = [sys.executable, "-m", "bench.payload_accuracy", "--tokens", "1000", "--single", "32"]
    done = subprocess.run(
        [*command, "--json"],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: Figures = json.loads(done.stdout)
    assert set(result) == {"f16", "bf16"}
    return result


@pytest.mark.parametrize("payload", ["f16", "bf16"])
def test_logits_stay_near_those_of_f32(figures: Figures, payload: str) -> None:
    """Within what the kernels' own rounding costs: 0.8 % against the float reference."""
    assert 1e-4 < figures[payload]["relative_rms"] <= 0.012
    assert figures[payload]["worst_position"] <= 0.3


@pytest.mark.parametrize("payload", ["f16", "bf16"])
def test_the_top_token_is_the_same_at_99_percent_of_positions(
    figures: Figures, payload: str
) -> None:
    assert figures[payload]["top_1_agreement"] >= 0.99


def test_f16_holds_all_values_of_the_demo_model(figures: Figures) -> None:
    assert figures["f16"]["widened"] == 0


def test_the_two_types_round_differently(figures: Figures) -> None:
    """Or one of them was not what went over the link."""
    assert figures["f16"]["relative_rms"] != figures["bf16"]["relative_rms"]
