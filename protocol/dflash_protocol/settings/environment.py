"""The only reader of the environment: settings from flags, variables, a file and defaults.

A flag counts before a variable, a variable before the settings file, that before the default. A bad
value or an unknown ``DFLASH_MOE_*`` name stops the program with the name in the message. What
settings there are is said in ``settings_table``. Also here, since they are made of the environment:
our folders, and what child processes are given.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_protocol.errors import SettingsError
from dflash_protocol.settings.file import read_settings_file
from dflash_protocol.settings.kinds import MOST_DAEMONS, DaemonSetting, checked, unknown
from dflash_protocol.settings.table import (
    AUTO_TIER,
    CPU_TIERS,
    EXPERT_COMPUTE,
    KNOBS,
    MAX_THREADS,
    PREFIX,
    SETTINGS_FILE,
    VARIABLES,
    Knob,
    Reader,
    Settings,
)

__all__ = [
    "AUTO_TIER",
    "CPU_TIERS",
    "MAX_THREADS",
    "VARIABLES",
    "DaemonSetting",
    "Settings",
    "cache_directory",
    "cache_folder",
    "child_environment",
    "daemon_environment",
    "keys_directory",
    "load_settings",
    "package_roots",
    "run_directory",
    "supervision",
]

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_BYTES = 1 << 30
"""Containers have 64 MiB there if nobody asks for more, which few segments fit into."""
_OTHERS_INHERIT = ("HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER")
"""What a program of another environment is given of ours: nothing that says where libraries lie."""
_BARE = ("LD_LIBRARY_PATH",)
"""What an interpreter may need to start at all."""
_OTHERS_INHERIT_PREFIXES = ("LC_", "XDG_")


_SUPERVISION = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""What a service manager says to the process it has started, and to no child of that."""
_LONGEST_WATCHDOG_USEC = 1 << 53


def load_settings(
    environment: Mapping[str, str] | None = None,
    *,
    file: Path | None = None,
    flags: Mapping[str, object] | None = None,
) -> Settings:
    """Read the settings.

    `environment` defaults to this process's; `file` is a settings file and defaults to the one
    that ``DFLASH_MOE_SETTINGS_FILE`` names. `flags` holds, by field of Settings, the text of a
    flag, a bool for a switch, or the texts of a repeated flag; None and () = not given.
    Raises: SettingsError naming the flag, variable or file and key, its value and what is allowed.
    """
    environment = os.environ if environment is None else environment
    if file is None and environment.get(SETTINGS_FILE):
        file = Path(environment[SETTINGS_FILE])
    values: dict[str, Any] = {} if file is None else read_settings_file(file)
    values.update(_from_environment(environment))
    for knob in KNOBS:
        value = (flags or {}).get(knob.field)
        if value is not None and value != ():
            values[knob.field] = _from_flag(knob, value)
    settings = Settings(**values)
    if settings.stream_batch <= settings.stream_batch_max:
        return settings
    if "stream_batch" not in values:
        return replace(settings, stream_batch=settings.stream_batch_max)
    raise SettingsError(
        f"{_variable('stream_batch')}={settings.stream_batch}: must be at most "
        f"{_variable('stream_batch_max')}, which is {settings.stream_batch_max}"
    )


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for knob in KNOBS:
        for variable in (knob.older_variable, knob.variable):
            if variable in environment:
                values[knob.field] = _from_text(
                    variable, knob.kind.from_text, environment[variable]
                )
    for variable in environment:
        if variable.startswith(PREFIX) and variable not in VARIABLES:
            raise SettingsError(
                unknown("variable", variable, VARIABLES, prefixes=(EXPERT_COMPUTE, PREFIX))
            )
    return values


def _from_flag(knob: Knob, value: object) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _from_text(knob.flag, knob.kind.from_text, value)
    assert isinstance(value, Sequence)
    if len(value) > MOST_DAEMONS:
        raise SettingsError(f"{knob.flag} is given {len(value)} times, at most {MOST_DAEMONS} do")
    return tuple(_from_text(knob.flag, knob.kind.from_item, each) for each in value)


def _from_text(where: str, read: Callable[[str], object], text: str) -> object:
    """Raises: SettingsError."""
    value = checked(where, text, read)
    # Of a daemon more can turn out to be wrong later, which should be able to name the place too.
    if isinstance(value, DaemonSetting):
        return replace(value, source=where)
    if isinstance(value, tuple):
        return tuple(
            replace(each, source=where) if isinstance(each, DaemonSetting) else each
            for each in value
        )
    return value


def _variable(field: str) -> str:
    return next(knob.variable for knob in KNOBS if knob.field == field)


def run_directory(settings: Settings) -> Path:
    """The folder for sockets, locks and memory that is shared, made with mode 0700.

    In memory, if it can be: GPUs see no shared memory that a disk is behind.
    Raises: SettingsError if it cannot be made, is a link, or belongs to somebody else.
    """
    if settings.run_dir:
        path = Path(settings.run_dir)
    elif runtime_dir := os.environ.get("XDG_RUNTIME_DIR"):
        path = Path(runtime_dir) / "dflash-moe"
    else:
        temporary = Path(os.environ.get("TMPDIR") or "/tmp")
        parent = _SHARED_MEMORY if _is_large_and_ours(_SHARED_MEMORY) else temporary
        path = parent / f"dflash-moe-{os.getuid()}"
    path = path.absolute()  # endpoints are made of it
    _make_private(path, "run directory")
    return path


def _is_large_and_ours(folder: Path) -> bool:
    """Whether memory can be shared in a folder. Its size is told, not what is free: whoever asks
    later must be told the same."""
    try:
        size = os.statvfs(folder)
    except OSError:
        return False
    is_large = size.f_blocks * size.f_frsize >= _LEAST_SHARED_BYTES
    return is_large and os.access(folder, os.W_OK | os.X_OK)


def cache_directory(settings: Settings) -> Path:
    """The folder for what can be made again, made with mode 0700.

    Raises: SettingsError if it cannot be made, is a link, or belongs to somebody else.
    """
    path = Path(settings.cache_dir or _home("XDG_CACHE_HOME", ".cache")).absolute()
    _make_private(path, "cache directory")
    return path


def cache_folder(cache_dir: str | None) -> Path:
    """`cache_directory` of this value of the setting; None = of the one that `load_settings` reads.

    Raises: SettingsError, of None as `load_settings` too.
    """
    return cache_directory(load_settings() if cache_dir is None else Settings(cache_dir=cache_dir))


def keys_directory(settings: Settings) -> Path:
    """The folder for keys, which need not exist."""
    return Path(settings.keys_dir or _home("XDG_CONFIG_HOME", ".config") / "keys").absolute()


def _home(variable: str, below_home: str) -> Path:
    """Our folder in one of the homes that the XDG specification knows."""
    home = os.environ.get(variable) or Path(os.path.expanduser("~")) / below_home
    return Path(home) / "dflash-moe"


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
    """Environment of a process of this very interpreter: ours, with OpenMP waiting passively, and
    without what a service manager says to us alone.

    `python_paths` come first on the child's import path: where our own packages lie, for we may be
    running uninstalled.
    """
    environment = {n: text for n, text in os.environ.items() if n not in _SUPERVISION}
    environment["OMP_WAIT_POLICY"] = "passive"
    site_packages = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    roots = [str(path) for path in python_paths if path not in site_packages]
    if roots:
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([*roots, *([inherited] if inherited else [])])
    return environment


def daemon_environment(
    settings: Settings,
    daemon: DaemonSetting,
    *,
    python_paths: tuple[Path, ...] | None,
) -> dict[str, str]:
    """Environment of a daemon that we spawn, with the settings that hold for it.

    `python_paths` as for `child_environment` if it is run by this very interpreter. None = by
    another program, which gets a few harmless variables of ours and those of its own table: what
    says where this environment's libraries, packages and devices are is not for another one.
    """
    if python_paths is not None:
        inherited = child_environment(python_paths)
        environment = {n: text for n, text in inherited.items() if not n.startswith(PREFIX)}
    else:
        environment = {
            name: text
            for name, text in os.environ.items()
            if name in _OTHERS_INHERIT or name.startswith(_OTHERS_INHERIT_PREFIXES)
        }
        environment["OMP_WAIT_POLICY"] = "passive"
    for knob in KNOBS:
        value = getattr(settings, knob.field)
        # Only what differs: an older daemon need not know the settings that nobody has set.
        if knob.reader is Reader.BOTH and value != knob.default:
            environment[knob.variable] = knob.kind.to_text(value)
    return {**environment, **dict(daemon.environment)}


def bare_environment() -> dict[str, str]:
    """Environment of a process that is to know nothing of ours."""
    return {name: os.environ[name] for name in _BARE if name in os.environ}


def supervision() -> tuple[str, float]:
    """What a service manager wants of us: the socket to notify, empty = none; seconds of its
    watchdog, 0 = none.

    Raises: SettingsError naming the variable and its value.
    """
    address, watchdog_usec, watchdog_pid = (os.environ.get(name, "") for name in _SUPERVISION)
    if not watchdog_usec or watchdog_pid not in ("", str(os.getpid())):
        return address, 0.0
    is_number = watchdog_usec.isascii() and watchdog_usec.isdigit() and len(watchdog_usec) <= 16
    if not is_number or not 0 < int(watchdog_usec) <= _LONGEST_WATCHDOG_USEC:
        raise SettingsError(f"WATCHDOG_USEC={watchdog_usec[:40]!r}: must be microseconds above 0")
    return address, int(watchdog_usec) * 1e-6


def package_roots(packages: Iterable[str]) -> tuple[Path, ...]:
    """Where our packages lie, so that a child finds them even if nothing is installed."""
    roots = []
    for package in packages:
        found = importlib.util.find_spec(package)
        if found is not None and found.origin is not None:
            roots.append(Path(found.origin).parents[1])
    return tuple(dict.fromkeys(roots))
