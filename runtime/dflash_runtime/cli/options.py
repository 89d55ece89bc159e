"""What commands read: settings as options, generated from their table, and files of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from dflash_protocol.errors import SettingsError
from dflash_protocol.process.output import log_to_stderr
from dflash_protocol.process.text_files import file_error, read_file
from dflash_protocol.settings import Settings, load_settings
from dflash_protocol.settings.kinds import Switch
from dflash_protocol.settings.table import (
    KNOBS,
    SETTINGS_FLAG,
    SETTINGS_HELP,
    Knob,
    chat_knobs,
    knobs_of,
    server_knobs,
)

F = TypeVar("F", bound=Callable[..., Any])

_FILE = "settings_file"
_TEMPLATE_LIMIT_BYTES = 1 << 20
_COMMON = (
    "--device", "--daemon", "--connect", "--require-daemons", "--local-experts", "--context",
    "--threads",
)  # fmt: skip
"""Settings listed among a command's own options; the rest have a heading of their own."""


_KV_FLAGS = {"-ctk": "keys_type", "-ctv": "values_type"}
"""llama.cpp's two flags for what is one setting here, with their parameters' names."""


class SettingOption(click.Option):
    """An option that is a setting."""


class SettingsCommand(click.Command):
    """Lists its settings under a heading of their own, after the command's options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        settings: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                is_setting = isinstance(parameter, SettingOption)
                is_common = any(flag in _COMMON for flag in parameter.opts)
                (settings if is_setting and not is_common else own).append(record)
        with formatter.section("Options"):
            formatter.write_dl(own)
        with formatter.section("Settings (also variables and keys of a settings file)"):
            formatter.write_dl(settings)


def server_options(function: F) -> F:
    """Decorator: add a server's settings to a command that has `settings_options`."""
    return _with_options(server_knobs(), function)


def chat_options(function: F) -> F:
    """Decorator: add a chat's settings to a command that has `settings_options`."""
    return _with_options(chat_knobs(), function)


def settings_options(function: F) -> F:
    """Decorator: add a parent's settings to a command, the argument MODEL among them.

    `take_settings` reads them.
    """
    function = _with_options(knobs_of(daemon=False), function)
    for flag in reversed(_KV_FLAGS):
        function = click.option(
            flag,
            _KV_FLAGS[flag],
            metavar="TYPE",
            type=str,
            cls=SettingOption,
            help="As --kv-type: keys and values have one type, so both are given, and equal.",
        )(function)
    return click.option(
        SETTINGS_FLAG,
        _FILE,
        metavar="FILE",
        type=click.Path(path_type=Path),
        cls=SettingOption,
        help=SETTINGS_HELP,
    )(function)


def take_settings(options: dict[str, Any]) -> Settings:
    """Remove the settings from a command's options and return them as Settings; from now on, what
    is logged is as they say.

    Raises: SettingsError.
    """
    file = options.pop(_FILE)
    flags = {knob.field: options.pop(knob.field) for knob in KNOBS if knob.field in options}
    kv_types = {flag: options.pop(name, None) for flag, name in _KV_FLAGS.items()}
    if any(kv_types.values()):
        flags["kv_type"] = _one_kv_type({**kv_types, "--kv-type": flags["kv_type"]})
    settings = load_settings(file=file, flags=flags)
    log_to_stderr("dflash-moe", level=settings.log_level, is_json=settings.log_format == "json")
    return settings


def _one_kv_type(given: Mapping[str, str | None]) -> str:
    """The type that llama.cpp's two flags name, and `--kv-type` if it is given.

    Raises: SettingsError if they are not equal.
    """
    values = [value.strip().lower() for value in given.values() if value]
    if all(given[flag] for flag in _KV_FLAGS) and len(set(values)) == 1:
        return values[0]
    asked = ", ".join(f"{flag} {value}" for flag, value in given.items() if value)
    raise SettingsError(
        f"{asked}: keys and values have one type: give {' and '.join(_KV_FLAGS)} the same, "
        "or --kv-type alone"
    )


def chat_template_of(settings: Settings) -> str | None:
    """The template that the settings name in place of the model's; None: they name none.

    Raises: SettingsError.
    """
    if not settings.chat_template_file:
        return None
    path = Path(settings.chat_template_file)
    return read_text("chat template", path, limit_bytes=_TEMPLATE_LIMIT_BYTES)


def read_text(kind: str, path: Path, *, limit_bytes: int) -> str:
    """A file's text. `kind` names it in messages.

    Raises: SettingsError if it cannot be read, is larger than the limit, or not UTF-8.
    """
    try:
        return read_file(kind, path, limit_bytes=limit_bytes).decode()
    except UnicodeDecodeError:
        raise file_error(kind, path, "not UTF-8 text") from None


def _with_options(knobs: Sequence[Knob], function: F) -> F:
    for knob in reversed(knobs):
        function = _option_of(knob)(function)
    return function


def _option_of(knob: Knob) -> Callable[[F], F]:
    # Values are checked with those of variables and files, for the same error messages.
    if knob.is_argument:
        return click.argument(knob.field, metavar=f"[{knob.flag}]", required=False, type=str)
    if isinstance(knob.kind, Switch):
        flags = f"{knob.flag}/--no-{knob.flag.removeprefix('--')}"
        return click.option(flags, knob.field, default=None, cls=SettingOption, help=_help_of(knob))
    names = [knob.flag, *([knob.short_flag] if knob.short_flag else [])]
    return click.option(
        *names,
        knob.field,
        metavar=knob.kind.metavar,
        type=str,
        multiple=knob.kind.is_repeatable,
        cls=SettingOption,
        help=_help_of(knob),
    )


def _help_of(knob: Knob) -> str:
    if knob.kind.is_repeatable:
        return knob.help + " Repeatable."
    return f"{knob.help} [{knob.default_text}]" if knob.default_text else knob.help
