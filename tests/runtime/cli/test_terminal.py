"""Progress: clocks stand still once there is nothing left to do, and begin anew with each stage."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dflash_runtime.cli.terminal import Bars


class Shown:
    """Bars on a terminal that is a text, with a clock that goes on when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.console = Console(file=io.StringIO(), width=100, color_system=None)
        self.bars = Bars(console=self.console, clock=lambda: self.now_s)

    def lines(self) -> dict[str, str]:
        """What is shown of each owner: its stage and clock."""
        with self.console.capture() as captured:
            self.console.print(self.bars.progress.get_renderable())
        rows = [line.split() for line in captured.get().splitlines()]
        named = {next(each for each in row if each.endswith(":")): row for row in rows}
        return {
            owner.rstrip(":"): f"{row[row.index(owner) + 1]} {row[-1]}"
            for owner, row in named.items()
        }


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_the_clock_of_what_is_done_stands_still(shown: Shown) -> None:
    shown.bars.show({"parent": ("compile", 1, 2), "cpu0": ("connect", 0, 1)})
    shown.now_s = 3.0
    shown.bars.show({"parent": ("compile", 2, 2), "cpu0": ("connect", 0, 1)})
    shown.now_s = 10.0
    shown.bars.show({"parent": ("compile", 2, 2), "cpu0": ("ready", 1, 1)})
    assert shown.lines() == {"parent": "compile 0:00:03", "cpu0": "ready 0:00:10"}
    shown.now_s = 70.0
    shown.bars.show({"parent": ("compile", 2, 2), "cpu0": ("ready", 1, 1)})
    assert shown.lines() == {"parent": "compile 0:00:03", "cpu0": "ready 0:00:10"}


@pytest.mark.parametrize("after", [("load", 0, 1), ("load", 0, 7), ("load", 1, 7)])
def test_the_next_stage_is_not_taken_for_the_last_one(
    shown: Shown, after: tuple[str, int, int]
) -> None:
    shown.bars.show({"parent": ("compile", 1, 1)})
    shown.now_s = 5.0
    shown.bars.show({"parent": after})
    shown.now_s = 7.0
    assert shown.lines() == {"parent": "load 0:00:02"}
    shown.bars.show({"parent": ("load", after[2], after[2])})
    shown.now_s = 9.0
    assert shown.lines() == {"parent": "load 0:00:02"}
