"""``dflash-moe stats``: how often each expert was chosen, from a heat file: a picture and sums."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_protocol.errors import SettingsError
from dflash_protocol.process.output import ascii_json, noun
from dflash_runtime.cli.terminal import write_lines

if TYPE_CHECKING:
    from dflash_protocol.ids import F64Array, I64Array
    from dflash_runtime.placement.heat_file import HeatFile

_SHARE_OF = {"experts_for_50": 0.5, "experts_for_80": 0.8, "experts_for_90": 0.9}
_SHADES = " ░▒▓█"
_ASCII_SHADES = " .+*#"
_COLOURS = (17, 54, 90, 126, 162, 198, 208, 214, 220, 226)
"""Of 256, from cold to hot."""
_TABLE_COLUMNS = 47
_FEWEST_CELLS = 8

_EPILOG = """\b
Examples:
  dflash-moe stats model.gguf.heat
  dflash-moe stats run.heat --phase prefill
  dflash-moe stats run.heat --json
  dflash-moe stats model.gguf.heat --csv hotness.csv
"""


@click.command(epilog=_EPILOG)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--phase",
    type=click.Choice(["all", "prefill", "decode"], case_sensitive=False),
    default="all",
    show_default=True,
    help="Count only selections of prompts, or only those of written tokens.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--csv",
    "csv_path",
    metavar="OUT",
    type=click.Path(path_type=Path),
    help="Write all counts as the older system's CSV, instead of showing them.",
)
def stats(file: Path, *, phase: str, as_json: bool, csv_path: Path | None) -> None:
    """Show how often each expert was chosen, from FILE: a model's heat, statistics or a CSV.

    FILE is kept beside a model (MODEL.heat), or written by --expert-stats; see docs/files.md.
    """
    from dflash_protocol.hotness import write_hotness
    from dflash_runtime.placement.heat_file import read_heat_file

    if csv_path is not None and (as_json or phase != "all"):
        raise SettingsError("--csv goes with neither --json nor --phase")
    heat_file = read_heat_file(file)
    if csv_path is not None:
        write_hotness(csv_path, heat_file.as_hotness())
    elif as_json:
        click.echo(ascii_json(_record(heat_file, phase)))
    else:
        write_lines(_summary(heat_file, phase))
        for line in _picture(heat_file, phase):
            click.echo(line, color=True)  # it has colours only where they can be shown
        write_lines(_owner_lines(heat_file, phase))


def _counts(file: HeatFile, phase: str) -> I64Array:
    """Selections by layer and expert. Shapes: result [L, E]."""
    prefill, decode = file.heat.totals
    counts: I64Array = {"prefill": prefill, "decode": decode}.get(phase, prefill + decode)
    return counts


def _experts_for_all(counts: I64Array) -> list[int]:
    """How many experts of the whole model take each of the shares."""
    from dflash_runtime.placement.heat import experts_for

    return [experts_for(counts.reshape(-1), share) for share in _SHARE_OF.values()]


def _record(file: HeatFile, phase: str) -> dict[str, object]:
    from dflash_runtime.placement.heat import experts_for, hottest_share

    heat, counts = file.heat, _counts(file, phase)
    layers = []
    for layer, each in zip(heat.layers, counts, strict=True):
        has_reported = bool(each.any())
        selections = each[: layer.num_experts]
        layers.append(
            {
                "layer": layer.layer_id,
                "experts": layer.num_experts,
                "experts_used": layer.num_experts_used,
                "reported": has_reported,
                "selections": selections.tolist() if has_reported else None,
                "hottest_tenth": hottest_share(selections, _tenth(layer.num_experts))
                if has_reported
                else None,
                **{
                    name: experts_for(selections, share) if has_reported else None
                    for name, share in _SHARE_OF.items()
                },
            }
        )
    return {
        "model": file.model_name,
        "identity": file.identity,
        "phase": phase,
        "tokens": _num_tokens(file, phase),
        "half_lives": {"fast": heat.half_lives.fast, "slow": heat.half_lives.slow},
        "experts": sum(each.num_experts for each in heat.layers),
        **dict(zip(_SHARE_OF, _experts_for_all(counts), strict=True)),
        "owners": {
            name: {"prefill": prefill, "decode": decode}
            for name, (prefill, decode) in heat.pairs_of_owner.items()
        },
        "layers": layers,
    }


def _num_tokens(file: HeatFile, phase: str) -> int:
    from dflash_protocol.ids import Phase

    return file.heat.num_tokens(None if phase == "all" else Phase(phase))


def _tenth(num_experts: int) -> int:
    return -(-num_experts // 10)


def _summary(file: HeatFile, phase: str) -> list[str]:
    heat, counts = file.heat, _counts(file, phase)
    num_tokens, num_silent = _num_tokens(file, phase), int((~counts.any(axis=1)).sum())
    which = {"prefill": " of prompts", "decode": " written"}.get(phase, "")
    lines = [
        f"model    {file.model_name or 'not named'}"
        + (f", identity {file.identity[:16]}" if file.identity else ""),
        f"heat     {num_tokens:,} {noun(num_tokens, 'token')}{which}, {counts.sum():,} selections",
    ]
    if counts.any():
        total = sum(each.num_experts for each in heat.layers)
        needed = zip(_SHARE_OF.values(), _experts_for_all(counts), strict=True)
        lines.append(
            f"experts  of {total:,}: "
            + ", ".join(f"{number:,} take {share:.0%}" for share, number in needed)
        )
    if num_silent:
        lines.append(f"silent   {num_silent} {noun(num_silent, 'layer')} never reported")
    return [*lines, ""]


def _picture(file: HeatFile, phase: str) -> list[str]:
    """A row for each layer: its experts as cells, each as hot as the mean of those in it; then how
    many experts take the shares. Plain unless the output is a terminal."""
    from rich.console import Console

    from dflash_runtime.placement.heat import experts_for, hottest_share

    heat, console = file.heat, Console()
    num_cells = min(heat.shape[2], max(_FEWEST_CELLS, console.width - _TABLE_COLUMNS))
    shades = _SHADES if _can_show(_SHADES) else _ASCII_SHADES
    has_colour = console.color_system in ("256", "truecolor") and not console.no_color
    head = f"{'layer':>5s}  {'experts':{num_cells}s}  {'tokens':>11s} {'top 10%':>8s}"
    lines = [head + "".join(f" {f'{share:.0%}':>5s}" for share in _SHARE_OF.values())]
    for layer, counts in zip(heat.layers, _counts(file, phase), strict=True):
        selections = counts[: layer.num_experts]
        if not selections.any():
            lines.append(f"{layer.layer_id:5d}  {'never reported':{num_cells}s}".rstrip())
            continue
        rates = selections / selections.sum() * layer.num_experts  # 1: as often as the mean
        cells = _cells(rates, min(num_cells, layer.num_experts))
        shown = "".join(_cell(each, shades, has_colour=has_colour) for each in cells)
        shown += " " * (num_cells - len(cells))
        top = hottest_share(selections, _tenth(layer.num_experts))
        num_tokens = round(int(selections.sum()) / layer.num_experts_used)
        lines.append(
            f"{layer.layer_id:5d}  {shown}  {num_tokens:11,d} {top:8.0%}"
            + "".join(f" {experts_for(selections, share):5d}" for share in _SHARE_OF.values())
        )
    return lines


def _cells(rates: F64Array, num_cells: int) -> list[float]:
    """The mean of each of so many groups of neighbours. Shapes: rates [E]."""
    edges = [round(i * rates.size / num_cells) for i in range(num_cells + 1)]
    return [float(rates[edges[i] : edges[i + 1]].mean()) for i in range(num_cells)]


def _cell(rate: float, shades: str, *, has_colour: bool) -> str:
    """One cell; `rate` is 1 for an expert that is chosen as often as the mean, and saturates at
    4."""
    heat = min(rate, 4.0) / 4.0
    if has_colour:
        # Square root: most experts are colder than the mean.
        colour = _COLOURS[min(int(heat**0.5 * len(_COLOURS)), len(_COLOURS) - 1)]
        return f"\x1b[48;5;{colour}m \x1b[0m"
    if rate == 0.0:
        return shades[0]
    return shades[1 + min(int(heat**0.5 * (len(shades) - 1)), len(shades) - 2)]


def _can_show(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _owner_lines(file: HeatFile, phase: str) -> list[str]:
    """Who computed how many selections."""
    hits = {
        name: {"prefill": prefill, "decode": decode}.get(phase, prefill + decode)
        for name, (prefill, decode) in file.heat.pairs_of_owner.items()
    }
    total = sum(hits.values())
    if not total:
        return []
    lines = ["", f"{'owner':16s} {'computed':>15s}"]
    for name, count in sorted(hits.items(), key=lambda each: -each[1]):
        lines.append(f"{name:16s} {count:15,d} {count / total:7.1%}")
    return lines
