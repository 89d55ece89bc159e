"""Results on disk, in bench/results/: a Markdown table, and a JSON with samples or their spread.

They are for people; no code reads them.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy
from bench.machine import ROOT, commit, describe, processor
from bench.options import NOTHING, SAMPLES

from dflash_protocol import __version__
from dflash_protocol.errors import SettingsError
from dflash_protocol.process.text_files import write_file

RESULTS = Path(__file__).parent / "results"


def head(
    what: str, *, num_threads: int | None = None, peer: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """The start of every record. `peer` is the record of its build, if there is one."""
    record: dict[str, Any] = {
        "what": what,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "commit": commit(),
        "machine": describe(),
        "libraries": {
            "numba": numba.__version__,
            "llvmlite": llvmlite.__version__,
            "numpy": numpy.__version__,
        },
    }
    if num_threads is not None:
        record["threads"] = num_threads
    if peer is not None:
        record["peer"] = peer
    return record


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is also readable as plain text."""
    cells = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = "|-" + "-|-".join("-" * width for width in widths) + "-|"
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])


def finish(name: str, record: Mapping[str, Any], tables: str, how: str) -> None:
    """Print a result below the machine that it was measured on, and `save` it."""
    print(f"\n{record['machine']}\n{tables}")
    save(name, record, tables, how)


def save(name: str, record: Mapping[str, Any], tables: str, how: str) -> None:
    """Save a result as ``<name>-<date>-<cpu>.json`` and ``.md``, and report that on stderr.

    `how` is the value of --save (see `bench.options`). If a file cannot be written, the bench ends
    with a one-line error: the results are on the terminal by then.
    """
    if how == NOTHING:
        return
    cpu = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)", "", processor()).lower()).strip("-")
    stem = f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{cpu}"
    facts = (
        f"{record['date']}, version {record['version']} ({record['commit']}), {record['machine']}"
    )
    if "threads" in record:
        facts += f", {record['threads']} threads"
    facts += "."
    if peer := record.get("peer"):
        facts += (
            f" Peer: llama.cpp {peer['llama_cpp']} (ggml {peer['ggml']}, from "
            f"{peer['sdist']}), variant {peer['variant']}, {peer['compiler']}."
        )
    path = RESULTS / f"{stem}.md"
    try:
        RESULTS.mkdir(exist_ok=True)
        kept = record if how == SAMPLES else spreads(record)
        write_file("result", path.with_suffix(".json"), as_text(kept) + "\n")
        write_file("result", path, f"# {record['what']}\n\n{facts}\n\n{tables}\n")
    except (OSError, SettingsError) as error:
        sys.exit(f"error: {error}")
    print(f"kept in {path.relative_to(ROOT)}", file=sys.stderr)


_FEW = 4
"""Up to this many samples are kept as they are, not as quartiles."""
_DIGITS = 5
_WIDTH = 140


def spreads(value: Any) -> Any:
    """A record with samples replaced by their number, range, quartiles and median.

    Samples are more than four numbers in a list, at least one of them a float. For rows of numbers,
    lists or dicts, each column becomes a spread.
    """
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: spreads(each) for key, each in value.items()}
    if not isinstance(value, list | tuple):
        return value
    if len(value) > _FEW:
        if _are_numbers(value) and any(isinstance(each, float) for each in value):
            return _spread(value)
        first = value[0]
        if isinstance(first, Mapping) and all(
            isinstance(row, Mapping) and row.keys() == first.keys() and _are_numbers(row.values())
            for row in value
        ):
            return {key: _spread([row[key] for row in value]) for key in first}
        if isinstance(first, list | tuple) and all(
            isinstance(row, list | tuple) and len(row) == len(first) and _are_numbers(row)
            for row in value
        ):
            return [_spread(column) for column in zip(*value, strict=True)]
    return [spreads(each) for each in value]


def _are_numbers(values: Iterable[object]) -> bool:
    return all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)


def _spread(values: Sequence[float]) -> Any:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    of = {"smallest": min(values), "p25": low, "median": median, "p75": high}
    return {"samples": len(values)} | spreads(of | {"largest": max(values)})


def as_text(value: Any, indent: int = 0) -> str:
    """JSON in which whatever fits into a line is on one; single numbers and words share lines."""
    whole = json.dumps(value, ensure_ascii=False)
    if len(whole) + indent <= _WIDTH or not isinstance(value, Mapping | list | tuple):
        return whole
    margin = " " * (indent + 1)
    if isinstance(value, Mapping):
        names, values = [f"{json.dumps(str(key))}: " for key in value], list(value.values())
    else:
        names, values = [""] * len(value), list(value)
    lines: list[str] = []
    can_go_on = False
    for name, each in zip(names, values, strict=True):
        text = name + as_text(each, indent + 1)
        is_single = indent > 0 and not isinstance(each, Mapping | list | tuple)
        if can_go_on and is_single and len(margin + lines[-1] + text) < _WIDTH - 2:
            lines[-1] += f", {text}"
        else:
            lines.append(text)
        can_go_on = is_single
    first, last = "{}" if isinstance(value, Mapping) else "[]"
    return f"{first}\n" + ",\n".join(margin + line for line in lines) + f"\n{margin[1:]}{last}"
