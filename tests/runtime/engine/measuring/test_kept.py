"""Kept boxes come back as they were; a file that is anything else counts as absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_runtime.engine.measuring.kept import (
    box_as_json,
    box_from_json,
    box_record,
    drop_box,
    keep_box,
    kept_box,
)
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

LINE = Curve(((0.0, 0.0), (1e6, 2.5e-5)))
POINT = Curve(((1.0, 1e-6),))
BOX = Box(
    "k" * 32,
    {"cpu": DeviceSpeed("cpu", {1: LINE, 512: LINE}, {1: POINT}, {1: POINT}, {8: LINE})},
    {"cpu0": LinkSpeed("cpu0", POINT, LINE, by_device=True)},
    {"cuda:0": CopySpeed("cuda:0", 2e10, 1e10, 3e9, 1e10, "gen 4 x8 of gen 5 x16")},
    (Together("experts of cpu", "copies to cuda:0", 1.5, 1.25),),
    {"cuda:0": LINE},
    {"cuda:0": AskedSpeed(LINE, POINT, layer_s=1e-6, step_s=2e-6)},
    {"cuda:0": OffloadSpeed("cuda:0", LINE, POINT, LINE, POINT, 2e-4)},
    POINT,
)


def test_a_box_comes_back(tmp_path: Path) -> None:
    for box in (BOX, Box("k", {})):
        place = keep_box(box, str(tmp_path))
        assert place is not None
        assert kept_box(box.key, str(tmp_path)) == box
    assert kept_box("other", str(tmp_path)) is None
    for _ in range(2):
        drop_box("k", str(tmp_path))
        assert kept_box("k", str(tmp_path)) is None
    assert kept_box(BOX.key, str(tmp_path)) == BOX


def test_a_box_of_another_key_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = keep_box(BOX, str(tmp_path))
    assert place is not None
    place.rename(place.with_name(f"box-{'j' * 32}.json"))
    assert kept_box("j" * 32, str(tmp_path)) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"


def test_a_damaged_file_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = keep_box(BOX, str(tmp_path))
    assert place is not None
    content = place.read_bytes()
    for damaged in (
        b"",
        content[: len(content) // 2],
        b"\xff\n\x1b[2J",
        b"[" * 100_000,
        b"7" * (2 << 20),
    ):
        place.write_bytes(damaged)
        caplog.clear()
        assert kept_box(BOX.key, str(tmp_path)) is None
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert "\n" not in record.getMessage()


def test_a_folder_that_cannot_be_written_to_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "file"
    folder.write_text("")
    assert keep_box(BOX, str(folder)) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(folder) in record.getMessage()


def places(record: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values within a record."""
    found = [path] if path else []
    if isinstance(record, dict | list):
        keys = record if isinstance(record, dict) else range(len(record))
        for key in keys:
            found += places(record[key], (*path, key))
    return found


def is_refused(record: Any) -> bool:
    try:
        box_from_json(json.dumps(record).encode())
    except ValueError:
        return True
    return False


RECORD = json.loads(box_as_json(BOX))
WRONG: tuple[Any, ...] = (
    None,
    -1,
    1e999,
    float("nan"),
    "x",
    [],
    {},
    True,
    [[1, 2], [1, 2]],
    [[1]],
    10**400,
    "y" * 300,
)


@given(st.sampled_from(places(RECORD)), st.sampled_from(WRONG))
def test_any_wrong_value_is_refused_or_means_what_it_says(
    path: tuple[Any, ...], wrong: Any
) -> None:
    record = json.loads(box_as_json(BOX))
    parent = record
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = wrong
    text = json.dumps(record).encode()
    try:
        box = box_from_json(text)
    except ValueError:
        return
    assert json.loads(json.dumps(box_record(box))) == json.loads(
        json.dumps(box_record(box_from_json(text)))
    )
    for device in box.devices.values():
        for curve in device.experts.values():
            assert all(seconds >= 0.0 for _, seconds in curve.points)


@pytest.mark.parametrize("missing", sorted(RECORD))
def test_a_missing_field_is_refused(missing: str) -> None:
    record = {name: value for name, value in RECORD.items() if name != missing}
    assert is_refused(record)


def test_lists_are_bounded() -> None:
    record = {**RECORD, "disk": [[float(i), 1.0] for i in range(257)]}
    assert is_refused(record)
