"""What benches save of their results: the spread of samples or all of them, in short files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from bench.options import NOTHING, SAMPLES, SPREAD, add_save_option

from bench import report

RECORD: dict[str, Any] = {
    "what": "A bench",
    "date": "2026-11-21T09:36:04+00:00",
    "version": "0.1.0",
    "commit": "e81af91e79",
    "machine": "a machine",
    "seconds": {"ours": [0.5, 0.25, 1.0, 0.75, 1.25, 1.5], "few": [1 / 3, 2.0]},
    "tokens": [1, 2, 3, 4, 5, 6],
    "rounds": [{"quiet_us": 10.0 * n, "flood_us": n} for n in range(1, 6)],
    "memory": [[n, 0.5] for n in range(5)],
    "texts": [{"ms": 1.0, "after": "kill"}] * 5,
}


def test_samples_become_their_spread_and_all_else_stays() -> None:
    kept = report.spreads(RECORD)
    assert kept["seconds"] == {
        "ours": {
            "samples": 6,
            "smallest": 0.25,
            "p25": 0.5625,
            "median": 0.875,
            "p75": 1.1875,
            "largest": 1.5,
        },
        "few": [0.33333, 2.0],
    }
    assert (kept["tokens"], kept["texts"]) == (RECORD["tokens"], RECORD["texts"])
    assert kept["rounds"].keys() == RECORD["rounds"][0].keys()
    assert [kept["rounds"][key]["median"] for key in kept["rounds"]] == [30.0, 3]
    assert [column["largest"] for column in kept["memory"]] == [4, 0.5]


def test_a_spread_of_a_spread_is_the_same() -> None:
    kept = report.spreads(RECORD)
    assert report.spreads(kept) == kept


@pytest.mark.parametrize("depth", [0, 3])
def test_the_text_of_a_record_is_json_of_few_lines(depth: int) -> None:
    record: Any = RECORD | {"flags": [f"-DGGML_OPTION_{n}=ON" for n in range(40)]}
    for _ in range(depth):
        record = {"parts": [record]}
    text = report.as_text(record)
    assert json.loads(text) == record
    usual = json.dumps(record, indent=1)
    assert len(text.splitlines()) < len(usual.splitlines()) / 2
    assert max(map(len, text.splitlines())) <= 141


def test_numbers_as_names_are_written_as_json_has_them() -> None:
    record = {layer: [*range(80)] for layer in range(3)}
    assert json.loads(report.as_text(record)) == {str(layer): [*range(80)] for layer in record}


@pytest.mark.parametrize(
    ("arguments", "default", "how"),
    [
        ([], NOTHING, NOTHING),
        (["--save"], NOTHING, SPREAD),
        (["--save", "samples"], NOTHING, SAMPLES),
        ([], SPREAD, SPREAD),
        (["--save", "none"], SPREAD, NOTHING),
    ],
)
def test_what_is_saved_is_chosen(
    arguments: list[str],
    default: str,
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parser = argparse.ArgumentParser()
    add_save_option(parser, default)
    options = parser.parse_args(arguments)
    assert options.save == how
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    report.save("a-bench", RECORD, "| a table |", options.save)
    files = sorted(tmp_path.rglob("a-bench-*"))
    if how == NOTHING:
        assert not files
        return
    as_json, as_markdown = files
    kept = json.loads(as_json.read_text())
    assert kept == (RECORD if how == SAMPLES else report.spreads(RECORD))
    assert as_markdown.read_text().startswith("# A bench\n\n2026-11-21T09:36:04+00:00, version")
    assert as_markdown.read_text().endswith("| a table |\n")
