"""Paths of sockets: only we and root may decide what is found there."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from dflash_protocol.errors import SettingsError
from dflash_protocol.process.private_path import exists_privately

STRANGER = 54321


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "ours"
    folder.mkdir(mode=0o700)
    return folder


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a path belong to another account: change it or, if we may not, who we are."""
    if os.getuid() == 0:
        os.lchown(path, STRANGER, STRANGER)
    else:
        monkeypatch.setattr(os, "getuid", lambda: STRANGER)


def is_there(path: Path) -> bool:
    return exists_privately(path, "endpoint X")


def assert_refused(path: Path, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason) as caught:
        is_there(path)
    assert str(caught.value).startswith("endpoint X: ")
    assert len(str(caught.value).splitlines()) == 1


def test_a_folder_of_ours_will_do_whether_or_not_a_socket_is_there(folder: Path) -> None:
    path = folder / "cpu.sock"
    assert is_there(path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        assert is_there(path)
    assert is_there(Path("/proc/version")), "root's"


def test_a_folder_that_is_missing_is_no_error_yet(folder: Path) -> None:
    assert not is_there(folder / "later" / "cpu.sock")
    assert not is_there(folder / "later" / "still" / "cpu.sock")


def test_a_folder_of_another_account_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_away(folder, monkeypatch)
    assert_refused(folder / "cpu.sock", r"folder .*\buser \d+\b.*folder")
    assert_refused(folder / "deeper" / "cpu.sock", r"\buser \d+\b")


def test_a_socket_of_another_account_is_refused_in_a_folder_of_ours_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "cpu.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        give_away(path, monkeypatch)
        assert_refused(path, r"\buser \d+\b")


@pytest.mark.parametrize(
    ("mode", "advice"),
    [(0o770, "chmod go-w "), (0o707, "chmod go-w "), (0o1777, "folder of your own")],
)
def test_a_folder_that_others_may_write_to_is_refused(folder: Path, mode: int, advice: str) -> None:
    """A sticky one too: whoever comes first has the socket's name."""
    folder.chmod(mode)
    assert_refused(folder / "cpu.sock", f"{folder}.*{advice}")


@pytest.mark.parametrize(
    ("mode", "is_private"), [(0o755, True), (0o1777, True), (0o777, False), (0o757, False)]
)
def test_folders_above_may_be_written_to_if_nobody_else_replaces_what_is_ours(
    folder: Path, mode: int, is_private: bool
) -> None:
    (folder / "deeper").mkdir(mode=0o700)
    folder.chmod(mode)
    path = folder / "deeper" / "cpu.sock"
    if is_private:
        assert is_there(path)
    else:
        assert_refused(path, f"other accounts may write to the folder {folder};")


def test_our_own_group_may_write_to_folders_above_and_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "deeper").mkdir(mode=0o700)
    folder.chmod(0o770)
    path = folder / "deeper" / "cpu.sock"
    assert is_there(path)
    if os.getuid() == 0:
        os.chown(folder, 0, STRANGER)
    else:
        monkeypatch.setattr(os, "getgid", lambda: STRANGER)
    assert_refused(path, "other accounts may write to the folder")


def test_links_are_followed_to_what_they_lead_to(folder: Path, tmp_path: Path) -> None:
    (folder / "real").mkdir(mode=0o700)
    by_name, by_path = tmp_path / "a", tmp_path / "b"
    by_name.symlink_to("ours/../ours/real")
    by_path.symlink_to(folder / "real")
    for link in (by_name, by_path):
        assert is_there(link / "cpu.sock")
        assert not is_there(link / "later" / "cpu.sock")
    (folder / "real").chmod(0o777)
    for link in (by_name, by_path):
        assert_refused(link / "cpu.sock", f"may write to the folder {folder}/real;")
    by_name.unlink()
    by_name.symlink_to("nowhere")
    assert not is_there(by_name / "cpu.sock")


def test_a_socket_that_is_a_link_into_an_open_folder_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o1777)
    (folder / "cpu.sock").symlink_to(open_to_all / "cpu.sock")
    assert_refused(folder / "cpu.sock", f"may write to the folder {open_to_all};")


def test_a_link_that_another_account_has_put_into_a_shared_folder_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "moe").symlink_to(folder)
    assert is_there(shared / "moe" / "cpu.sock")
    give_away(shared / "moe", monkeypatch)
    assert_refused(shared / "moe" / "cpu.sock", r"\buser \d+\b")


def test_links_in_a_circle_and_files_on_the_way_are_refused(folder: Path) -> None:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    assert_refused(folder / "a" / "cpu.sock", "Too many levels of symbolic links")
    (folder / "file").touch()
    assert_refused(folder / "file" / "cpu.sock", "Not a directory")


@pytest.mark.parametrize("text", ["/..", "/", "/tmp/../..", "/proc/self/.."])
def test_strange_paths_are_answered(text: str) -> None:
    assert is_there(Path(text))
