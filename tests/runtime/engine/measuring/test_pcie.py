"""The PCIe link is what sysfs says, or unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_runtime.engine.measuring.pcie import pcie_link

FILES = "current_link_speed", "current_link_width", "max_link_speed", "max_link_width"


def written(root: Path, *values: str) -> Path:
    folder = root / "sys/bus/pci/devices/0000:b1:00.0"
    folder.mkdir(parents=True)
    for name, value in zip(FILES, values, strict=True):
        (folder / name).write_text(value + "\n")
    return root


@pytest.mark.parametrize("bus_id", ["0000:b1:00.0", "00000000:B1:00.0", "b1:00.0"])
def test_a_link_that_is_slower_than_it_could_be(tmp_path: Path, bus_id: str) -> None:
    root = written(tmp_path, "16.0 GT/s PCIe", "8", "32.0 GT/s PCIe", "16")
    assert pcie_link(bus_id, root) == "gen 4 x8 of gen 5 x16"


def test_a_link_at_its_best(tmp_path: Path) -> None:
    root = written(tmp_path, "32.0 GT/s PCIe", "16", "32.0 GT/s PCIe", "16")
    assert pcie_link("0000:b1:00.0", root) == "gen 5 x16"


@pytest.mark.parametrize(
    "values",
    [
        ("Unknown", "0", "Unknown", "0"),
        ("17.3 GT/s PCIe", "8", "", "x"),
        ("16.0 GT/s PCIe", "²", "8.0 GT/s", "999"),
        ("\x00" * 500, "-1", "\xff", ""),
    ],
)
def test_anything_else_is_unknown(tmp_path: Path, values: tuple[str, ...]) -> None:
    assert pcie_link("0000:b1:00.0", written(tmp_path, *values)) == ""


@pytest.mark.parametrize("bus_id", ["", "../../etc", "0000:b1:00.9", "0000:b2:00.0", "n/a"])
def test_a_device_that_is_not_there_is_unknown(tmp_path: Path, bus_id: str) -> None:
    root = written(tmp_path, "16.0 GT/s PCIe", "8", "32.0 GT/s PCIe", "16")
    assert pcie_link(bus_id, root) == ""
