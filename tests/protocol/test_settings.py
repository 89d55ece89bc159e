"""Settings: every variable, its bounds, and what a wrong one says."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import (
    CPU_TIERS,
    Settings,
    cache_directory,
    child_environment,
    load_settings,
    run_directory,
)

PREFIX = "DFLASH_MOE_EXPERT_COMPUTE_"
NUMBERS = [
    # variable, field, default, smallest, largest
    ("IPC_DEADLINE_MS", "deadline_ms", 250, 1, 3_600_000),
    ("HEARTBEAT_MS", "heartbeat_ms", 1000, 10, 60_000),
    ("CONNECT_TIMEOUT_MS", "connect_timeout_ms", 10_000, 10, 3_600_000),
    ("IPC_BATCH_CAPACITY", "batch_capacity", 1024, 1, 4096),
]


def test_defaults_hold_when_nothing_is_set() -> None:
    assert load_settings({"PATH": "/bin", "DFLASH": "1"}) == Settings()
    for _, field, default, _, _ in NUMBERS:
        assert getattr(Settings(), field) == default


@pytest.mark.parametrize(("variable", "field", "default", "smallest", "largest"), NUMBERS)
def test_a_number_sets_its_field_within_its_bounds(
    variable: str, field: str, default: int, smallest: int, largest: int
) -> None:
    for value in (smallest, largest):
        loaded = load_settings({PREFIX + variable: str(value)})
        assert getattr(loaded, field) == value
    for value in (smallest - 1, largest + 1):
        with pytest.raises(SettingsError, match=f"{PREFIX}{variable}='{value}'.*{smallest} to"):
            load_settings({PREFIX + variable: str(value)})
    assert getattr(load_settings({}), field) == default


@pytest.mark.parametrize(("variable", "field", "default", "smallest", "largest"), NUMBERS)
@pytest.mark.parametrize("text", ["", "fast", "1.5", "1e3", "0x10", "-", "nan", "9" * 5000])
def test_what_is_no_number_is_refused_with_the_name(
    variable: str, field: str, default: int, smallest: int, largest: int, text: str
) -> None:
    with pytest.raises(SettingsError, match=PREFIX + variable):
        load_settings({PREFIX + variable: text})


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=8))
def test_any_text_is_a_number_in_bounds_or_refused(text: str) -> None:
    try:
        loaded = load_settings({PREFIX + "IPC_BATCH_CAPACITY": text})
    except SettingsError as error:
        reason = str(error)
        assert PREFIX + "IPC_BATCH_CAPACITY" in reason
        assert len(reason.splitlines()) == 1
    else:
        assert 1 <= loaded.batch_capacity <= 4096


@pytest.mark.parametrize(
    "name", ["DFLASH_MOE_", "DFLASH_MOE_THREADS", PREFIX + "IPC_DEADLINE", PREFIX + "HEARTBEAT_S"]
)
def test_an_unknown_variable_of_ours_is_refused_with_its_name_and_the_known_ones(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name};") as caught:
        load_settings({name: "1"})
    for variable, *_ in NUMBERS:
        assert PREFIX + variable in str(caught.value)
    assert load_settings({PREFIX + "IPC_DEADLINE_MS": "7"}).deadline_ms == 7


@pytest.mark.parametrize("tier", CPU_TIERS)
def test_a_tier_is_one_of_the_known(tier: str) -> None:
    assert load_settings({PREFIX + "CPU_TIER": tier}).cpu_tier == tier


@pytest.mark.parametrize("text", ["", "AVX2", "sse", "avx2 "])
def test_an_unknown_tier_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(SettingsError, match=f"{PREFIX}CPU_TIER='{text}'.*auto, amx, avx512vnni"):
        load_settings({PREFIX + "CPU_TIER": text})


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "HEARTBEAT_MS", "123")
    monkeypatch.setenv(PREFIX + "IPC_WORK_DIR", "/somewhere")
    monkeypatch.setenv(PREFIX + "CACHE_DIR", "/elsewhere")
    loaded = load_settings()
    assert loaded.heartbeat_ms == 123
    assert (loaded.run_dir, loaded.cache_dir) == ("/somewhere", "/elsewhere")


# -- directories ----------------------------------------------------------------------------------

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


def test_the_run_directory_falls_back_to_runtime_dir_then_temp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    assert run_directory(Settings()) == tmp_path / "xdg" / "dflash-moe"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    assert run_directory(Settings()) == tmp_path / "tmp" / f"dflash-moe-{os.getuid()}"


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


def test_a_directory_that_is_a_link_is_refused(directory: Directory, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(SettingsError, match="link is a link or belongs to another"):
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
        with pytest.raises(SettingsError, match="another user"):
            directory(str(tmp_path))


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o755, 0o777])
def test_a_directory_that_others_may_enter_is_refused(
    directory: Directory, tmp_path: Path, mode: int
) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(SettingsError, match="open to others; chmod 700"):
        directory(str(folder))
    folder.chmod(0o700)
    assert directory(str(folder)) == folder


def test_a_directory_that_cannot_be_made_is_refused_with_the_reason(
    directory: Directory, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "file").write_text("")
    what = request.node.callspec.params["directory"]
    with pytest.raises(SettingsError, match=f"{what} directory .*file: File exists"):
        directory(str(tmp_path / "file"))
    with pytest.raises(SettingsError, match="Not a directory"):
        directory(str(tmp_path / "file" / "below"))


def test_a_relative_directory_gives_an_absolute_path(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ``ipc://`` endpoint is made of the run directory, and those are absolute."""
    monkeypatch.chdir(tmp_path)
    assert directory("some") == tmp_path / "some"


# -- children -------------------------------------------------------------------------------------


def test_a_child_inherits_our_environment_and_waits_passively(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("SOMETHING", "else")
    environment = child_environment(())
    assert environment["OMP_WAIT_POLICY"] == "passive"
    assert environment["SOMETHING"] == "else"
    assert os.environ["OMP_WAIT_POLICY"] == "active"


def test_a_child_finds_our_packages_before_the_inherited_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    environment = child_environment((Path("/ours"), Path("/also")))
    assert environment["PYTHONPATH"] == "/ours:/also:/inherited"
    monkeypatch.delenv("PYTHONPATH")
    assert child_environment((Path("/ours"),))["PYTHONPATH"] == "/ours"
    assert "PYTHONPATH" not in child_environment(())


def test_a_child_is_not_told_of_site_packages_which_it_has_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    installed = Path(sysconfig.get_path("purelib"))
    assert "PYTHONPATH" not in child_environment((installed,))
