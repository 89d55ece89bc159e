"""``doctor --measure`` prints a box for people and for programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_protocol.settings import Settings
from dflash_runtime.cli.main import cli
from dflash_runtime.engine.demo_model import demo_model_path
from dflash_runtime.placement.box import (
    AskedSpeed,
    Box,
    CopySpeed,
    Curve,
    DeviceSpeed,
    LinkSpeed,
    OffloadSpeed,
    Together,
)
from dflash_runtime.tools import doctor_measure
from dflash_runtime.tools.doctor_measure import MeasuredBox, measure

LINE = Curve(((0.0, 0.0), (1e6, 25e-6)))
BOX = Box(
    "k",
    {
        "cpu": DeviceSpeed("cpu", {1: LINE, 512: LINE}, {1: LINE}, {1: LINE}, {1: LINE}),
        "cuda:0": DeviceSpeed("cuda:0", {1: LINE}),
    },
    {"cpu0": LinkSpeed("cpu0", LINE, LINE)},
    {"cuda:0": CopySpeed("cuda:0", 2e10, 1e10, 0.0, 0.0, "gen 4 x8 of gen 5 x16")},
    (Together("experts of cpu", "steps of cuda:0", 1.5, 1.25),),
    {"cuda:0": LINE},
    {"cuda:0": AskedSpeed(LINE, LINE)},
    {
        "cuda:0": OffloadSpeed(
            "cuda:0",
            copies=Curve(((512.0, 0.04),)),
            after=Curve(((512.0, 2e-4),)),
            single=Curve(((512.0, 3e-4),)),
            grouped=Curve(((512.0, 1e-4),)),
        )
    },
    LINE,
)


def test_lines_name_what_was_measured() -> None:
    lines = MeasuredBox(Path("m.gguf"), BOX, 12.3).as_lines()
    text = "\n".join(lines)
    for part in (
        "m.gguf",
        "cpu",
        "cuda:0",
        "cpu0",
        "gen 4 x8 of gen 5 x16",
        "1.50",
        "25.0 us",
        "25.00 GB/s",
        "200.0 us",
        "300.0 us",
        "40.0 GB/s",
    ):
        assert part in text
    assert max(map(len, lines)) < 140


def test_a_box_of_little() -> None:
    assert MeasuredBox(Path("m.gguf"), Box("k", {}), 0.1).as_lines()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    calls: list[tuple[str, bool]] = []

    def box_of_machine(file: object, settings: Settings, *, measures_all: bool, **_: object) -> Box:
        calls.append((str(getattr(file, "path", "")), measures_all))
        return BOX

    monkeypatch.setattr(doctor_measure, "box_of_machine", box_of_machine)
    return calls


def test_the_model(asked: list[tuple[str, bool]], tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(demo_model_path().read_bytes())
    measure(str(copy), Settings())
    measure(None, Settings(model=str(copy)))
    measure("", Settings())
    assert asked == [(str(copy), True), (str(copy), True), (str(demo_model_path()), True)]


def test_links_to_daemons_are_added(
    asked: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor's is one of the box."""
    kept: list[Box] = []
    link = LinkSpeed("link0", LINE, LINE)
    monkeypatch.setattr(doctor_measure, "_links", lambda path, settings: {"link0": link})
    monkeypatch.setattr(doctor_measure, "keep_box", lambda box, folder: kept.append(box))
    measure(None, replace(Settings(), connect=("ipc:///tmp/away.sock",)))
    assert [set(each.links) for each in kept] == [{"cpu0", "link0"}]


@pytest.mark.parametrize("arguments", [[], [str(demo_model_path())]])
def test_the_command(asked: list[tuple[str, bool]], arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, ["doctor", "--measure", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)
    assert record["model"] == str(demo_model_path())
    assert record["devices"]["cpu"]["trunk"]["1"] == [[0.0, 0.0], [1e6, 25e-6]]
    result = CliRunner().invoke(cli, ["doctor", "--measure", *arguments])
    assert result.exit_code == 0
    assert "cuda:0" in result.output
