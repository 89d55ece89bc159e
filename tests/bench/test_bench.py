"""How benches measure: order and quiet of rounds, gaps, savings, and handicapped daemons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench.daemons import imposed_daemon
from bench.execution_modes import verdict
from bench.loss_gap import UNDISTURBED, Disturbed, table
from bench.pairs import Sample, interleave
from bench.payload_accuracy import Difference
from bench.prefill_traffic import tables

from dflash_protocol.ids import Phase
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from dflash_runtime.experts.telemetry import OwnerStats
from support.random_models import BLOCK_32_SHAPE, write_qwen3moe


def test_every_other_round_runs_the_sides_in_reverse() -> None:
    order: list[str] = []

    def side(name: str) -> Callable[[int], Sample]:
        def run(_number: int) -> Sample:
            order.append(name)
            return Sample(1.0, 0.0)

        return run

    names = ("a", "b", "c")
    interleave({name: side(name) for name in names}, 5, timeout_s=0.0)
    rounds = [order[first : first + 3] for first in range(0, len(order), 3)]
    assert len(rounds) == 6  # one of them warms up
    assert all(sorted(each) == [*names] for each in rounds)
    assert [rounds[1][::-1], rounds[3][::-1]] == [rounds[2], rounds[4]]


def test_rounds_that_others_disturbed_are_repeated() -> None:
    disturbances = iter([0.0, 2.0, 0.5, 3.0, 1.0])
    rounds = interleave(
        {"a": lambda number: Sample(float(number), next(disturbances))}, 2, timeout_s=60.0
    )
    assert rounds.values == {"a": [1.0, 3.0]}
    assert rounds.label() == "2 of 4"


def test_a_sample_is_quiet_if_others_used_little_of_its_cores() -> None:
    def disturbance(others_s: float) -> float:
        return Sample.by_cpu_time(1.0, others_s=others_s, wall_s=1.0, cores=2).disturbance

    assert disturbance(-0.01) == 0.0
    assert disturbance(0.1) < 1.0 < disturbance(0.2)


def test_auto_is_compared_with_the_better_mode() -> None:
    values = {"auto": [9.0, 10.0, 11.0], "batched": [5.0, 5.0, 5.0], "stream": [10.0, 10.0, 10.0]}
    better, spread = verdict(values)
    assert better == "stream"
    assert (spread.smallest, spread.median, spread.largest) == (0.9, 1.0, 1.1)


def test_gaps_are_above_the_longest_undisturbed_wait() -> None:
    def text(longest_ms: float, *reasons: str) -> Disturbed:
        return Disturbed(longest_ms, 3, 2, at_signal_ms=longest_ms, reasons=reasons)

    texts = {
        UNDISTURBED: [text(10.0), text(20.0)],
        "kill -9": [text(60.0), text(119.0)],
        "SIGSTOP": [text(320.0, "no reply within 150 ms"), text(300.0, "no reply within 200 ms")],
    }
    shown, figures = table(texts, 250.0)
    assert figures == {"undisturbed_ms": 20.0, "kill -9": 99.0, "SIGSTOP": 300.0}
    assert shown.count("yes") == 2
    texts["kill -9"].append(text(121.0))
    texts["SIGSTOP"].append(text(321.0))
    assert table(texts, 250.0)[0].count("NO") == 2


def test_savings_are_of_both_ways_together() -> None:
    def counts(requests: int, sent: int, received: int) -> dict[str, object]:
        return {
            "transport": "shared", "requests": requests, "tokens": 10,
            "bytes_sent": sent, "bytes_received": received,
        }  # fmt: skip

    shown = tables(
        {
            "batched, bf16": counts(5, 30, 10),
            "stream, bf16": counts(100, 40, 10),
            "older shape": counts(5, 60, 40),
        }
    )
    assert "95.00%" in shown
    assert "60.00%" in shown


def test_differences_of_logits() -> None:
    exact = np.array([[3.0, 4.0], [0.0, 1.0]], np.float32)
    moved = np.array([[3.0, 4.0], [2.0, 1.0]], np.float32)
    difference = Difference.between(moved, exact)
    assert difference.top_1_agreement == 0.5
    assert difference.worst_position == 2.0
    assert difference.relative_rms == pytest.approx(2 / 26**0.5)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "transport"), [(["--request-ms", "20"], "shared"), (["--version-1"], "stream")]
)
def test_an_imposed_daemon_computes_the_same_slower_or_as_an_older_one(
    arguments: list[str], transport: str, tmp_path: Path, run_dir: Path
) -> None:
    model = write_qwen3moe(tmp_path / "model.gguf", BLOCK_32_SHAPE, seed=3, tensor_type="Q8_0")
    ids = list(range(12))
    with Engine.open(model, daemons=[], backend="cpu") as engine:
        expected = engine.logits(ids)
    settings = replace(load_settings(), connect_timeout_ms=60_000, ipc_mode="batched")
    with (
        imposed_daemon(model, run_dir, name="imposed", arguments=arguments) as address,
        Engine.open(
            model, daemons=[], connect=[address], require_daemons=True, backend="cpu",
            settings=settings,
        ) as engine,
    ):  # fmt: skip
        logits = engine.logits(ids)
        owner: OwnerStats = engine.stats().owners["link0"]
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-4)
    assert owner.transport == transport
    phase = owner.phases[Phase.PREFILL]
    assert phase.requests == BLOCK_32_SHAPE.num_layers
    if "--request-ms" in arguments:
        assert phase.compute_s / phase.requests > 0.02
