"""Separate Python environments, for daemons that run under another interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from dflash_protocol.settings import cache_folder
from dflash_runtime.compute.cpu.compile.kernel_cache import kernel_folder
from support.processes import ROOT

_OUR_PATHS = [str(ROOT / name) for name in ("protocol", "adapters", "daemon", "runtime")]
NEEDED_BY_DAEMONS = (
    "numpy", "pyzmq", "msgpack", "xxhash", "psutil", "gguf", "PyYAML", "requests", "tqdm",
)  # fmt: skip
"""Distributions that a daemon with the reference backend needs, with the imports of gguf."""


def make_environment(folder: Path, *, linked: Sequence[str] = (), with_ours: bool = True) -> Path:
    """A virtual environment without pip; returns its interpreter.

    Top-level packages of the distributions `linked` are links to those of our own environment;
    `with_ours`: our packages can be imported, from where they lie.
    """
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    python = folder / "bin" / "python"
    site_packages = Path(_asked(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    ours = Path(sysconfig.get_path("purelib"))
    for distribution in linked:
        for name in _top_levels(ours, distribution):
            if (ours / name).exists() and not (site_packages / name).exists():
                (site_packages / name).symlink_to(ours / name)
    if with_ours:
        (site_packages / "ours.pth").write_text("\n".join(_OUR_PATHS) + "\n")
    return python


def cache_with_our_kernels(folder: Path) -> Path:
    """A new cache folder that shares the compiled kernels of this session and nothing else.

    For tests of what else a cache keeps: compiling a model's kernels takes 20 s.
    """
    folder.mkdir(mode=0o700)
    ours = kernel_folder()
    for shared in (ours, *cache_folder(None).glob("ring-*")):
        if shared is not None:
            (folder / shared.name).symlink_to(shared)
    return folder


def build_wheel(folder: Path) -> Path:
    """The real wheel of this tree. Skips the test where it cannot be built."""
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check",
         "--no-deps", "--wheel-dir", str(folder), str(ROOT)],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    if built.returncode != 0:
        pytest.skip(f"the wheel cannot be built here: {built.stderr.strip()[-200:]}")
    (path,) = folder.glob("*.whl")
    return path


def write_launcher(
    path: Path, python: Path, *, before: str = ":", module: str = "dflash_daemon"
) -> Path:
    """Write a shell script that runs `before`, then `module` with the interpreter `python`."""
    lines = (
        "#!/bin/sh",
        before,
        f"export PYTHONPATH={os.pathsep.join((*_OUR_PATHS, str(ROOT / 'tests'), str(ROOT)))}",
        f'exec "{python}" -P -m {module} "$@"',
    )
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o700)
    return path


def install(python: Path, requirements: Sequence[str], *, timeout_s: float) -> str | None:
    """Install distributions into another environment with our pip. Returns the error, or None."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet",
         "--disable-pip-version-check", *requirements],
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["?"])[-1]


def versions(python: Path, names: Sequence[str]) -> dict[str, str]:
    """Versions of distributions in an environment."""
    code = (
        "import json, sys; from importlib.metadata import version;"
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    found: dict[str, str] = json.loads(_asked(python, code, *names))
    return found


def _top_levels(site_packages: Path, distribution: str) -> set[str]:
    """Names within site-packages that belong to a distribution, its record among them."""
    wanted = distribution.lower().replace("-", "_")
    for info in site_packages.glob("*.dist-info"):
        if info.name.lower().split("-")[0] == wanted:
            lines = (info / "RECORD").read_text().splitlines()
            tops = {line.split(",")[0].split("/")[0] for line in lines}
            return {name for name in tops if name not in ("..", "bin", "__pycache__")}
    raise AssertionError(f"{distribution} is not installed here")


def _asked(python: Path, code: str, *arguments: str) -> str:
    command = [str(python), "-I", "-c", code, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()
