"""What a link costs follows from an engine's counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_protocol.ids import Phase
from dflash_runtime import Engine
from dflash_runtime.engine.measuring.links import LinkSamples, measure_links
from dflash_runtime.experts.telemetry import LatencyHistogram, OwnerKind, OwnerStats, PhaseStats
from support.emulated_gpu import TINY
from support.random_models import write_qwen3moe


def owner(
    kind: OwnerKind, phase: Phase, requests: int, trip_s: float, compute_s: float
) -> OwnerStats:
    trips = LatencyHistogram()
    for _ in range(requests if trip_s else 0):
        trips.add(trip_s)
    stats = PhaseStats(requests, compute_s=requests * compute_s)
    stats.round_trips = trips
    return OwnerStats(kind, 1, phases={phase: stats})


def test_what_is_beyond_computing() -> None:
    phase, samples = Phase.DECODE, LinkSamples()
    before = {"d": owner(OwnerKind.DAEMON, phase, 10, 9.0, 9.0)}
    after = {"d": owner(OwnerKind.DAEMON, phase, 10, 9.0, 9.0)}
    stats = after["d"].phases[phase]
    stats.requests, stats.compute_s = 20, 90.0 + 10 * 0.003
    for _ in range(10):
        stats.round_trips.add(0.004)
    samples.add_steps(before, after)
    link = samples.speeds()["d"]
    ((rows, seconds),) = link.step.points
    assert rows == 1.0
    assert seconds == pytest.approx(0.001)
    assert link.chunk == link.step


def test_a_reply_that_waits_for_this_process_costs_nothing_more() -> None:
    phase, samples = Phase.DECODE, LinkSamples()
    after = {
        "d": owner(OwnerKind.DAEMON, phase, 10, 0.005, 0.001),
        "local": owner(OwnerKind.LOCAL, phase, 10, 0.0, 0.005),
    }
    samples.add_steps({}, after)
    ((_, seconds),) = samples.speeds()["d"].step.points
    assert seconds == pytest.approx(0.0, abs=1e-6)


def test_chunks_in_parts() -> None:
    samples, chunk = LinkSamples(), owner(OwnerKind.DAEMON, Phase.PREFILL, 40, 0.0, 0.01)
    stats = chunk.phases[Phase.PREFILL]
    stats.wait_s, stats.pack_s, stats.combine_s = 0.25, 0.02, 0.01
    own = owner(OwnerKind.LOCAL, Phase.PREFILL, 10, 0.0, 0.02)
    steps = {"d": owner(OwnerKind.DAEMON, Phase.DECODE, 10, 0.002, 0.001)}
    samples.add_steps({}, steps)
    samples.add_chunk(64, {}, {"d": chunk, "l": own}, num_layers=8)
    ((rows, seconds),) = samples.speeds()["d"].chunk.points
    assert rows == 64.0
    assert seconds == pytest.approx((0.03 + 0.25 - (0.4 - 0.2)) / 8)


def test_links_without_round_trips_are_left_out() -> None:
    samples = LinkSamples()
    samples.add_steps({}, {"d": owner(OwnerKind.DAEMON, Phase.DECODE, 10, 0.0, 0.0)})
    samples.add_steps({}, {"l": owner(OwnerKind.LOCAL, Phase.DECODE, 10, 1.0, 0.0)})
    assert samples.speeds() == {}


def test_the_daemons_of_an_engine(tmp_path: Path) -> None:
    path = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    with Engine.open(path, daemons=["cpu"], local_experts=2, threads=1, context=256) as engine:

        def generate(num_prompt: int, num_tokens: int) -> None:
            for _ in engine.generate([1] * num_prompt, num_tokens, ignore_eos=True):
                pass

        found = measure_links(
            generate,
            lambda: engine.stats().owners,
            num_positions=engine.num_positions,
            num_layers=TINY.num_layers,
        )
    (link,) = found.values()
    assert [rows for rows, _ in link.step.points] == [1.0]
    assert [rows for rows, _ in link.chunk.points] == [64.0]
    assert link.step.at(1) >= 0.0
