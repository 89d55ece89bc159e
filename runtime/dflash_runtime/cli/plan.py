"""``dflash-moe plan``: where each expert would be computed, why, and how fast that should be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from dflash_runtime.cli.options import SettingsCommand, settings_options, take_settings
from dflash_runtime.cli.terminal import ProgressReporter, write_lines

_EPILOG = """\b
Examples:
  dflash-moe plan model.gguf
  dflash-moe plan model.gguf --device cuda:0 --context 16384
  dflash-moe plan model.gguf --json
  dflash-moe plan model.gguf --save plan.json
"""


@click.command(cls=SettingsCommand, epilog=_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--save",
    "save_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the plan to a file, too.",
)
@settings_options
def plan(*, as_json: bool, save_path: Path | None, **options: Any) -> None:
    """Say where MODEL's experts would be computed, and how fast, without loading it.

    A device that was not measured yet with such a model is measured first, which takes some
    seconds. Daemons are started or found, and asked what they have.
    """
    settings = take_settings(options)

    # Late: --help and wrong usage must not wait for numpy and the rest.
    from dflash_protocol.process.text_files import write_file
    from dflash_runtime.engine.deciding import plan_of_file
    from dflash_runtime.placement.plan_record import as_json as json_of
    from dflash_runtime.placement.plan_text import plan_text

    with ProgressReporter(enabled=sys.stderr.isatty()) as progress:
        found = plan_of_file(settings, on_progress=progress.update)
    if save_path is not None:
        write_file("plan", save_path, json_of(found))
    if as_json:
        click.echo(json_of(found), nl=False)
    else:
        write_lines(plan_text(found).splitlines())
