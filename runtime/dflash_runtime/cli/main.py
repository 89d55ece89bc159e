"""Entry point: commands, exit codes, and one-line errors.

Exit codes: 0 done, 1 failed, 2 misused (a flag, a setting, a prompt), 130 interrupted.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Sequence

import click

from dflash_protocol import __version__
from dflash_protocol.errors import DflashError, SettingsError, lack_of
from dflash_protocol.process.output import log_to_stderr, say
from dflash_protocol.process.startup import prepare_standard_streams
from dflash_runtime.cli.bench import bench
from dflash_runtime.cli.chat import chat
from dflash_runtime.cli.doctor import doctor
from dflash_runtime.cli.generate import generate
from dflash_runtime.cli.inspect import inspect
from dflash_runtime.cli.keygen import keygen
from dflash_runtime.cli.models import list_models, remove_model
from dflash_runtime.cli.plan import plan
from dflash_runtime.cli.pull import pull
from dflash_runtime.cli.serve import serve
from dflash_runtime.cli.simulate import simulate
from dflash_runtime.cli.stats import stats
from dflash_runtime.interrupts import interrupt_once

_CANNOT_WRITE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EBADF)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every command has examples: dflash-moe COMMAND --help",
)
@click.version_option(
    __version__, prog_name="dflash-moe", message="%(prog)s %(version)s", help="Print the version."
)
def cli() -> None:
    """Run Mixture-of-Experts GGUF models with their experts computed by daemons."""


@cli.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def daemon(arguments: tuple[str, ...]) -> None:
    """Compute experts for parents that connect."""
    # -P: import nothing from the working directory.
    command = [sys.executable, "-P", "-m", "dflash_daemon", *arguments]
    os.execv(command[0], command)


@cli.command(epilog="\b\nExamples:\n  dflash-moe version\n")
def version() -> None:
    """Print the version."""
    click.echo(f"dflash-moe {__version__}")


for _command in (
    bench, chat, doctor, generate, inspect, keygen, list_models, plan, pull, remove_model, serve,
    simulate, stats,
):  # fmt: skip
    cli.add_command(_command)
for _command in cli.commands.values():
    # Else the list of commands truncates it.
    _command.short_help = " ".join((_command.help or "").partition("\n\n")[0].split())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    prepare_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal cannot show must not end the run.
            stream.reconfigure(errors="replace")
    log_to_stderr("dflash-moe")
    interrupt_once()
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        exit_code = cli.main(args=arguments, prog_name="dflash-moe", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except SettingsError as error:
        return _fail(str(error), 2)
    except DflashError as error:
        return _fail(str(error), 1)
    except (KeyboardInterrupt, click.Abort):  # before RuntimeError, which an Abort is too
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nor while the interpreter ends
        return _fail("interrupted", 130)
    except (MemoryError, RuntimeError) as error:
        if (lack := lack_of(error)) is None:
            raise
        return _fail(lack, 1)
    except BrokenPipeError:
        # The reader of our output has closed it.
        _discard_stdout()
        return 1
    except OSError as error:
        _discard_stdout()
        cannot_write = error.errno in _CANNOT_WRITE and error.filename is None
        return _fail(f"cannot write: {error.strerror}" if cannot_write else str(error), 1)
    return exit_code if isinstance(exit_code, int) else 0


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null, so that the interpreter does not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, exit_code: int) -> int:
    first_line, *_ = message.splitlines() or [""]
    # docs: the program ends; see *Errors*
    say(f"error: {first_line}", program="dflash-moe", level="error")
    return exit_code
