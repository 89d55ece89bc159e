"""Command line of the expert-compute daemon: ``python -m dflash_daemon MODEL``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from dflash_protocol import __version__
from dflash_protocol.errors import DflashError, SettingsError, lack_of
from dflash_protocol.process.output import log_to_stderr, said, say
from dflash_protocol.process.startup import prepare_standard_streams
from dflash_protocol.settings import load_settings
from dflash_protocol.settings.kinds import Switch
from dflash_protocol.settings.table import SETTINGS_FLAG, SETTINGS_HELP, knobs_of

_PROGRAM = "dflash-daemon"
_EXAMPLES = """examples:
  dflash-moe daemon model.gguf
  dflash-moe daemon model.gguf --listen ipc:///run/user/1000/dflash-moe/cpu0.sock --threads 4
  dflash-moe generate model.gguf -p "Once" --connect ipc:///run/user/1000/dflash-moe/cpu0.sock
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the daemon. Returns the exit code: 0 stopped, 1 failed, 2 wrong usage."""
    prepare_standard_streams()
    options = _parser().parse_args(arguments)
    log_to_stderr(_PROGRAM)
    try:
        flags = {knob.field: getattr(options, knob.field) for knob in knobs_of(daemon=True)}
        settings = load_settings(file=options.settings, flags=flags)
        log_to_stderr(_PROGRAM, level=settings.log_level, is_json=settings.log_format == "json")
        if not settings.model:
            raise SettingsError("name a GGUF file: MODEL, or the setting of that name")
        # Imported late, so that --help and usage errors are fast.
        from dflash_daemon.lifecycle import run_daemon

        run_daemon(settings, options.lifeline_fd)
    except SettingsError as error:
        say(f"error: {error}", program=_PROGRAM, level="error")
        return 2
    except (DflashError, OSError) as error:
        say(f"error: {error}", program=_PROGRAM, level="error")
        return 1
    except ImportError as error:
        # docs: the launcher's environment has no such library; install dflash-moe in it, see
        # `dflash-moe doctor`
        reason = f"{sys.executable} lacks what a daemon needs: {_first_line(error)}"
        say(f"error: {reason}", program=_PROGRAM, level="error")
        return 1
    except (MemoryError, RuntimeError) as error:
        if (lack := lack_of(error)) is None:
            raise
        say(f"error: {lack}", program=_PROGRAM, level="error")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class _Parser(argparse.ArgumentParser):
    """Reports usage errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, said(f"error: {message}", program=_PROGRAM) + "\n")


class _Report(argparse.Action):
    """Prints the devices and libraries found, for ``dflash-moe doctor``, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        from dflash_runtime.compute.inventory import inventory

        print(json.dumps(inventory()))
        parser.exit()


class _Echo(argparse.Action):
    """Is the peer of a mailbox trial, for ``dflash-moe doctor --mailbox``, and exits."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: object, values: Any, *__: object
    ) -> NoReturn:
        from dflash_runtime.tools import echo

        log_to_stderr(_PROGRAM)
        parser.exit(echo.main(*values))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dflash-moe daemon",
        description="Compute a model's experts for parents that connect. Metadata are read at\n"
        "start; experts are loaded once a placement is known, and no others.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lifeline-fd", metavar="FD", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--report", action=_Report, nargs=0, help=argparse.SUPPRESS)
    parser.add_argument("--echo", action=_Echo, nargs=3, help=argparse.SUPPRESS)
    settings = parser.add_argument_group("settings (also variables and keys of a settings file)")
    settings.add_argument(SETTINGS_FLAG, metavar="FILE", type=Path, help=SETTINGS_HELP)
    for knob in knobs_of(daemon=True):
        # load_settings checks the values, so that errors read as for variables and files.
        note = f" [{knob.default_text}]" if knob.default_text else ""
        if knob.is_argument:
            parser.add_argument(knob.field, metavar=knob.flag, nargs="?", help=knob.help)
        elif isinstance(knob.kind, Switch):
            action = argparse.BooleanOptionalAction
            settings.add_argument(knob.flag, dest=knob.field, action=action, help=knob.help + note)
        else:
            settings.add_argument(
                knob.flag, dest=knob.field, metavar=knob.kind.metavar, help=knob.help + note
            )
    parser.add_argument("--version", action="version", version=f"dflash-moe {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
