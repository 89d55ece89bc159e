"""The only reader of the environment: every variable, its type, its default, its bounds.

A bad value or an unknown ``DFLASH_MOE_*`` name stops the program with the name in the message.
Knows nothing of the command line; flags are applied over these values by their owner.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from dflash_protocol.errors import SettingsError

_PREFIX = "DFLASH_MOE_"
_EXPERT_COMPUTE = _PREFIX + "EXPERT_COMPUTE_"

ENDPOINT_PATH_LIMIT_BYTES = 100
"""Longest path of an ``ipc://`` endpoint: sun_path holds 108 bytes, our suffixes need a few."""


MAX_THREADS = 1024
"""Most compute threads a process may be asked to use."""

AUTO_TIER = "auto"
CPU_TIERS = (AUTO_TIER, "amx", "avx512vnni", "avxvnni", "avx2", "neondot", "generic")
"""Instruction sets that the CPU's kernels may be built from; ``auto`` is the best that works."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that are not arguments of one run. Times in the unit of their name."""

    deadline_ms: int = 250
    """Shortest time a daemon is given to answer one request."""
    heartbeat_ms: int = 1000
    """Time between two pings on a link; five silent ones and the daemon counts as lost."""
    connect_timeout_ms: int = 10_000
    """Longest silence while a daemon is started, connected to, or loading."""
    batch_capacity: int = 1024
    """Most tokens in one request to a daemon."""
    cache_dir: str = ""
    """Folder of compiled kernels; empty = ``$XDG_CACHE_HOME/dflash-moe`` or ``~/.cache/…``."""
    threads: int = 0
    """Compute threads of a process; 0 = one for each physical core it may use."""
    pin_daemons: int = 0
    """1 = daemons that a parent starts on this machine keep to cores of their own."""
    cpu_tier: str = AUTO_TIER
    """Instruction set of the CPU's kernels, one of CPU_TIERS."""
    run_dir: str = ""
    """Folder of sockets and locks; empty = ``$XDG_RUNTIME_DIR/dflash-moe``, or in the temp dir."""


_VARIABLES: dict[str, tuple[str, int, int]] = {
    # variable: field, smallest, largest
    _EXPERT_COMPUTE + "IPC_DEADLINE_MS": ("deadline_ms", 1, 3_600_000),
    _EXPERT_COMPUTE + "HEARTBEAT_MS": ("heartbeat_ms", 10, 60_000),
    _EXPERT_COMPUTE + "CONNECT_TIMEOUT_MS": ("connect_timeout_ms", 10, 3_600_000),
    _EXPERT_COMPUTE + "IPC_BATCH_CAPACITY": ("batch_capacity", 1, 4096),
    _EXPERT_COMPUTE + "THREADS": ("threads", 0, MAX_THREADS),
    _EXPERT_COMPUTE + "PIN_DAEMONS": ("pin_daemons", 0, 1),
}
_RUN_DIR = _EXPERT_COMPUTE + "IPC_WORK_DIR"
_CACHE_DIR = _EXPERT_COMPUTE + "CACHE_DIR"
_CPU_TIER = _EXPERT_COMPUTE + "CPU_TIER"

VARIABLES = tuple(sorted([*_VARIABLES, _CACHE_DIR, _CPU_TIER, _RUN_DIR]))
"""Names of all variables that are read."""


def load_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Raises: SettingsError naming the variable, its value and what is allowed.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, int | str] = {}
    for variable, text in environment.items():
        if variable == _RUN_DIR:
            values["run_dir"] = text
        elif variable == _CPU_TIER:
            values["cpu_tier"] = _one_of(variable, text, CPU_TIERS)
        elif variable == _CACHE_DIR:
            values["cache_dir"] = text
        elif variable in _VARIABLES:
            field, smallest, largest = _VARIABLES[variable]
            values[field] = _whole_number(variable, text, smallest, largest)
        elif variable.startswith(_PREFIX):
            known = ", ".join(VARIABLES)
            raise SettingsError(f"unknown variable {variable}; known are {known}")
    assert set(values) <= {field.name for field in fields(Settings)}
    return Settings(**values)  # type: ignore[arg-type]


def _whole_number(variable: str, text: str, smallest: int, largest: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = smallest - 1
    if not smallest <= value <= largest:
        raise SettingsError(
            f"{variable}={text!r}: must be a whole number from {smallest} to {largest}"
        )
    return value


def _one_of(variable: str, text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise SettingsError(f"{variable}={text!r}: must be one of {', '.join(known)}")
    return text


def run_directory(settings: Settings) -> Path:
    """The folder for sockets and locks, made with mode 0700.

    Raises: SettingsError if it cannot be made, is a link, or belongs to somebody else.
    """
    if settings.run_dir:
        path = Path(settings.run_dir)
    elif runtime_dir := os.environ.get("XDG_RUNTIME_DIR"):
        path = Path(runtime_dir) / "dflash-moe"
    else:
        path = Path(os.environ.get("TMPDIR") or "/tmp") / f"dflash-moe-{os.getuid()}"
    path = path.absolute()  # endpoints are made of it
    _make_private(path, "run directory")
    return path


def cache_directory(settings: Settings) -> Path:
    """The folder for what can be made again, made with mode 0700.

    Raises: SettingsError if it cannot be made, is a link, or belongs to somebody else.
    """
    if settings.cache_dir:
        path = Path(settings.cache_dir)
    elif cache_home := os.environ.get("XDG_CACHE_HOME"):
        path = Path(cache_home) / "dflash-moe"
    else:
        path = Path(os.path.expanduser("~")) / ".cache" / "dflash-moe"
    path = path.absolute()
    _make_private(path, "cache directory")
    return path


def _make_private(path: Path, what: str) -> None:
    """Raises: SettingsError if the folder is not ours alone."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise SettingsError(f"{what} {path}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SettingsError(f"{what} {path} is a link or belongs to another user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise SettingsError(f"{what} {path} is open to others; chmod 700 it")


def child_environment(python_paths: tuple[Path, ...]) -> dict[str, str]:
    """Environment of a spawned daemon: ours, with OpenMP waiting passively.

    `python_paths` come first on the child's import path: where our own packages lie, for a launcher
    that is this very interpreter and may be running uninstalled.
    """
    environment = dict(os.environ)
    environment["OMP_WAIT_POLICY"] = "passive"
    site_packages = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    roots = [str(path) for path in python_paths if path not in site_packages]
    if roots:
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([*roots, *([inherited] if inherited else [])])
    return environment


def package_roots(packages: Iterable[str]) -> tuple[Path, ...]:
    """Where our packages lie, so that a child finds them even if nothing is installed."""
    roots = []
    for package in packages:
        found = importlib.util.find_spec(package)
        if found is not None and found.origin is not None:
            roots.append(Path(found.origin).parents[1])
    return tuple(dict.fromkeys(roots))
