"""``dflash-moe doctor``: what can be used on this machine; how fast it is; a trial of a mailbox."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import click

from dflash_protocol.process.output import ascii_json
from dflash_runtime.cli.options import SettingsCommand, settings_options, take_settings
from dflash_runtime.cli.terminal import ProgressReporter, write_lines

_EPILOG = """\b
Examples:
  dflash-moe doctor
  dflash-moe doctor --daemon cpu --daemon cuda:0@/opt/cuda-env/bin/python
  dflash-moe doctor --settings moe.toml --json
  dflash-moe doctor --mailbox cuda:0 cuda:1 --rounds 10000000
  dflash-moe doctor --measure model.gguf --device cuda:0
"""


@click.command(cls=SettingsCommand, epilog=_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--mailbox",
    nargs=2,
    metavar="DEVICE DEVICE",
    help="Try the mailbox between two GPUs instead: what arrives, and how fast. The second is a "
    "daemon's, DEVICE[@LAUNCHER].",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 10**9),
    default=10**6,
    show_default=True,
    help="Round trips of --mailbox, in each kind of memory.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=1,
    show_default=True,
    help="Of what --mailbox sends.",
)
@click.option(
    "--measure",
    is_flag=False,
    flag_value="",
    metavar="[MODEL]",
    help="Measure instead what the devices, links and the disk do with a model: a minute. What is "
    "found is kept, and used at starts. Without a file: the settings' model, else the demo model.",
)
@settings_options
@click.pass_context
def doctor(
    context: click.Context,
    /,
    *,
    as_json: bool,
    mailbox: tuple[str, str] | None,
    rounds: int,
    seed: int,
    measure: str | None,
    **options: Any,
) -> None:
    """Show what can be used here, and why not; exit code 1 if what is asked for cannot."""
    settings = take_settings(options)
    if mailbox:
        from dflash_runtime.tools.doctor_mailbox import try_mailbox

        with ProgressReporter(enabled=sys.stderr.isatty()) as progress:
            found_mailbox = try_mailbox(
                mailbox, settings, num_rounds=rounds, seed=seed, on_progress=progress.update
            )
        if as_json:
            click.echo(found_mailbox.as_json())
        else:
            write_lines(found_mailbox.as_text().split("\n"))
        context.exit(1 if found_mailbox.problems else 0)
    if measure is not None:
        from dflash_runtime.tools.doctor_measure import measure as measure_machine

        with ProgressReporter(enabled=sys.stderr.isatty()) as progress:
            measured = measure_machine(measure, settings, on_progress=progress.update)
        if as_json:
            click.echo(measured.as_json())
        else:
            write_lines(measured.as_lines())
        return
    from dflash_runtime.tools.doctor import examine, shown

    found = examine(settings)
    if as_json:
        click.echo(ascii_json(dataclasses.asdict(found)))
    else:
        write_lines(shown(found))
    context.exit(1 if found.problems else 0)
