"""Small files: read up to a bound, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_protocol.errors import SettingsError
from dflash_protocol.process.text_files import read_file, write_file


def test_what_is_written_is_read_up_to_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file("some file", path, "1234")
    assert read_file("some file", path, limit_bytes=4) == b"1234"
    with pytest.raises(SettingsError, match=f"some file {path}.* 0 MiB"):
        read_file("some file", path, limit_bytes=3)
    write_file("some file", path, "")
    assert read_file("some file", path, limit_bytes=0) == b""


def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file or directory"):
        read_file("some file", tmp_path / "nothing", limit_bytes=1)
    with pytest.raises(SettingsError, match="Is a directory"):
        read_file("some file", tmp_path, limit_bytes=1)
    with pytest.raises(SettingsError, match=r"some file a\\nb\\x00: .*null byte"):
        read_file("some file", Path("a\nb\0"), limit_bytes=1)


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("missing/file", "folder", "a" * 300):
        with pytest.raises(SettingsError, match=r"No such file|Is a directory|name too long"):
            write_file("some file", tmp_path / name, "text")
    with pytest.raises(SettingsError, match="null byte"):
        write_file("some file", Path("a\0"), "text")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_what_was_there_stays_if_writing_fails_half_way(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(SettingsError, match="some file"):
        write_file("some file", path, "new \ud800")  # no text: it cannot be encoded
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_writing_keeps_the_mode_and_the_link_of_what_was_there(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_file("some file", link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600


def test_a_pipe_can_be_written_to_and_read_from() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end), os.fdopen(write_end, "w") as writer:
        write_file("some file", Path(f"/proc/self/fd/{write_end}"), "text")
        writer.close()
        assert read_file("some file", Path(f"/proc/self/fd/{read_end}"), limit_bytes=9) == b"text"
