"""Tables of docs/ that are written from the code are those of the code as it is now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tooling import docs
from tooling.tables import merged, metric_families
from tooling.written_lines import Line, lines_of

from dflash_runtime.serving.metrics import NAMESPACE
from support.processes import ROOT

_METRIC_ENDINGS = ("_bucket", "_count", "_sum")


def test_tables_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["--check"]) == 0, capsys.readouterr().out


def test_a_stale_table_is_reported_and_then_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in docs.DOCS.glob("*.md"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(docs, "DOCS", tmp_path)
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    stale = tmp_path / "operations.md"
    kept = stale.read_text()
    stale.write_text(kept.replace("| `--port` |", "| `--other` |"))
    assert docs.main(["--check"]) == 1
    assert "operations.md is out of date: run make docs" in capsys.readouterr().out
    assert docs.main([]) == 0
    assert stale.read_text() == kept
    stale.write_text("no tables")
    assert docs.main(["--check"]) == 1
    assert "no document has the table of settings" in capsys.readouterr().err


def package(tmp_path: Path) -> Path:
    """A module to be, of a package of the product."""
    folder = tmp_path / "protocol" / "dflash_protocol"
    folder.mkdir(parents=True)
    return folder / "some.py"


def test_lines_are_found_wherever_they_are_written(tmp_path: Path) -> None:
    path = package(tmp_path)
    for call, expected in (
        ('_LOG.warning("a %s of %.1f", one.size, 2)', [("a SIZE of N", "warning")]),
        ('_LOG.info("%s %d", *(str(error), 1))', [("REASON N", "info")]),
        ('_LOG.debug("not shown")', []),
        ('_LOG.log(level, "either")', [("either", "any")]),
        ('log.exception(f"{x}: lost")', [("X: lost", "error")]),
        ('x = f"{a} by {b}"\n_LOG.info("%s", x)', [("A by B", "info")]),
        ('print(f"dflash-daemon: at {x}")', [("at X", "-")]),
        ("say(other)", []),
        ('say(f"in {num_left} {x + 1}")', [("in N …", "-")]),
        ('raise Error(f"not documented {x}")', []),
    ):
        path.write_text(call)
        found = lines_of(path, root=tmp_path)
        assert [(line.text, line.level) for line in found] == expected, call
    path.write_text("_LOG.error(text)")
    with pytest.raises(ValueError, match=r"some\.py:1"):
        list(lines_of(path, root=tmp_path))


def test_a_comment_above_says_what_a_line_or_an_error_means(tmp_path: Path) -> None:
    path = package(tmp_path)
    path.write_text(
        "# Of the code.\n# docs: it is full,\n# or gone\n_LOG.info('no room')\n"
        "raise Error(\n    # docs (daemon): too old\n    f'{name} is '\n    'of 1999',\n)\n"
    )
    line, error = lines_of(path, root=tmp_path)
    assert (line.text, line.meaning, line.program) == ("no room", "it is full, or gone", "")
    assert (error.text, error.meaning, error.program) == ("NAME is of 1999", "too old", "daemon")
    assert (line.level, error.level) == ("info", "")
    path.write_text("# docs: of what?\nx = 1\n")
    with pytest.raises(ValueError, match=r"some\.py:2: nothing follows"):
        list(lines_of(path, root=tmp_path))


def line(meaning: str, level: str = "info", program: str = "") -> Line:
    return Line("lost N", "lost …", level, program, meaning, "some.py:1")


def test_places_that_write_the_same_are_one_line_that_one_of_them_explains() -> None:
    [one] = merged([line("gone", program="parent"), line("", "warning", "daemon"), line("")])
    assert (one.meaning, one.level, one.program) == ("gone", "any", "both")
    assert merged([line("gone", program="parent"), line("")])[0].program == "parent"
    for unclear in ([line("")], [line("gone"), line("gone")]):
        with pytest.raises(ValueError, match="say what the line means in one comment"):
            merged(unclear)


def test_metrics_that_documents_name_exist() -> None:
    known = {
        sample.name.removeprefix(f"{NAMESPACE}_")
        for family in metric_families()
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
