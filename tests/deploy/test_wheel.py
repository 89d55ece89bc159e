"""A machine that has the wheel and nothing else: its install script, its units, its programs."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from support.service_manager import service_manager
from support.unit_files import UNITS, link_into, read_environment_file

from .conftest import Machine

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

_SCRIPT = "dflash_runtime/data/systemd/install.py"


def said_by(script: Path, *arguments: str | Path) -> list[str]:
    """What the script says, run by a Python that has no library."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(script), *map(str, arguments)],
        cwd="/", env={}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_wheel_is_all_that_services_need(
    tmp_path: Path, run_dir: Path, cache: Path, wheel: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        ours = [name for name in archive.namelist() if name.startswith(str(Path(_SCRIPT).parent))]
        archive.extractall(tmp_path / "unpacked", ours)
    names = {Path(name).name for name in ours}
    assert names == {path.name for path in UNITS.iterdir() if path.is_file()}
    script = tmp_path / "unpacked" / _SCRIPT
    root, prefix, runtime = tmp_path / "root", tmp_path / "opt", run_dir / "run"
    place = ("--root", root, "--prefix", prefix)
    link_into(root, prefix)
    arguments = (
        "install", *place, "--wheel", wheel, "--pip-option=--no-deps", "--daemon", "cpu"
    )  # fmt: skip

    said_by(script, *arguments)
    (site_packages,) = prefix.glob("lib/python3*/site-packages")
    # The dependencies are those of this environment; our own packages are found before them.
    (site_packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    before = files_below(root / "etc")
    model = read_environment_file(root / "etc/dflash-moe/common.env")["DFLASH_MODEL"]
    assert Path(model).is_relative_to(site_packages), "the wheel brings a model"
    assert all(line.startswith("unchanged ") for line in said_by(script, *arguments))
    # The installed copy is the same script.
    installed = site_packages / _SCRIPT
    again = said_by(installed, "install", *place, "--daemon", "cpu")
    assert again
    assert all(line.startswith("unchanged ") for line in again)
    assert files_below(root / "etc") == before

    runtime.mkdir()
    with service_manager(tmp_path) as manager:
        machine = Machine(root, runtime, cache, manager)
        machine.write_settings("daemon@cpu.env", "DFLASH_ARGUMENTS=--backend reference\n")
        with machine.running("dflash-moe-daemon@cpu.service") as daemon:
            assert "cpu (reference)" in manager.wait_for("READY", within_s=120)["STATUS"]
            daemon.terminate()
            assert daemon.wait(timeout=30) == 0
    for folder in (runtime / "dflash-moe", runtime):
        folder.rmdir()

    said_by(script, "uninstall", *place, "--purge")
    assert files_below(root) == {}
    assert not prefix.exists()
    assert said_by(script, "uninstall", *place, "--purge") == []
