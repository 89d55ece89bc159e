"""Files that are kept with a model: read from where they were written last, written where it is
possible."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import Settings
from dflash_runtime.engine.kept_files import (
    HEAT_SUFFIX,
    PLAN_SUFFIX,
    kept_places,
    newest_first,
    write_first,
)


def test_places(tmp_path: Path) -> None:
    settings, model = Settings(cache_dir=str(tmp_path / "cache")), tmp_path / "m.gguf"
    beside, cached = kept_places(model, settings, PLAN_SUFFIX)
    assert beside == tmp_path / "m.gguf.plan"
    assert cached.is_relative_to(tmp_path / "cache")
    named = replace(settings, heat=str(tmp_path / "it"))
    assert kept_places(model, named, HEAT_SUFFIX) == (tmp_path / "it",)
    assert kept_places(model, named, PLAN_SUFFIX) == (tmp_path / "it.plan",)
    assert kept_places(model, replace(settings, heat="off"), PLAN_SUFFIX) == ()


def test_the_file_that_was_written_last_is_the_first(tmp_path: Path) -> None:
    old, new, folder, none = (tmp_path / name for name in ("old", "new", "folder", "none"))
    for seconds, place in ((1, old), (2, new)):
        place.write_text("")
        os.utime(place, (seconds, seconds))
    folder.mkdir()
    places = [folder, none, old, new, old / "beside"]
    assert newest_first("plan", places) == [new, old]
    with pytest.raises(SettingsError, match="not a file"):
        newest_first("plan", [folder], is_named=True)


def test_what_one_place_does_not_take_another_does(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "made" / "also" / "file"
    folder.mkdir()
    assert write_first("plan", [folder, file], "content") == ""
    assert file.read_text() == "content"
    assert "folder" in write_first("plan", [folder], "content")
    assert write_first("plan", [], "content") == ""


@pytest.mark.parametrize(
    "path", ["hub/models--own--M/snapshots/abc/M-Q4_K_M.gguf", "ollama/blobs/sha256-0123"]
)
def test_nothing_is_kept_beside_files_of_other_programs(tmp_path: Path, path: str) -> None:
    model = tmp_path / path
    model.parent.mkdir(parents=True)
    settings = Settings(cache_dir=str(tmp_path / "cache"))
    (place,) = kept_places(model, settings, HEAT_SUFFIX)
    assert place.parent == tmp_path / "cache" / "heat"
    assert write_first("heat", [place], b"counts") == ""
    assert list(model.parent.iterdir()) == []
