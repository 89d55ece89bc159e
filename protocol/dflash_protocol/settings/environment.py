"""The only reader of the environment: settings, folders, and the environments of child processes.

Precedence: flag, variable, settings file, default. A bad value or an unknown ``DFLASH_MOE_*``
variable is a SettingsError that names it. `table` defines the settings.
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
    EXPERT_COMPUTE,
    KNOBS,
    PREFIX,
    SETTINGS_FILE,
    VARIABLES,
    Knob,
    Reader,
    Settings,
)

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_BYTES = 1 << 30
"""Containers have 64 MiB there by default, too little for most segments."""
_INHERITED = ("HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER")
_INHERITED_PREFIXES = ("LC_", "XDG_")
"""Variables that a daemon with another launcher inherits: none that locates libraries."""
_BARE = ("LD_LIBRARY_PATH",)
"""Variables that an interpreter may need to start."""

_SUPERVISION = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""A service manager's variables, meant for the process it starts and not for its children."""
_LONGEST_WATCHDOG_USEC = 1 << 53


def load_settings(
    environment: Mapping[str, str] | None = None,
    *,
    file: Path | None = None,
    flags: Mapping[str, object] | None = None,
) -> Settings:
    """Read the settings.

    `environment` defaults to this process's, `file` to the one that ``DFLASH_MOE_SETTINGS_FILE``
    names. `flags` has, by field of Settings, the text of a flag, a bool for a switch, or the texts
    of a repeated flag; None and () = not given.
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
        older = [each for each in knob.older_variables if each in environment]
        if len({environment[each] for each in older}) > 1 and knob.variable not in environment:
            raise SettingsError(f"{' and '.join(older)} differ; set {knob.variable} alone")
        for variable in (*older, knob.variable):
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
        raise SettingsError(f"{knob.flag} is given {len(value)} times, allowed are {MOST_DAEMONS}")
    return tuple(_from_text(knob.flag, knob.kind.from_item, each) for each in value)


def _from_text(where: str, read: Callable[[str], object], text: str) -> object:
    """Raises: SettingsError."""
    value = checked(where, text, read)
    # Keep where a daemon was set, for errors that are found later.
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
    """The folder of sockets, locks and shared memory, created with mode 0700.

    On a tmpfs if possible: GPUs cannot map shared memory of a file on a disk.
    Raises: SettingsError if it cannot be created, is a link, or belongs to another user.
    """
    if settings.run_dir:
        path = Path(settings.run_dir)
    elif runtime_dir := os.environ.get("XDG_RUNTIME_DIR"):
        path = Path(runtime_dir) / "dflash-moe"
    else:
        temporary = Path(os.environ.get("TMPDIR") or "/tmp")
        parent = _SHARED_MEMORY if _is_large_and_ours(_SHARED_MEMORY) else temporary
        path = parent / f"dflash-moe-{os.getuid()}"
    path = path.absolute()  # endpoints need absolute paths
    _make_private(path, "run directory")
    return path


def _is_large_and_ours(folder: Path) -> bool:
    """Whether a folder is writable and on a file system of enough bytes.

    Total size counts, not free space, so that every process gets the same answer.
    """
    try:
        size = os.statvfs(folder)
    except OSError:
        return False
    is_large = size.f_blocks * size.f_frsize >= _LEAST_SHARED_BYTES
    return is_large and os.access(folder, os.W_OK | os.X_OK)


def cache_directory(settings: Settings) -> Path:
    """The folder of compiled kernels, created with mode 0700.

    Raises: SettingsError if it cannot be created, is a link, or belongs to another user.
    """
    path = Path(settings.cache_dir or _home("XDG_CACHE_HOME", ".cache")).absolute()
    _make_private(path, "cache directory")
    return path


def cache_folder(cache_dir: str | None) -> Path:
    """`cache_directory` for this value of the setting; None = the value from `load_settings`.

    Raises: SettingsError.
    """
    return cache_directory(load_settings() if cache_dir is None else Settings(cache_dir=cache_dir))


def keys_directory(settings: Settings) -> Path:
    """The folder of keys; it may not exist."""
    return Path(settings.keys_dir or _home("XDG_CONFIG_HOME", ".config") / "keys").absolute()


def ollama_folders() -> tuple[Path, ...]:
    """Where Ollama may keep models: what ``OLLAMA_MODELS`` names, else this user's folder and that
    of its service. They may not exist."""
    if named := os.environ.get("OLLAMA_MODELS"):
        return (Path(named).absolute(),)
    return (_below_home(".ollama/models"), Path("/usr/share/ollama/.ollama/models"))


def lm_studio_folders() -> tuple[Path, ...]:
    """Where LM Studio keeps models, newer versions first. They may not exist."""
    return (_below_home(".lmstudio/models"), _below_home(".cache/lm-studio/models"))


def _below_home(relative: str) -> Path:
    return Path(os.path.expanduser("~")).absolute() / relative


def state_directory() -> Path:
    """The folder of what people left to be found again, created with mode 0700.

    Raises: SettingsError if it cannot be created, is a link, or belongs to another user.
    """
    path = _home("XDG_STATE_HOME", ".local/state").absolute()
    _make_private(path, "state directory")
    return path


def wants_plain_text() -> bool:
    """Whether terminals are to get no control sequences: ``NO_COLOR`` is set (see no-color.org), or
    ``TERM`` says that it knows none."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "dumb") in ("", "dumb")


def _home(variable: str, below_home: str) -> Path:
    """Our folder in a base directory of the XDG specification."""
    home = os.environ.get(variable) or Path(os.path.expanduser("~")) / below_home
    return Path(home) / "dflash-moe"


def _make_private(path: Path, what: str) -> None:
    """Create a folder. Raises: SettingsError if that fails or it is not private to this user."""
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
    """Environment of a child of the same interpreter: ours, with OpenMP waiting passively, and
    without the service manager's variables.

    `python_paths`, the folders of our packages, come first on the child's import path, since they
    may not be installed.
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
    """Environment of a spawned daemon, with its settings.

    `python_paths` as in `child_environment` if the daemon uses this interpreter. None = another
    launcher, which inherits only a few harmless variables, none that locates this environment's
    libraries, packages or devices, and those of its own ``env`` table.
    """
    if python_paths is not None:
        inherited = child_environment(python_paths)
        environment = {n: text for n, text in inherited.items() if not n.startswith(PREFIX)}
    else:
        environment = {
            name: text
            for name, text in os.environ.items()
            if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
        }
        environment["OMP_WAIT_POLICY"] = "passive"
    for knob in KNOBS:
        value = getattr(settings, knob.field)
        # Defaults are left out, so that an older daemon need not know every setting.
        if knob.reader is Reader.BOTH and value != knob.default:
            environment[knob.variable] = knob.kind.to_text(value)
    return {**environment, **dict(daemon.environment)}


def bare_environment() -> dict[str, str]:
    """Environment of an isolated child: only what its interpreter needs to start."""
    return {name: os.environ[name] for name in _BARE if name in os.environ}


def supervision() -> tuple[str, float]:
    """The service manager's notification socket, "" = none, and its watchdog timeout in seconds,
    0 = none.

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
    """The folders that contain these packages, for a child's import path."""
    roots = []
    for package in packages:
        found = importlib.util.find_spec(package)
        if found is not None and found.origin is not None:
            roots.append(Path(found.origin).parents[1])
    return tuple(dict.fromkeys(roots))
