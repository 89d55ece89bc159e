"""Prometheus' file and Grafana's dashboard ask for what the server has, and for nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from dflash_runtime import Engine
from dflash_runtime.serving.metrics import NAMESPACE, Metrics
from support.processes import ROOT

DASHBOARD = json.loads((ROOT / "deploy/grafana/dflash-moe.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
_NOT_METRICS = {
    "sum", "max", "by", "rate", "increase", "histogram_quantile", "label_values", "le", "inf",
}  # fmt: skip


@pytest.fixture(scope="module")
def metrics(model: Path) -> dict[str, set[str]]:
    """Names of all samples that a server with a daemon has, each with its labels."""
    metrics = Metrics()
    metrics.watch_queue(lambda: 0)
    with Engine.open(model, daemons=["cpu"], local_experts=1) as engine:
        metrics.watch_engine(engine.stats)
        list(engine.generate([1, 2, 3], 3))
        metrics.count_generation("stop", engine.last_generation)
        metrics.count_owners(engine.stats().owners)
        # Those that have labels are there once one was used.
        metrics.http_requests.labels("/ready", "200").inc()
        metrics.rejected.labels("queue_full").inc()
        text = metrics.text().decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def histograms_of(metrics: dict[str, set[str]]) -> set[str]:
    """Names without the ending of their samples."""
    return {name.removesuffix("_bucket") for name in metrics if name.endswith("_bucket")}


def queries() -> Iterator[tuple[str, str]]:
    """Title and expression of all queries, those of the variables too."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


def metrics_in(expression: str) -> list[tuple[str, set[str]]]:
    """Metrics of an expression, each with the labels that it is chosen by."""
    bare = re.sub(r"\{[^}]*\}", "", re.sub(r"by \([^)]*\)", "", expression))
    bare = re.sub(r"\[[^]]*\]", "", bare)
    names = set(re.findall(r"[a-z_][a-z0-9_]*", bare)) - _NOT_METRICS - {"job", "owner"}
    chosen = []
    for name in sorted(names):
        selector = re.search(rf"\b{name}\{{([^}}]*)\}}", expression)
        labels = re.findall(r"(\w+)=", selector[1]) if selector else []
        chosen.append((name, set(labels)))
    return chosen


@pytest.mark.parametrize(("title", "expression"), list(queries()), ids=lambda text: str(text)[:40])
def test_a_query_asks_for_what_there_is(
    title: str, expression: str, metrics: dict[str, set[str]]
) -> None:
    named = metrics_in(expression)
    assert named, expression
    for name, labels in named:
        assert name in metrics, f"{title}: there is no {name}"
        assert labels - {"job"} <= metrics[name], f"{title}: {name} has no such labels"
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        for group in grouped:
            assert set(group.split(", ")) <= metrics[name], f"{title}: cannot be grouped so"
        if name.endswith(("_total", "_bucket", "_sum")):
            assert re.search(rf"(rate|increase)\({name}\b", expression), f"{title}: ever growing"


def test_a_query_for_what_there_is_not_would_be_found(metrics: dict[str, set[str]]) -> None:
    ((name, labels),) = metrics_in('sum(rate(dflash_moe_nothing_total{job="$job",x="y"}[5m]))')
    assert (name, labels) == ("dflash_moe_nothing_total", {"job", "x"})
    assert name not in metrics


def test_the_dashboard_shows_every_histogram_and_every_owner_counter_that_counts_trouble(
    metrics: dict[str, set[str]],
) -> None:
    shown = {name for _, expression in queries() for name, _ in metrics_in(expression)}
    troubles = (
        *("retries", "fallbacks", "restarts", "checksum_failures", "deadline_failures"),
        *("not_finite_replies", "wrong_replies"),
    )
    for trouble in troubles:
        assert f"{NAMESPACE}_owner_{trouble}_total" in shown
    histograms = histograms_of(metrics)
    assert f"{NAMESPACE}_owner_round_trip_seconds" in histograms
    for name in histograms:
        assert {f"{name}_bucket", f"{name}_sum"} & shown, name
    assert any(name.startswith("process_") for name in shown & set(metrics))


def test_quantiles_are_asked_of_the_buckets_of_histograms_and_keep_their_bounds(
    metrics: dict[str, set[str]],
) -> None:
    asked = [expression for _, expression in queries() if "quantile" in expression]
    assert len(asked) > 4
    for expression in asked:
        found = re.fullmatch(
            r"histogram_quantile\(0\.\d+, sum by \(le(?:, \w+)*\) \(rate\((\w+)_bucket\{.*\)\)\)",
            expression,
        )
        assert found is not None, expression
        assert found[1] in histograms_of(metrics), expression


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place: dict[str, Any] = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        taken = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        cells |= taken
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(panel["description"] for panel in PANELS)
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval"}
    assert used == names


def test_prometheus_asks_where_the_server_is() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8080"]}]
