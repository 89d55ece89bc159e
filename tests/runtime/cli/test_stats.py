"""What `dflash-moe stats` shows of heat files: rows of layers, sums, owners, JSON and the older
CSV."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dflash_protocol.errors import SettingsError
from dflash_protocol.hotness import read_hotness
from dflash_runtime.cli.stats import stats
from dflash_runtime.placement.heat import HalfLives, Heat, HeatLayer
from dflash_runtime.placement.heat_file import HeatFile

LAYERS = tuple(HeatLayer(layer_id, 64, 2) for layer_id in (1, 2, 3))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Layer 1 chooses two experts, layer 2 all alike, layer 3 has never reported."""
    heat = Heat(LAYERS, HalfLives())
    counts = np.zeros(heat.shape, np.int64)
    counts[0, 0, [5, 6]] = 960
    counts[1, 0, [5, 6]] = 320
    counts[0, 1], counts[1, 1] = 30, 10
    heat.add(counts)
    heat.add_pairs({"local": [3000, 0], "cpu0": [0, 1000], "\x1b[31mred": [0, 1]})
    path = tmp_path / "m.gguf.heat"
    path.write_bytes(HeatFile(heat, 5, "ab" * 32, "a \x1b[31m model").as_bytes())
    return path


def result_of(path: Path, *options: str | Path, **environment: str) -> Result:
    result = CliRunner(env=environment).invoke(
        stats, [str(path), *map(str, options)], catch_exceptions=False
    )
    assert result.exit_code == 0
    return result


def test_layers_are_rows_with_their_sums(path: Path) -> None:
    output = result_of(path, COLUMNS="130").output
    assert "\x1b" not in output
    lines = output.splitlines()
    assert "1,280 tokens, 5,120 selections" in lines[1]
    # Of 2 x 1280 selections in layer 1, and 64 x 40 in layer 2.
    assert "of 192: 2 take 50%, 41 take 80%, 54 take 90%" in lines[2]
    assert "1 layer never reported" in lines[3]
    first, second, third = (line for line in lines if line[:5].strip() in ("1", "2", "3"))
    assert first.split()[-5:] == ["1,280", "100%", "1", "2", "2"]
    assert second.split()[-5:] == ["1,280", "11%", "32", "52", "58"]
    assert third.split() == ["3", "never", "reported"]
    cells = first[7 : 7 + 64]
    assert [index for index, cell in enumerate(cells) if cell != " "] == [5, 6]
    assert len(set(second[7 : 7 + 64])) == 1
    assert [line.split()[0] for line in lines[-3:-1]] == ["local", "cpu0"]


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_rows_fit_the_terminal(path: Path, width: int) -> None:
    lines = result_of(path, COLUMNS=str(width)).output.splitlines()
    rows = [line for line in lines if line[:5].strip() in ("layer", "1", "2", "3")]
    assert len(rows) == 4
    assert max(map(len, rows)) <= max(width, 55)


def test_a_phase_can_be_shown_alone(path: Path) -> None:
    assert "960 tokens of prompts, 3,840 selections" in result_of(path, "--phase", "prefill").output
    output = result_of(path, "--phase", "Decode").output
    assert "320 tokens written, 1,280 selections" in output
    assert "local" in output


def test_json_has_all_of_it(path: Path) -> None:
    record = json.loads(result_of(path, "--json").output)
    assert record["tokens"] == 1280
    assert record["identity"] == "ab" * 32
    assert (record["experts_for_50"], record["experts_for_80"]) == (2, 41)
    assert record["owners"]["local"] == {"prefill": 3000, "decode": 0}
    first, second, third = record["layers"]
    assert first["selections"][4:8] == [0, 1280, 1280, 0]
    assert (first["experts_for_50"], first["experts_for_90"]) == (1, 2)
    assert second["hottest_tenth"] == pytest.approx(7 / 64)
    assert (third["reported"], third["selections"], third["experts_for_50"]) == (False, None, None)


def test_counts_are_exported_as_csv_and_shown_again(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "hotness.csv"
    assert result_of(path, "--csv", out).output == ""
    hotness = read_hotness(out, num_layers=5, num_experts=64)
    assert hotness.num_experts_used == 2
    assert hotness.counts.sum(axis=1).tolist() == [0, 2560, 2560, 0, 0]
    assert "1,280 tokens, 5,120 selections" in result_of(out).output


def test_what_cannot_be_shown_is_an_error_in_one_line(path: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    for arguments in (
        [str(tmp_path / "none")], [str(path), "--csv", str(tmp_path / "no" / "folder")],
        [str(path), "--json", "--csv", "x"], [str(path), "--phase", "decode", "--csv", "x"],
    ):  # fmt: skip
        error = runner.invoke(stats, arguments).exception
        assert isinstance(error, SettingsError)
        assert "\n" not in str(error)
    assert runner.invoke(stats, [str(path), "--phase", "x"]).exit_code == 2


def test_a_file_without_any_selections_says_so(tmp_path: Path) -> None:
    path = tmp_path / "empty.heat"
    path.write_bytes(HeatFile(Heat(LAYERS, HalfLives()), 5, "ab" * 32, "m").as_bytes())
    output = result_of(path).output
    assert "0 tokens, 0 selections" in output
    assert "3 layers never reported" in output
    assert json.loads(result_of(path, "--json").output)["experts_for_90"] == 0


def test_a_terminal_gets_colours(path: Path) -> None:
    environment = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "120"}
    assert "\x1b[48;5;" in result_of(path, **environment).output
    assert "\x1b" not in result_of(path, **environment, NO_COLOR="1").output
