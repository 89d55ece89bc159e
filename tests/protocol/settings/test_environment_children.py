"""What processes that we start are given: of our environment, and of the settings."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from dflash_protocol.settings import (
    DaemonSetting,
    Settings,
    cache_folder,
    child_environment,
    daemon_environment,
    load_settings,
)

PREFIX = "DFLASH_MOE_EXPERT_COMPUTE_"

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


# -- daemons' environments ------------------------------------------------------------------------

LEAKS = {
    "LD_LIBRARY_PATH": "/opt/rocm/lib",
    "LD_PRELOAD": "/opt/lib.so",
    "PYTHONPATH": "/ours",
    "PYTHONHOME": "/ours",
    "VIRTUAL_ENV": "/ours",
    "CUDA_VISIBLE_DEVICES": "0",
    "CUDA_PATH": "/usr/local/cuda",
    "HIP_VISIBLE_DEVICES": "1",
    "ROCR_VISIBLE_DEVICES": "2",
    "ROCM_PATH": "/opt/rocm",
    "NUMBA_CPU_NAME": "generic",
    "OMP_NUM_THREADS": "64",
    "SECRET_TOKEN": "x",
    "DFLASH_MOE_SETTINGS_FILE": "/etc/moe.toml",
    PREFIX + "DAEMONS": "cpu",
    PREFIX + "IPC_DEADLINE_MS": "7",
}
HARMLESS = {
    "PATH": "/bin",
    "HOME": "/home/me",
    "LANG": "C.UTF-8",
    "LC_ALL": "C",
    "TZ": "UTC",
    "TMPDIR": "/var/tmp",
    "XDG_RUNTIME_DIR": "/run/user/7",
}


@pytest.fixture
def full_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, text in {**LEAKS, **HARMLESS}.items():
        monkeypatch.setenv(name, text)


@pytest.mark.usefixtures("full_environment")
def test_a_daemon_of_another_environment_is_given_only_what_is_harmless() -> None:
    environment = daemon_environment(Settings(), DaemonSetting("cpu"), python_paths=None)
    assert environment == {**HARMLESS, "OMP_WAIT_POLICY": "passive"}


@pytest.mark.usefixtures("full_environment")
def test_a_daemon_of_our_interpreter_is_given_all_but_settings_that_are_ours() -> None:
    environment = daemon_environment(Settings(), DaemonSetting("cpu"), python_paths=(Path("/p"),))
    environment.pop("PYTEST_CURRENT_TEST", None)
    ours = {name: text for name, text in LEAKS.items() if not name.startswith("DFLASH_MOE_")}
    assert environment == {
        **ours, **HARMLESS, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": "/p:/ours"
    }  # fmt: skip


@pytest.mark.usefixtures("full_environment")
def test_a_daemons_own_variables_come_last() -> None:
    own = (("CUDA_VISIBLE_DEVICES", "3"), ("PATH", "/opt/bin"), (PREFIX + "IPC_SPIN_US", "9"))
    daemon = DaemonSetting("cpu", environment=own)
    for python_paths in (None, ()):
        environment = daemon_environment(Settings(spin_us=5), daemon, python_paths=python_paths)
        assert own[0][1] == environment["CUDA_VISIBLE_DEVICES"]
        assert environment["PATH"] == "/opt/bin"
        assert environment[PREFIX + "IPC_SPIN_US"] == "9"


@pytest.mark.usefixtures("full_environment")
def test_settings_that_hold_for_daemons_are_passed_on_if_they_are_not_the_default() -> None:
    changed = Settings(
        batch_capacity=7, ipc_transport="stream", ipc_profile=True, cpu_tier="avx2",
        run_dir="/run/x", cache_dir="/c", spin_us=0, ipc_shared_bytes=4096,
        # The parent's alone:
        ipc_mode="stream", deadline_ms=9, threads=3, ipc_required=True, connect=("ipc:///x",),
    )  # fmt: skip
    environment = daemon_environment(changed, DaemonSetting("cpu"), python_paths=None)
    passed_on = {name: text for name, text in environment.items() if name.startswith(PREFIX)}
    assert passed_on == {
        PREFIX + "IPC_BATCH_CAPACITY": "7",
        PREFIX + "IPC_TRANSPORT": "stream",
        PREFIX + "IPC_PROFILE": "1",
        PREFIX + "CPU_TIER": "avx2",
        PREFIX + "IPC_WORK_DIR": "/run/x",
        PREFIX + "CACHE_DIR": "/c",
        PREFIX + "IPC_SPIN_US": "0",
        PREFIX + "IPC_SHARED_BYTES": "4096",
    }
    told = load_settings(environment)
    assert (told.batch_capacity, told.ipc_profile, told.spin_us) == (7, True, 0)


def test_a_cache_folder_is_the_one_given_or_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFIX + "CACHE_DIR", str(tmp_path / "environment"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert cache_folder(str(tmp_path / "given")) == tmp_path / "given"
    assert (tmp_path / "given").stat().st_mode & 0o777 == 0o700
    assert cache_folder(None) == tmp_path / "environment"
    assert cache_folder("") == tmp_path / "home" / "dflash-moe"


@pytest.mark.parametrize("python_paths", [(), None])
def test_a_daemon_is_told_what_flags_and_file_said_and_not_where_the_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_paths: tuple[Path, ...] | None
) -> None:
    file = tmp_path / "moe.toml"
    file.write_text('cache_dir = "/of-the-file"\ncpu_tier = "avx2"\n')
    monkeypatch.setenv("DFLASH_MOE_SETTINGS_FILE", str(file))
    before = dict(os.environ)
    settings = load_settings(flags={"cpu_tier": "auto", "spin_us": "7"})
    environment = daemon_environment(settings, DaemonSetting("cpu"), python_paths=python_paths)
    assert dict(os.environ) == before
    assert "DFLASH_MOE_SETTINGS_FILE" not in environment
    told = load_settings(environment)
    assert (told.cache_dir, told.cpu_tier, told.spin_us) == ("/of-the-file", "auto", 7)
