"""``dflash-moe list`` and ``rm``: the models of this machine that have names."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from dflash_protocol.errors import SettingsError, one_line
from dflash_protocol.process.output import ascii_json, say
from dflash_runtime.cli.terminal import shown_bytes, write_lines

if TYPE_CHECKING:
    from dflash_adapters.library.found_model import FoundModel
    from dflash_runtime.tools.pulling.removal import Removable

_LIST_EPILOG = """\b
Examples:
  dflash-moe list
  dflash-moe list --json
"""
_REMOVE_EPILOG = """\b
Examples:
  dflash-moe rm OWNER/MODEL:Q4_K_M
  dflash-moe rm OWNER/MODEL:Q4_K_M --yes
"""
_AGES = ((86_400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


@click.command("list", epilog=_LIST_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_models(as_json: bool) -> None:
    """List models that can be used by name: in the hub's cache, LM Studio's and Ollama's folders.

    Shows when a file was last read, as far as the file system notes it, and what pull has begun.
    """
    from dflash_adapters.library.finding import all_models
    from dflash_runtime.tools.pulling.removal import unfinished

    models, begun = all_models(), unfinished()
    if as_json:
        click.echo(
            ascii_json(
                {
                    "models": [_record(each) for each in models],
                    "unfinished": [_begun_record(each) for each in begun],
                }
            )
        )
        return
    rows = [("NAME", "SIZE", "TYPE", "USED", "WHERE")]
    now_s = time.time()
    for model in models:
        rows.append(
            (
                model.name,
                shown_bytes(model.size_bytes),
                model.quantisation or "-",
                _ago(now_s - max(model.used_s, model.changed_s)),
                f"{model.library}{', pulled' if model.is_pulled else ''}",
            )
        )
    for each in begun:
        share = each.present_bytes / max(each.size_bytes, 1)
        rows.append((each.name, shown_bytes(each.size_bytes), "-", "-", f"hub, {share:.0%} pulled"))
    if len(rows) == 1:
        write_lines(["no models; dflash-moe pull OWNER/MODEL:QUANTISATION fetches one"])
        return
    shown = [[one_line(cell, 200) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    write_lines(
        f"{row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:{widths[2]}}  {row[3]:{widths[3]}}  "
        f"{row[4]}"
        for row in shown
    )


@click.command("rm", epilog=_REMOVE_EPILOG)
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def remove_model(context: click.Context, /, name: str, yes: bool) -> None:
    """Remove the model NAME, if pull has brought it, or what it has fetched of it.

    Ollama's and LM Studio's models, and what other programs have put into the hub's cache, are left
    alone.
    """
    from dflash_adapters.library.names import require_name
    from dflash_runtime.tools.pulling.removal import removable, remove, users_of

    model = removable(require_name(name))
    if users := users_of(model.blobs):
        raise SettingsError(f"{model.name}: is in use by {', '.join(users)}")
    if not yes:
        if not sys.stdin.isatty():
            raise SettingsError(f"{model.name}: is not removed without being asked for; give --yes")
        question = f"remove {model.name}, {shown_bytes(model.present_bytes)}?"
        if not click.confirm(one_line(question), err=True):
            # docs: the answer was no
            say("nothing was removed", program="dflash-moe")
            context.exit(1)
    remove(model)
    # docs: its files are gone, and what of the repository's folder was empty then
    say(f"removed {model.name}, {shown_bytes(model.present_bytes)}", program="dflash-moe")


def _record(model: FoundModel) -> dict[str, object]:
    return {
        "name": model.name,
        "bytes": model.size_bytes,
        "quantisation": model.quantisation or None,
        "library": model.library.name.lower(),
        "pulled": model.is_pulled,
        "paths": [str(path) for path in model.paths],
        "changed": _when(model.changed_s),
        "used": _when(model.used_s),
    }


def _begun_record(model: Removable) -> dict[str, object]:
    return {
        "name": model.name,
        "bytes": model.size_bytes,
        "present_bytes": model.present_bytes,
        "paths": [str(path) for path in model.blobs],
    }


def _when(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")


def _ago(age_s: float) -> str:
    for unit_s, unit in _AGES:
        if age_s >= unit_s:
            count = int(age_s / unit_s)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
