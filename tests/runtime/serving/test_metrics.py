"""What a scrape says: histograms that Prometheus can use, counters, and nothing before there is."""

from __future__ import annotations

import math

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from dflash_protocol.ids import Phase
from dflash_runtime.engine.engine import EngineStats, GenerationStats
from dflash_runtime.experts.telemetry import ExpertMemoryStats, HitCounts, OwnerKind, OwnerStats
from dflash_runtime.serving.metrics import Metrics

TIMES_S = {Phase.PREFILL: [0.002, 0.9], Phase.DECODE: [5e-6, 20e-6, 21e-6, 100e-6, 50.0]}
WORK_OF_PHASES = {
    "owner_phase_requests": "requests",
    "owner_phase_queue_seconds": "queue_s",
    "owner_phase_compute_seconds": "compute_s",
}


def daemon() -> OwnerStats:
    """An owner that was asked for each of the times, and one second more each time."""
    owner = OwnerStats(OwnerKind.DAEMON, num_experts=8)
    for phase, times_s in TIMES_S.items():
        stats = owner.of_phase(phase)
        for seconds in times_s:
            stats.requests += 1
            stats.queue_s += 0.25
            stats.compute_s += 0.5
            stats.round_trips.add(seconds)
    return owner


def scraped(owners: dict[str, OwnerStats]) -> dict[str, Metric]:
    """Families by name, without our prefix."""
    metrics = Metrics()
    metrics.watch_engine(lambda: EngineStats(owners=owners, events=[], selections={}))
    text = metrics.text().decode()
    return {
        family.name.removeprefix("dflash_moe_"): family
        for family in text_string_to_metric_families(text)
    }


def test_round_trips_are_a_histogram_by_owner_and_phase() -> None:
    family = scraped({"cpu0": daemon(), "local": OwnerStats(OwnerKind.LOCAL, 4)})[
        "owner_round_trip_seconds"
    ]
    assert family.type == "histogram"
    for phase, times_s in TIMES_S.items():
        labels = {"owner": "cpu0", "phase": phase.value}
        of_phase = [each for each in family.samples if each.labels.items() >= labels.items()]
        buckets = {
            float(each.labels["le"]): each.value
            for each in of_phase
            if each.name.endswith("_bucket")
        }
        assert list(buckets) == sorted(buckets)
        assert math.isinf(max(buckets))
        assert min(buckets) < 10e-6
        for bound_s, value in buckets.items():
            assert value == sum(seconds <= bound_s for seconds in times_s), bound_s
        others = {each.name.rpartition("_")[2]: each.value for each in of_phase[len(buckets) :]}
        assert others == {"count": len(times_s), "sum": pytest.approx(sum(times_s))}
    assert {each.labels["owner"] for each in family.samples} == {"cpu0"}


def test_what_daemons_say_of_waiting_and_computing_is_counted_by_phase() -> None:
    families, owner = scraped({"cpu0": daemon()}), daemon()
    for name, field in WORK_OF_PHASES.items():
        assert families[name].type == "counter"
        values = {each.labels["phase"]: each.value for each in families[name].samples}
        assert values == {
            phase.value: getattr(stats, field) for phase, stats in owner.phases.items()
        }
        assert all(values.values())


def test_hits_are_counted_by_who_computes_them() -> None:
    hits = HitCounts(layers=9, layers_hot_only=4, hot=50, remote=20, cold=2, offloaded=7)
    metrics = Metrics()
    metrics.watch_engine(lambda: EngineStats(owners={}, events=[], selections={}, hits=hits))
    lines = metrics.text().decode().splitlines()
    assert "dflash_moe_layers_total 9.0" in lines
    assert "dflash_moe_layers_hot_only_total 4.0" in lines
    for place, value in (("hot", 50), ("remote", 20), ("cold", 2), ("offloaded", 7)):
        assert f'dflash_moe_selections_total{{place="{place}"}} {value}.0' in lines
    assert "# TYPE dflash_moe_selections_total counter" in lines
    hits.hot += 8
    assert 'dflash_moe_selections_total{place="hot"} 58.0' in metrics.text().decode().splitlines()


def test_memory_of_daemons_is_shown_by_daemon() -> None:
    memory = ExpertMemoryStats(30, 50, 20, num_cuts=3, num_returns=2)
    metrics, owner = Metrics(), OwnerStats(OwnerKind.DAEMON, 8, give_back_bytes=10)
    metrics.watch_engine(
        lambda: EngineStats({"gpu1": owner}, [], {}, daemon_memory={"gpu1": memory})
    )
    lines = metrics.text().decode().splitlines()
    for which, value in (("held", 30), ("most", 50), ("least", 20)):
        assert f'dflash_moe_daemon_expert_bytes{{owner="gpu1",which="{which}"}} {value}.0' in lines
    for outcome, value in (("given_back", 3), ("taken", 2)):
        labels = f'outcome="{outcome}",owner="gpu1"'
        assert f"dflash_moe_daemon_expert_memory_changes_total{{{labels}}} {value}.0" in lines
    assert 'dflash_moe_owner_gives_back_bytes{kind="daemon",owner="gpu1"} 10.0' in lines
    assert not [line for line in lines if "dflash_moe_expert_device_bytes" in line]


def test_an_owner_that_was_asked_nothing_has_counters_and_no_round_trips() -> None:
    families = scraped({"cpu0": OwnerStats(OwnerKind.DAEMON, 8)})
    [sample] = families["owner_requests"].samples
    assert (sample.value, sample.labels) == (0.0, {"owner": "cpu0", "kind": "daemon"})
    assert families["owner_round_trip_seconds"].samples == []


def test_a_daemon_that_is_lost_is_not_up() -> None:
    owners = {"cpu0": daemon(), "cpu1": daemon()}
    owners["cpu1"].is_lost = True
    up = scraped(owners)["owner_up"]
    assert up.type == "gauge"
    assert {each.labels["owner"]: each.value for each in up.samples} == {"cpu0": 1.0, "cpu1": 0.0}


def test_what_an_owner_did_for_a_generation_is_what_was_added_since_the_last_one() -> None:
    metrics, owner = Metrics(), OwnerStats(OwnerKind.DAEMON, 8)
    for requests, wait_s in ((5, 0.5), (7, 0.75)):
        owner.requests += requests
        owner.wait_s += wait_s
        metrics.count_owners({"cpu0": owner})
    lines = metrics.text().decode().splitlines()
    assert 'dflash_moe_owner_generation_requests_sum{owner="cpu0"} 12.0' in lines
    assert 'dflash_moe_owner_generation_requests_bucket{le="4.0",owner="cpu0"} 0.0' in lines
    assert 'dflash_moe_owner_generation_wait_seconds_sum{owner="cpu0"} 1.25' in lines
    assert 'dflash_moe_owner_generation_wait_seconds_count{owner="cpu0"} 2.0' in lines


@pytest.mark.parametrize(
    ("num_generated", "names"),
    [
        (0, set()),
        (1, {"request_prefill_time_seconds"}),
        (
            3,
            {
                "request_prefill_time_seconds",
                "request_decode_time_seconds",
                "time_per_output_token_seconds",
            },
        ),
    ],
)
def test_times_that_a_generation_did_not_have_are_not_counted(
    num_generated: int, names: set[str]
) -> None:
    metrics = Metrics()
    stats = GenerationStats(
        num_prompt_tokens=4, num_generated_tokens=num_generated, prefill_s=0.5, decode_s=0.25
    )
    metrics.count_generation("length", stats)
    counted = {
        family.name.removeprefix("dflash_moe_")
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if family.type == "histogram" and sample.name.endswith("_count") and sample.value
    }
    assert counted == names
