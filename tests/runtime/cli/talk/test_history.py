"""What was typed is found again, by its owner alone; a damaged file costs only its lines."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import SettingsError
from dflash_runtime.cli.talk.history import TypedTexts


def found(path: Path) -> list[str]:
    """The texts, oldest first."""
    return [*TypedTexts(path).load_history_strings()][::-1]


def test_texts_are_found_again_whatever_they_hold(tmp_path: Path) -> None:
    path = tmp_path / "h"
    texts = ["one", "two\nlines", '"quotes" \\ \x1b[2J', "\ud800 alone", "größe 漢字"]
    first, second = TypedTexts(path), TypedTexts(path)
    for text in texts[:3]:
        first.append_string(text)
    for text in texts[3:]:
        second.append_string(text)
    assert found(path) == texts
    assert first.get_strings() == texts[:3]


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "h"
    old = os.umask(0)
    try:
        TypedTexts(path).append_string("x")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    TypedTexts(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_became_large_is_shortened_to_the_latest(tmp_path: Path) -> None:
    path = tmp_path / "h"
    path.write_text("".join(f'"{number:04d} {"x" * 995}"\n' for number in range(3000)))
    texts = found(path)
    assert 300 < len(texts) < 1000
    assert texts[-1].startswith("2999 ")
    assert path.stat().st_size <= 1 << 19
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert found(path) == texts


def test_a_text_that_is_too_long_is_not_kept(tmp_path: Path) -> None:
    history = TypedTexts(tmp_path / "h")
    history.append_string("x" * 100_000)
    assert found(tmp_path / "h") == []
    assert history.get_strings() == ["x" * 100_000]


@given(st.binary(max_size=200))
def test_damaged_lines_are_left_out(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("history") / "h"
    path.write_bytes(b'"before"\n' + data + b'\n"after"\n[1]\n{"a":1}\n' + b"[" * 100_000 + b'\n"')
    texts = found(path)
    assert texts[0] == "before"
    assert texts[-1] == "after"


def test_what_is_no_file_of_ours_is_refused_with_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("pipe", "link", "no/folder", "a\0b", "."):
        with pytest.raises(SettingsError, match=r"^chat history ") as caught:
            TypedTexts(tmp_path / name)
        assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "elsewhere").exists()


def test_a_text_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    history = TypedTexts(folder / "h")
    (folder / "h").unlink()
    folder.rmdir()
    history.append_string("x")
    assert history.get_strings() == ["x"]
