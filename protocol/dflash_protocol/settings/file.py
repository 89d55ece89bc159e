"""Settings files: TOML of limited size with the keys of `table`, and ``[[daemon]]`` tables.

::

    ipc_mode = "batched"
    connect = ["ipc:///run/moe/cpu0.sock"]

    [[daemon]]
    device = "cpu"
    launcher = "/opt/other-env/bin/python"
    env = { CUDA_VISIBLE_DEVICES = "1" }
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

from dflash_protocol.errors import SettingsError
from dflash_protocol.process.text_files import file_error, read_file
from dflash_protocol.settings.kinds import (
    EXPERT_BUDGETS,
    MOST_DAEMONS,
    Daemons,
    DaemonSetting,
    PathText,
    Whole,
    check_daemon_device,
    check_expert_budget,
    checked,
    shown,
    unknown,
)
from dflash_protocol.settings.table import EXPERT_COMPUTE, KNOBS, MAX_THREADS, PREFIX, Reader

_LIMIT_BYTES = 1 << 20
_WHAT = "settings file"
_DAEMON = "daemon"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,31}", re.ASCII)
_RESERVED_NAMES = ("local", "fallback")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_LONGEST_VALUE = 32_768
_PASSED_ON = {knob.variable: knob.kind for knob in KNOBS if knob.reader is Reader.BOTH}


def read_settings_file(path: Path) -> dict[str, object]:
    """Checked values of a settings file, by field of Settings.

    Raises: SettingsError naming the file and the key, the value and what is allowed.
    """
    document = _document(path)
    values: dict[str, object] = {}
    for key, value in document.items():
        where = f"{path}: {key}"
        if key == _DAEMON:
            values["daemons"] = _daemons(where, value)
            continue
        knob = next((each for each in KNOBS if each.key == key), None)
        if knob is None:
            known = [each.key for each in KNOBS]
            raise file_error(_WHAT, path, unknown("key", key, known))
        values[knob.field] = checked(where, value, knob.kind.from_file)
    return values


def _document(path: Path) -> dict[str, object]:
    data = read_file(_WHAT, path, limit_bytes=_LIMIT_BYTES)
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError:
        raise file_error(_WHAT, path, "not UTF-8 text") from None
    except ValueError as error:  # TOMLDecodeError, and numbers that are too long
        raise file_error(_WHAT, path, str(error)) from None
    except RecursionError:
        raise file_error(_WHAT, path, "nested too deeply") from None


def _daemons(where: str, tables: object) -> tuple[DaemonSetting, ...]:
    if not isinstance(tables, list) or len(tables) > MOST_DAEMONS:
        raise SettingsError(f"{where}: must be at most {MOST_DAEMONS} tables, each [[daemon]]")
    return tuple(_daemon(f"{where}[{index}]", table) for index, table in enumerate(tables))


def _daemon(where: str, table: object) -> DaemonSetting:
    if not isinstance(table, dict):
        raise SettingsError(f"{where}={shown(table)}: must be a table, as [[daemon]] begins one")
    values: dict[str, object] = {"device": "cpu"}
    for key, value in table.items():
        if key not in DAEMON_KEYS:
            known = ", ".join(DAEMON_KEYS)
            raise SettingsError(f"{where}: unknown key {shown(key)}; known are {known}")
        field, read = DAEMON_KEYS[key]
        values[field] = checked(f"{where}.{key}", value, read)
    daemon = DaemonSetting(**values, source=where)  # type: ignore[arg-type]
    check_expert_budget(where, daemon)
    return daemon


def _device(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be {Daemons.allowed}")
    check_daemon_device(value)
    return value


def _name(value: object) -> str:
    is_name = isinstance(value, str) and _NAME.fullmatch(value) and value not in _RESERVED_NAMES
    if not is_name:
        raise ValueError(
            "must be a letter and up to 31 letters, digits, dots or dashes, "
            f"and none of {', '.join(_RESERVED_NAMES)}"
        )
    return str(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError("must be text of printable characters")
    return value


def _environment(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise ValueError("must be a table of variables, as in { NAME = 'text' }")
    for name, text in value.items():
        if not _VARIABLE_NAME.fullmatch(name):
            raise ValueError(f"{shown(name)} is not the name of a variable")
        if not isinstance(text, str) or "\0" in text or len(text) > _LONGEST_VALUE:
            raise ValueError(f"the value of {name} must be text, at most {_LONGEST_VALUE} long")
        if name.startswith(PREFIX):
            if name not in _PASSED_ON:
                wrong = unknown("variable", name, _PASSED_ON, prefixes=(EXPERT_COMPUTE, PREFIX))
                raise ValueError(f"a spawned daemon does not read it: {wrong}")
            _PASSED_ON[name].from_text(text)
    return tuple(value.items())


DAEMON_KEYS: dict[str, tuple[str, Callable[..., object]]] = {
    # key: field of DaemonSetting, reader
    "name": ("name", _name),
    "device": ("device", _device),
    "launcher": ("launcher", PathText("").from_file),
    "env": ("environment", _environment),
    "cores": ("cores", _text),
    "threads": ("threads", Whole(1, MAX_THREADS).from_file),
    **{key: (key, kind.from_file) for key, kind in EXPERT_BUDGETS.items()},
}
"""The keys of a ``[[daemon]]`` table."""
