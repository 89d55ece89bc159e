"""Folders of ours: where they are, and whose they must be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import dflash_protocol.settings.environment as settings_module
from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import Settings, cache_directory, keys_directory, run_directory

Directory = Callable[[str], Path]
"""A directory with this text as its setting."""


@pytest.fixture(params=["run", "cache"])
def directory(request: pytest.FixtureRequest) -> Directory:
    if request.param == "run":
        return lambda text: run_directory(Settings(run_dir=text))
    return lambda text: cache_directory(Settings(cache_dir=text))


def test_a_directory_is_made_for_us_alone(directory: Directory, tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "b"
    assert directory(str(wanted)) == wanted
    assert wanted.stat().st_mode & 0o7777 == 0o700
    assert directory(str(wanted)) == wanted


def test_a_directory_is_private_under_any_umask(directory: Directory, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = directory(str(tmp_path / "some"))
    finally:
        os.umask(before)
    assert made.stat().st_mode & 0o7777 == 0o700


def test_the_run_directory_falls_back_to_runtime_dir_then_shared_memory_then_temp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, shared = f"dflash-moe-{os.getuid()}", tmp_path / "shm"
    monkeypatch.setattr(settings_module, "_SHARED_MEMORY", shared)
    monkeypatch.setattr(settings_module, "_LEAST_SHARED_BYTES", 1)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    assert run_directory(Settings()) == tmp_path / "xdg" / "dflash-moe"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    assert run_directory(Settings()) == tmp_path / "tmp" / name
    shared.mkdir()
    assert run_directory(Settings()) == shared / name
    size = os.statvfs(shared)
    too_much = size.f_blocks * size.f_frsize + 1
    monkeypatch.setattr(settings_module, "_LEAST_SHARED_BYTES", too_much)
    assert run_directory(Settings()) == tmp_path / "tmp" / name


def test_the_cache_directory_falls_back_to_cache_home_then_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory(Settings()) == tmp_path / "xdg" / "dflash-moe"
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", unset)
        monkeypatch.setenv("HOME", str(tmp_path / f"home {unset}"))
        found = cache_directory(Settings())
        assert found == tmp_path / f"home {unset}" / ".cache" / "dflash-moe"
        assert found.stat().st_mode & 0o7777 == 0o700


def test_the_keys_directory_falls_back_to_config_home_then_home_and_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert keys_directory(Settings(keys_dir="/etc/keys")) == Path("/etc/keys")
    assert keys_directory(Settings()) == tmp_path / "xdg" / "dflash-moe" / "keys"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert keys_directory(Settings()) == tmp_path / ".config" / "dflash-moe" / "keys"
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_a_link_is_refused(directory: Directory, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(SettingsError, match=r"/link\b.* link "):
        directory(str(tmp_path / "link"))
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(SettingsError, match="dangling"):
        directory(str(tmp_path / "dangling"))
    assert directory(str(tmp_path / "real")) == tmp_path / "real"


def test_a_directory_of_another_user_is_refused(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as somebody_else:
        somebody_else.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
        with pytest.raises(SettingsError, match=f"{tmp_path}.* user"):
            directory(str(tmp_path))


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o755, 0o777])
def test_a_directory_that_others_may_enter_is_refused(
    directory: Directory, tmp_path: Path, mode: int
) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(SettingsError, match="chmod 700"):
        directory(str(folder))
    folder.chmod(0o700)
    assert directory(str(folder)) == folder


def test_a_directory_that_cannot_be_made_is_refused_with_the_reason(
    directory: Directory, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "file").write_text("")
    what = request.node.callspec.params["directory"]
    with pytest.raises(SettingsError, match=f"{what} .*file: File exists"):
        directory(str(tmp_path / "file"))
    with pytest.raises(SettingsError, match="Not a directory"):
        directory(str(tmp_path / "file" / "below"))


def test_a_relative_directory_gives_an_absolute_path(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ``ipc://`` endpoint is made of the run directory, and those are absolute."""
    monkeypatch.chdir(tmp_path)
    assert directory("some") == tmp_path / "some"
