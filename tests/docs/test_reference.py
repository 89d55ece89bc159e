"""docs/reference-logs-and-metrics.md names every line, event and metric, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from dflash_protocol.ids import Phase
from dflash_runtime.engine.engine import EngineStats
from dflash_runtime.experts.breaker import BreakerState
from dflash_runtime.experts.compute import OwnerKind, OwnerStats
from dflash_runtime.serving.metrics import NAMESPACE, Metrics
from support.message_templates import Line, lines_of, normalised, sources, template_of
from support.processes import ROOT

REFERENCE = (ROOT / "docs" / "reference-logs-and-metrics.md").read_text()
_LEAST_CHARACTERS = 8
"""Pieces of errors that are shorter say nothing."""
_METRIC_ENDINGS = ("_bucket", "_count", "_sum")


def table(section: str) -> list[list[str]]:
    """Cells of the rows of a section's table."""
    text = REFERENCE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[1:]]


def written_lines() -> list[Line]:
    return [line for path in sources() for line in lines_of(path)]


def documented_lines() -> dict[str, tuple[str, str]]:
    """Level and program of each line, by its text as `message_templates` writes it."""
    found = {normalised(text.strip("`")): (level, of) for text, level, of, _ in table("Log lines")}
    assert len(found) == len(table("Log lines"))
    return found


def test_every_line_that_is_logged_or_said_is_explained_and_no_other() -> None:
    written = {line.text: line.where for line in written_lines()}
    documented = documented_lines()
    assert [f"{where}: {text}" for text, where in written.items() if text not in documented] == []
    assert [text for text in documented if text not in written] == []


def test_levels_and_programs_are_those_of_the_code() -> None:
    documented = documented_lines()
    for line in written_lines():
        level, program = documented.get(line.text, ("", ""))
        assert level in ("", line.level or "-"), line
        if "/experts/" in line.where or "/serving/" in line.where:
            assert program in ("", "parent"), line
        if line.package == "dflash_daemon":
            assert program in ("", "daemon") or (level, program) == ("-", "both"), line


def test_what_is_no_literal_cannot_slip_through(tmp_path: Path) -> None:
    folder = tmp_path / "protocol" / "dflash_protocol"
    folder.mkdir(parents=True)
    path = folder / "some.py"
    for call, expected in (
        ('_LOG.warning("a %s of %.1f", 1, 2)', [("a … of …", "warning")]),
        ('_LOG.debug("nobody asked")', []),
        ('_LOG.log(level, "either")', [("either", "any")]),
        ('log.exception(f"{x}: lost")', [("…: lost", "error")]),
        ('x = f"{a} by {b}"\n_LOG.info("%s", x)', [("… by …", "info")]),
        ('print(f"dflash-daemon: at {x}")', [("at …", "")]),
        ("say(other)", []),
    ):
        path.write_text(call)
        found = lines_of(path, root=tmp_path)
        assert [(line.text, line.level) for line in found] == expected, call
    path.write_text("_LOG.error(text)")
    with pytest.raises(ValueError, match=r"some\.py:1"):
        list(lines_of(path, root=tmp_path))


def test_the_words_of_every_error_are_in_the_code() -> None:
    templates = {
        template
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.expr) and (template := template_of(node))
    }
    errors = table("Errors")
    assert len(errors) > 10
    for text, _ in errors:
        pieces = [piece.strip(" :") for piece in normalised(text.strip("`")).split("…")]
        pieces = [piece for piece in pieces if len(piece) >= _LEAST_CHARACTERS]
        assert pieces, text
        for piece in pieces:
            assert any(piece in template for template in templates), (text, piece)


def events() -> Iterator[str]:
    """Kinds of events that links report."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
            if name not in ("_on_event", "note", "mark_absent"):
                continue
            assert isinstance(node, ast.Call)
            kind = template_of(node.args[0])
            if kind == "breaker_…":
                yield from (f"breaker_{state.name.lower()}" for state in BreakerState)
            elif kind is not None:
                yield kind


def test_every_event_is_explained_and_no_other() -> None:
    assert {name.strip("`") for name, _ in table("Events")} == set(events())


def families() -> Iterator[Metric]:
    """All that a server has, each with every label that it may have."""
    metrics, owner = Metrics(), OwnerStats(OwnerKind.DAEMON, num_experts=1)
    owner.of_phase(Phase.DECODE).round_trips.add(1e-3)
    stats = EngineStats(owners={"cpu": owner}, events=[], selections={})
    metrics.watch_engine(lambda: stats)
    metrics.watch_queue(lambda: 0)
    metrics.count_owners(stats.owners)
    metrics.http_requests.labels("/ready", "200").inc()
    metrics.rejected.labels("queue_full").inc()
    metrics.finished.labels("stop").inc()
    for family in text_string_to_metric_families(metrics.text().decode()):
        if family.name.startswith(NAMESPACE):
            yield family


def test_every_metric_is_explained_with_its_kind_and_labels_and_no_other() -> None:
    expected = {}
    for family in families():
        name = family.name.removeprefix(f"{NAMESPACE}_")
        name += "_total" if family.type == "counter" else ""
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        expected[name] = (family.type, labels)
    documented = {}
    for cell, kind, _ in table("Metrics"):
        name, _, listed = cell.strip("`}").partition("{")
        documented[name] = (kind, set(filter(None, listed.split(","))))
    assert documented == expected


def test_metrics_that_are_named_elsewhere_exist() -> None:
    known = {
        sample.name.removeprefix(f"{NAMESPACE}_")
        for family in families()
        for sample in family.samples
    }
    known |= {each.removesuffix(ending) for each in known for ending in _METRIC_ENDINGS}
    for path in sorted((ROOT / "docs").glob("*.md")):
        named = set(re.findall(rf"\b{NAMESPACE}_([a-z0-9_]+)", path.read_text()))
        named -= {"adapters", "daemon", "protocol", "runtime"}
        assert named - {""} <= known, path.name
    named = set(re.findall(r"`(owner_[a-z_]+)", (ROOT / "docs" / "operations.md").read_text()))
    assert named
    assert named <= known


@pytest.mark.parametrize("section", ["Log lines", "Errors", "Events", "Metrics"])
def test_tables_are_sorted(section: str) -> None:
    names = [row[0].strip("`").casefold() for row in table(section)]
    assert len(names) > 3
    for before, after in pairwise(names):
        assert before < after
