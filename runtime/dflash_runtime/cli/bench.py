"""``dflash-moe bench``: how fast prompts are read and tokens written, as a table to pass on."""

from __future__ import annotations

import csv
import io
import os
import platform
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dflash_protocol import __version__
from dflash_protocol.errors import SettingsError, one_line
from dflash_protocol.process.output import ascii_json, noun
from dflash_protocol.settings import wants_plain_text
from dflash_runtime.cli.options import SettingsCommand, settings_options, take_settings
from dflash_runtime.cli.terminal import ProgressReporter, write_lines

if TYPE_CHECKING:
    from dflash_runtime.engine.engine import Engine
    from dflash_runtime.tools.rates import Rates

_MOST_SIZES = 32
_LARGEST = 1 << 24
_MOST_REPETITIONS = 1000
_TEST, _RATE = 14, 16
"""Widths of the table's columns."""

_EPILOG = """\b
Examples:
  dflash-moe bench model.gguf
  dflash-moe bench model.gguf -p 512,2048 -n 128 -d 0,4096 -r 3
  dflash-moe bench model.gguf --device cuda:0 --expert-budget-mb 8000 --daemon cpu
  dflash-moe bench model.gguf --csv > rates.csv

\b
ppN is a prompt of N tokens, tgN are N tokens that are written; "@ dN" after a
prompt of N. Each is run once to warm up, and then -r times: mean ± standard
deviation. The default is a Markdown table, to be pasted into an issue.
"""


@click.command(cls=SettingsCommand, epilog=_EPILOG)
@click.option(
    "-p",
    "--prompts",
    metavar="N,N…",
    default="512",
    show_default=True,
    help="Tokens of prompts that are read; 0 for none.",
)
@click.option(
    "-n",
    "--written",
    metavar="N,N…",
    default="128",
    show_default=True,
    help="Tokens that are written; 0 for none.",
)
@click.option(
    "-d",
    "--depths",
    metavar="N,N…",
    default="0",
    show_default=True,
    help="Tokens of the prompts that these are written after.",
)
@click.option(
    "-r",
    "--repetitions",
    metavar="N",
    default=5,
    show_default=True,
    type=click.IntRange(1, _MOST_REPETITIONS),
    help="Runs of each test.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
@settings_options
def bench(**options: Any) -> None:
    """Measure how fast MODEL, a GGUF file, reads prompts and writes tokens here."""
    settings = take_settings(options)
    if options["as_json"] and options["as_csv"]:
        raise SettingsError("--json and --csv exclude each other")
    names = {"prompts": "-p", "written": "-n", "depths": "-d"}
    prompts, written, depths = (_sizes(flag, options[name]) for name, flag in names.items())

    # Late: --help and wrong usage must not wait for numpy and the rest.
    from dflash_runtime.bus_errors import explain_bus_errors
    from dflash_runtime.engine.demo_model import chosen_model_path
    from dflash_runtime.engine.engine import Engine
    from dflash_runtime.tools.rates import measured, require_room, trials_of

    trials = trials_of(prompts, written, after=depths)
    if not trials:
        raise SettingsError("nothing is to be measured: -p and -n are 0")
    explain_bus_errors("dflash-moe", chosen_model_path(settings))
    is_table = not (options["as_json"] or options["as_csv"])
    shows_progress = sys.stderr.isatty() and not wants_plain_text()
    with ProgressReporter(enabled=shows_progress) as progress:
        engine = Engine.open(settings=settings, learns_heat=True, on_progress=progress.update)
    with engine:
        require_room(trials, engine.num_positions)
        setup = _setup(engine)
        if is_table:
            write_lines([*_head(setup), "", _row("test", "tokens/s"), _rule()])
        rates = []
        for trial in trials:
            with ProgressReporter(enabled=shows_progress) as progress:

                def report(done: int, total: int, name: str = trial.name) -> None:
                    progress.update("bench", name, done, total)

                found = measured(
                    engine, trial, repetitions=options["repetitions"], on_progress=report
                )
            rates.append(found)
            if is_table:
                write_lines([_row(trial.name, f"{found.mean:.1f} ± {found.deviation:.1f}")])
                sys.stdout.flush()
    if options["as_json"]:
        click.echo(ascii_json({**setup, "tests": [_record(each) for each in rates]}))
    elif options["as_csv"]:
        click.echo(_csv(setup, rates), nl=False)


def _sizes(flag: str, text: str) -> list[int]:
    """Numbers with commas. Raises: SettingsError."""
    parts = text.split(",")
    if len(parts) > _MOST_SIZES:
        raise SettingsError(f"{flag}: {len(parts)} numbers, allowed are {_MOST_SIZES}")
    is_sound = all(part.strip().isascii() and part.strip().isdigit() for part in parts)
    if not is_sound or any(len(part) > 12 or int(part) > _LARGEST for part in parts):
        raise SettingsError(
            f"{flag} {text[:40]!r}: must be numbers from 0 to {_LARGEST}, with commas"
        )
    return [int(part) for part in parts]


def _setup(engine: Engine) -> dict[str, Any]:
    """What is measured, and on what."""
    from dflash_adapters.gguf.file import GgufFile
    from dflash_runtime.compute.memory import host_memory
    from dflash_runtime.compute.topology import processor_name

    with GgufFile.open(engine.model_path) as file:
        num_bytes, file_name = file.size_bytes, file.path.name
    moe = engine.spec.moe
    types = {projection.tensor_type.name for each in moe.layers for projection in each.projections}
    return {
        "version": __version__,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "model": engine.spec.name,
        "file": file_name,
        "arch": engine.spec.architecture,
        "bytes": num_bytes,
        "experts": {"bytes": moe.expert_bytes_total, "types": sorted(types)},
        "processor": processor_name(),
        "processors": len(os.sched_getaffinity(0)),
        "memory_bytes": host_memory().total_bytes,
        "backend": engine.backend_name,
        "device": engine.device_name,
        "kv_type": engine.kv_type,
        "context": engine.num_positions,
        "owners": {
            name: {"kind": owner.kind.value, "experts": owner.num_experts}
            for name, owner in engine.stats().owners.items()
        },
    }


def _head(setup: dict[str, Any]) -> list[str]:
    experts = setup["experts"]
    owners = ", ".join(
        f"{name} {each['experts']}" for name, each in setup["owners"].items() if each["experts"]
    )
    count = setup["processors"]
    return [
        f"- dflash-moe {setup['version']}, {setup['system']}, Python {setup['python']}",
        f"- {_code(setup['model'])} ({setup['arch']}), {_gib(setup['bytes'])}; "
        f"experts {_gib(experts['bytes'])}, {', '.join(experts['types'])}",
        f"- {setup['processor']}, {count} {noun(count, 'processor')}, "
        f"{_gib(setup['memory_bytes'])} of memory",
        f"- on {setup['device']} ({setup['backend']}); keys and values {setup['kv_type']}, "
        f"context {setup['context']}",
        f"- experts by owner: {owners}",
    ]


def _code(text: str) -> str:
    """A text of the file as Markdown's code, so that no link or picture is made of it."""
    return f"`{text.replace('`', chr(39))}`"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes >> 20} MiB"


def _row(test: str, rate: str) -> str:
    return f"| {test:{_TEST}s} | {rate:>{_RATE}s} |"


def _rule() -> str:
    return f"| {'-' * _TEST} | {'-' * (_RATE - 1)}: |"


def _record(rates: Rates) -> dict[str, object]:
    return {
        "test": rates.trial.name,
        "prompt": rates.trial.num_prompt,
        "written": rates.trial.num_written,
        "mean_tok_s": rates.mean,
        "stddev_tok_s": rates.deviation,
        "tok_s": list(rates.tokens_per_s),
    }


def _csv(setup: dict[str, Any], rates: Sequence[Rates]) -> str:
    """A line of names, and one for each test; of its runs only mean and deviation."""
    head = ("version", "model", "file", "arch", "bytes", "processor", "processors", "backend",
            "device", "kv_type", "context")  # fmt: skip
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    records = [_record(each) for each in rates]
    own = [name for name in records[0] if name != "tok_s"]
    writer.writerow([*head, *own, "repetitions"])
    for record, each in zip(records, rates, strict=True):
        texts = [one_line(setup[name]) for name in head]
        writer.writerow([*texts, *(record[name] for name in own), len(each.tokens_per_s)])
    return out.getvalue()
