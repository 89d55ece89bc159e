"""Results on disk: one JSON with every sample, one short Markdown table, in bench/results/."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy
from bench.machine import ROOT, commit, describe, processor

from dflash_protocol import __version__
from dflash_protocol.errors import SettingsError
from dflash_protocol.text_files import write_file

RESULTS = Path(__file__).parent / "results"


def head(
    what: str, *, num_threads: int | None = None, peer: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """What every record begins with. `peer` is the record of its build, where there is one."""
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
        record["peer"] = {key: peer[key] for key in _PEER_FACTS}
    return record


_PEER_FACTS = ("variant", "llama_cpp_python", "llama_cpp", "ggml", "compiler", "flags")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that reads well as plain text too."""
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


def write_result(path: Path, text: str) -> None:
    """A file of a result, whole or not at all; if it cannot be written, the bench ends with one
    line. What was measured stands on the terminal then."""
    try:
        write_file("result", path, text)
    except SettingsError as error:
        sys.exit(f"error: {error}")


def save(name: str, record: Mapping[str, Any], tables: str) -> Path:
    """Keep a result as ``<name>-<date>-<cpu>.json`` and ``.md``; returns the Markdown's path."""
    RESULTS.mkdir(exist_ok=True)
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
            f" Peer: llama.cpp {peer['llama_cpp']} (ggml {peer['ggml']}, from llama-cpp-python "
            f"{peer['llama_cpp_python']}), variant {peer['variant']}, {peer['compiler']}."
        )
    write_result(RESULTS / f"{stem}.json", json.dumps(record, indent=1) + "\n")
    path = RESULTS / f"{stem}.md"
    write_result(path, f"# {record['what']}\n\n{facts}\n\n{tables}\n")
    return path.relative_to(ROOT)
