"""What docs/deployment.md names exists, and what it measures is so."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from dflash_protocol.settings import VARIABLES
from support.container_files import PROFILES, compose_variables
from support.processes import ROOT
from support.unit_files import UNITS

TEXT = (ROOT / "docs" / "deployment.md").read_text()


def test_files_that_are_named_exist() -> None:
    named = re.findall(r"(?<![\w/])(?:deploy|docs)/[\w./-]*\w", TEXT)
    assert len(named) > 4
    for name in named:
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (ROOT / "docs" / name).exists(), name


def test_flags_of_the_install_script_exist() -> None:
    lines = re.findall(r"install\.py (install|uninstall)((?:.|\\\n)*)", TEXT)
    assert {command for command, _ in lines} == {"install", "uninstall"}
    for command, arguments in lines:
        shown = subprocess.run(
            [sys.executable, "-I", str(UNITS / "install.py"), command, "--help"],
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip
        for flag in re.findall(r"(?<=\s)--[a-z-]+", arguments):
            assert flag in shown, (command, flag)


def test_variables_that_are_named_exist() -> None:
    units = "".join(path.read_text() for path in UNITS.iterdir() if path.is_file())
    known = {*re.findall(r"DFLASH_[A-Z_]+", units), *compose_variables(), *VARIABLES}
    named = set(re.findall(r"\bDFLASH_[A-Z_]+", TEXT))
    assert named
    assert named <= known


def test_every_profile_is_described() -> None:
    assert re.findall(r"^\| `(\w+)` \| image", TEXT, re.MULTILINE) == list(PROFILES)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_the_exposure_is_what_is_said_or_less() -> None:
    said = re.search(r"`systemd-analyze security (\S+)` \w+ ([0-9.]+)", TEXT)
    assert said is not None
    shown = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(UNITS / said[1])],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    measured = re.search(r"exposure level for \S+: ([0-9.]+)", shown)
    assert measured is not None
    assert float(measured[1]) <= float(said[2])
