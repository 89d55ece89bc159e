"""Requests and payload bytes of a long prompt through one daemon, as counted by the engine.

Mode `batched` against `stream`, and bfloat16 against the older form of requests: version 1 of the
protocol, rectangles of global ids in float32, used with a daemon that supports no other. The layers
have the shape of Qwen3-30B-A3B. Counts, not times: a busy machine does not matter.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from bench.daemons import PATIENT_DEADLINE_MS, imposed_daemon
from bench.options import add_save_option, bench_parser
from bench.random_moe import MIXES, model_path

from bench import report
from dflash_protocol.ids import Phase
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine

FEWER_REQUESTS, FEWER_BYTES = 0.9, 0.5
"""Shares that must be saved."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the prompt's rows are sent to the daemon."""

    mode: str
    payload: str
    version_1: bool = False


WAYS = {
    "batched, bf16": Way("batched", "bf16"),
    "stream, bf16": Way("stream", "bf16"),
    "batched, f16": Way("batched", "f16"),
    "batched, f32": Way("batched", "f32"),
    "older shape": Way("batched", "f32", version_1=True),
}
EXAMPLES = """examples:
  python -m bench.prefill_traffic --save               # two minutes; kept in bench/results/
  python -m bench.prefill_traffic --tokens 1024 --transport stream
"""


def count(address: str, model: Path, way: Way, options: argparse.Namespace) -> dict[str, Any]:
    """The engine's counters for the prompt."""
    settings = replace(
        load_settings(),
        connect_timeout_ms=60_000,
        deadline_ms=PATIENT_DEADLINE_MS,
        ipc_transport="auto" if way.version_1 else options.transport,
        ipc_mode=way.mode,
        ipc_dtype=way.payload,
    )
    with Engine.open(
        model,
        daemons=[],
        connect=[address],
        require_daemons=True,
        context=options.tokens + 1,
        settings=settings,
    ) as engine:
        random = np.random.default_rng(0)
        prompt = random.integers(0, engine.spec.vocab_size, options.tokens).tolist()
        for _ in engine.generate(prompt, 1, ignore_eos=True):
            pass
        stats = engine.stats()
        if stats.events:
            raise SystemExit(f"error: the run was disturbed: {stats.events}")
        (owner,) = (each for each in stats.owners.values() if each.transport)
        phase = owner.phases[Phase.PREFILL]
        return {
            "transport": owner.transport,
            "requests": phase.requests,
            "tokens": phase.tokens,
            "pairs": phase.pairs,
            "bytes_sent": phase.bytes_sent,
            "bytes_received": phase.bytes_received,
            "widened": owner.widened,
        }


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Counts of all ways."""
    model = model_path(options.file)
    counts = {}
    with contextlib.ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="dflash-traffic-")))
        addresses = {
            is_old: undo.enter_context(
                imposed_daemon(
                    model,
                    folder,
                    name="old" if is_old else "new",
                    arguments=["--version-1"] * is_old,
                )
            )
            for is_old in (False, True)
        }
        for name, way in WAYS.items():
            counts[name] = count(addresses[way.version_1], model, way, options)
            print(f"{name}: {counts[name]}", flush=True)
    pairs = {name: (each["tokens"], each["pairs"]) for name, each in counts.items()}
    if len(set(pairs.values())) != 1:
        raise SystemExit(f"error: not the same (rows, pairs) were computed: {pairs}")
    return counts


def both_ways(counts: Mapping[str, Any]) -> int:
    """Payload bytes in both directions."""
    return int(counts["bytes_sent"] + counts["bytes_received"])


def tables(counts: Mapping[str, Mapping[str, Any]]) -> str:
    """All counts, and what is saved."""
    rows = [
        [
            name,
            each["transport"],
            f"{each['requests']}",
            f"{each['bytes_sent']}",
            f"{each['bytes_received']}",
            f"{both_ways(each) / each['tokens']:.1f}",
        ]
        for name, each in counts.items()
    ]
    columns = ["way", "transport", "requests", "bytes there", "bytes back", "bytes a row"]
    batched, stream = counts["batched, bf16"], counts["stream, bf16"]
    savings = [
        [
            "requests, batched against stream",
            f"{1 - batched['requests'] / stream['requests']:.2%}",
            f"{FEWER_REQUESTS:.0%}",
        ],
        [
            "payload bytes, batched bf16 against the older shape",
            f"{1 - both_ways(batched) / both_ways(counts['older shape']):.2%}",
            f"{FEWER_BYTES:.0%}",
        ],
    ]
    return f"{report.table(columns, rows)}\n\n{report.table(['saved', 'share', 'goal'], savings)}"


def main() -> None:
    parser = bench_parser(__file__, __doc__, EXAMPLES)
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt (default 4096)")
    parser.add_argument("--file", choices=list(MIXES), default="q4_0", help="default: q4_0")
    parser.add_argument(
        "--transport", choices=("auto", "shared", "stream"), default="auto",
        help="of the newer ways; the older shape always goes by stream (default: auto)",
    )  # fmt: skip
    add_save_option(parser)
    options = parser.parse_args()
    counts = measure(options)
    record = report.head(f"Traffic of a prompt of {options.tokens} tokens") | {
        "file": options.file,
        "counts": counts,
    }
    text = tables(counts)
    report.finish("prefill-traffic", record, text, options.save)


if __name__ == "__main__":
    main()
