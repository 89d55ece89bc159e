"""``dflash-moe bench``: its table, its records, and its screens."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest

from dflash_runtime.cli.main import main
from support.hostile_texts import HOSTILE, assert_harmless
from support.processes import ROOT, cli_command, run_main
from support.random_gguf import write_model
from support.random_models import Qwen3MoeShape
from support.terminals import terminal

SHAPE = Qwen3MoeShape(num_layers=1, num_experts=4, num_experts_used=2, vocab_size=300)
FEW = ["-p", "8", "-n", "4", "-d", "0,5", "-r", "2", "--backend", "reference"]
PAGE = ROOT / "docs" / "command-line.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    keys = {"general.name": f"a `![x](http://y)` {HOSTILE}"}
    return write_model(path, SHAPE, seed=1, tokenizer="bytes", keys=keys)


def test_the_table_is_markdown_with_model_and_machine(model: Path) -> None:
    done = run_main(main, "bench", model, *FEW)
    assert done.returncode == 0, done.stderr
    assert_harmless(done.stdout)
    lines = done.stdout.splitlines()
    head, (names, rule, *rows) = lines[: lines.index("")], lines[lines.index("") + 1 :]
    assert all(line.startswith("- ") for line in head)
    assert re.fullmatch(r"- `a '!\[x\]\(http://y\)' .*` \(qwen3moe\), 0 MiB; experts .*", head[1])
    assert "local 4" in head[-1]
    assert re.fullmatch(r"\| test +\| +tokens/s \|", names)
    assert re.fullmatch(r"\| -+ \| -+: \|", rule)
    assert [row.split("|")[1].strip() for row in rows] == ["pp8", "tg4", "tg4 @ d5"]
    assert all(re.search(r"\| +\d+\.\d ± \d+\.\d \|$", row) for row in rows)
    assert {len(line) for line in (names, rule, *rows)} == {37}


def test_records_have_every_run(model: Path) -> None:
    done = run_main(main, "bench", model, *FEW, "--json")
    record = json.loads(done.stdout)
    assert record["arch"] == "qwen3moe"
    assert record["owners"] == {"local": {"kind": "local", "experts": 4}}
    assert [each["test"] for each in record["tests"]] == ["pp8", "tg4", "tg4 @ d5"]
    for each in record["tests"]:
        assert len(each["tok_s"]) == 2
        assert each["mean_tok_s"] == pytest.approx(sum(each["tok_s"]) / 2)
    done = run_main(main, "bench", model, *FEW, "--csv")
    assert_harmless(done.stdout)
    first, *others = csv.DictReader(io.StringIO(done.stdout))
    assert (first["test"], first["prompt"], first["written"]) == ("pp8", "8", "0")
    assert float(first["mean_tok_s"]) > 0
    assert len(others) == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--json", "--csv"], "--json and --csv exclude each other"),
        (["-p", "0", "-n", "0"], "nothing is to be measured: -p and -n are 0"),
        (["-p", "1,x"], r"-p '1,x': must be numbers from 0 to 16777216, with commas"),
        (["-p", "1,,2"], "-p '1,,2': must be numbers"),
        (["-n", "16777217"], "-n '16777217': must be numbers"),
        (["-d", "٣"], "-d '٣': must be numbers"),
        (["-n", "9" * 5000], "-n '9{40}': must be numbers"),
        (["-p", ",".join(["1"] * 33)], "-p: 33 numbers, allowed are 32"),
        (["-r", "0"], ".*0 is not in the range"),
        (["-p", "999999"], "pp999999 needs 999999 tokens of context, of which there are"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_one_line(
    model: Path, arguments: list[str], reason: str
) -> None:
    done = run_main(main, "bench", model, *arguments, "--backend", "reference")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"dflash-moe: error: {reason}.*\n", done.stderr)


def shape_of(screen: str) -> list[str]:
    """The words of a screen without numbers, machine and line breaks."""
    table = screen[screen.index("| test") :]
    return re.sub(r"[0-9]+\.[0-9]+", "N", table).split()


@pytest.mark.slow
def test_the_screens_of_the_page_are_of_this_program() -> None:
    section = PAGE.read_text().partition("## Rates\n")[2]
    screens = re.findall(r"```text\n(.*?)\n```", section, re.DOTALL)
    for columns, shown in zip((80, 40), screens, strict=True):
        command = [*cli_command(), "bench", "-p", "512", "-n", "64", "-d", "0,512", "-r", "1"]
        with terminal(command, columns=columns, rows=30, NO_COLOR="1") as opened:
            assert opened.wait_for_end(300) == 0
            screen = opened.text()
            assert b"\x1b" not in opened.written
        assert max(map(len, screen.splitlines())) <= columns
        assert shape_of(screen) == shape_of(shown)
        assert screen.startswith("- dflash-moe ")
