"""What a daemon costs at decode: tokens/s with all experts in one daemon, relative to in process.

Layers in the shape of Qwen3-30B-A3B. Parent and daemon are bound to the same two cores as the
single process; every round runs all sides, every other round in reverse order. For llama.cpp see
cpu_model.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench.options import NOTHING, add_realtime_option, add_save_option, bench_parser
from bench.our_model import OurModel
from bench.pairs import Rounds, Sample, Spread, interleave, ratio
from bench.random_moe import MIXES, model_path
from bench.sides import Side

from bench import report
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_runtime.experts.telemetry import OwnerKind

IN_PROCESS = "in process"
TRANSPORTS = ("shared", "stream")
GOAL = 0.95
_ROUNDS_AT_MOST = 4
"""Rounds that may be repeated for quiet ones, as a multiple of those asked for."""
EXAMPLES = """examples:
  python -m bench.daemon_decode --save                     # a minute; kept in bench/results/
  python -m bench.daemon_decode --profile --transports shared --rounds 5
  python -m bench.daemon_decode --realtime                 # root, while others use the machine
  DFLASH_MOE_EXPERT_COMPUTE_IPC_SPIN_US=500 python -m bench.daemon_decode --profile
"""

Owners = Mapping[str, Mapping[str, Any]]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All samples of all sides, and the counters of the owners of experts."""
    path = options.model or model_path(options.file)
    with GgufFile.open(path) as file:
        spec = read_spec(file)
    random = np.random.default_rng(0)
    prompt: list[int] = random.integers(0, spec.vocab_size, options.context).tolist()
    with contextlib.ExitStack() as undo:
        sides: dict[str, Side] = {}
        for name in (IN_PROCESS, *options.transports):
            sides[name] = undo.enter_context(
                Side(
                    name,
                    OurModel,
                    path,
                    num_threads=options.threads,
                    context=options.context + options.decode + 1,
                    kv_type="f16",
                    num_daemons=0 if name == IN_PROCESS else 1,
                    transport="auto" if name == IN_PROCESS else name,
                    cores=options.cores,
                    realtime=options.realtime,
                )
            )
        texts = {name: side.call("text_after", prompt, 8) for name, side in sides.items()}
        if any(text != texts[IN_PROCESS] for text in texts.values()):
            raise SystemExit(f"error: the sides write different texts: {texts}")
        before = {name: side.call("owners") for name, side in sides.items()}

        def runner(side: Side) -> Callable[[int], Sample]:
            return lambda _number: side.sample_on(
                options.cores, "decode_after", prompt, options.decode
            )

        rounds: Rounds = interleave(
            {name: runner(side) for name, side in sides.items()},
            options.rounds,
            timeout_s=options.timeout,
            at_most=_ROUNDS_AT_MOST * options.rounds,
        )
        after = {name: side.call("owners") for name, side in sides.items()}
    num_layers = len(spec.moe.layers)
    counted = partial(_decode_cost, num_layers=num_layers)
    return {
        "file": path.name,
        "layers": num_layers,
        "quiet_rounds": rounds.label(),
        "tokens_per_s": rounds.values,
        "ratios": {
            name: ratio(rounds.values[name], rounds.values[IN_PROCESS]).as_dict()
            for name in options.transports
        },
        "us_per_layer": {
            name: counted(before[name], after[name], rounds.values[name]) for name in sides
        },
    }


def _decode_cost(
    before: Owners, after: Owners, tokens_per_s: list[float], *, num_layers: int
) -> dict[str, float]:
    """Microseconds of one token in one layer, by part; means of all rounds, except the whole, which
    is the median's, and the round trip's p50, which is since opening."""
    layer_us = 1e6 / statistics.median(tokens_per_s) / num_layers
    ((name, owner),) = ((n, o) for n, o in after.items() if "decode" in o["phases"])
    now, then = owner["phases"]["decode"], before[name]["phases"]["decode"]
    num_requests = now["requests"] - then["requests"]
    cost = {
        quantity.removesuffix("_s"): 1e6 * (now[quantity] - then[quantity]) / num_requests
        for quantity in now
        if quantity.endswith("_s") and quantity not in ("p50_s", "p99_s")
    }
    spent_us = sum(cost[part] for part in ("pack", "send", "wait", "receive", "combine"))
    experts_us = spent_us if owner["kind"] == OwnerKind.DAEMON else cost["compute"]
    return {
        "layer": layer_us,
        "elsewhere": layer_us - experts_us,
        "experts": experts_us,
        "boundary": experts_us - cost["compute"],
        "round_trip_p50": 1e6 * now["p50_s"],
        **cost,
    }


PROFILE = (
    ("layer", "one layer"),
    ("elsewhere", "attention, dense products, head, Python"),
    ("experts", "experts, as the parent sees them"),
    ("compute", "- computed, as reported by the owner"),
    ("boundary", "- boundary: the rest"),
    ("pack", "  - pack"),
    ("send", "  - send"),
    ("wait", "  wait (computing is in it)"),
    ("queue", "  - queue at the daemon"),
    ("receive", "  - receive"),
    ("combine", "  - combine"),
    ("round_trip_p50", "round trip, p50"),
)


def profile_table(result: Mapping[str, Any]) -> str:
    """Where the time of a layer goes, one column a side."""
    costs = result["us_per_layer"]
    rows = [
        [label, *(f"{cost[key]:.0f}" if cost[key] else "" for cost in costs.values())]
        for key, label in PROFILE
    ]
    return report.table(["µs a token and layer", *costs], rows)


def rate_table(result: Mapping[str, Any]) -> str:
    """Tokens per second, and the share kept with a daemon."""
    rows = []
    for name, values in result["tokens_per_s"].items():
        share = result["ratios"].get(name)
        rows.append([name, str(Spread.of(values)), "" if share is None else str(Spread(**share))])
    columns = ["experts", "tokens/s (range)", f"of in process (goal {GOAL})"]
    return f"{report.table(columns, rows)}\n\nquiet rounds: {result['quiet_rounds']}"


def main() -> None:
    parser = bench_parser(__file__, __doc__, EXAMPLES)
    parser.add_argument("--file", choices=list(MIXES), default="q4_k_m", help="default: q4_k_m")
    parser.add_argument("--model", type=Path, help="a file of your own instead")
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=TRANSPORTS,
        default=list(TRANSPORTS),
        help="default: both",
    )
    parser.add_argument("--rounds", type=int, default=7, help="samples of each side (default 7)")
    parser.add_argument("--decode", type=int, default=16, help="tokens a sample (default 16)")
    parser.add_argument("--context", type=int, default=16, help="tokens before them (default 16)")
    parser.add_argument("--threads", type=int, default=2, help="of each process (default 2)")
    parser.add_argument(
        "--cores", type=int, nargs="+", help="all processes keep to these (default: the first two)"
    )
    parser.add_argument(
        "--timeout", type=float, default=45, help="seconds for quiet rounds (default 45)"
    )
    add_realtime_option(parser)
    parser.add_argument("--profile", action="store_true", help="say where a layer's time goes")
    add_save_option(parser)
    options = parser.parse_args()
    options.cores = options.cores or sorted(os.sched_getaffinity(0))[:2]
    result = measure(options)
    record = report.head("Decode through one daemon", num_threads=options.threads) | {
        "cores": options.cores,
        "realtime": options.realtime,
        **result,
    }
    text = (
        f"{result['file']}, {result['layers']} layers, {options.decode} tokens after "
        f"{options.context}, cores {options.cores}" + ", real-time priority" * options.realtime
    )
    tables = f"{text}\n\n{rate_table(result)}"
    if options.profile or options.save != NOTHING:
        tables += f"\n\n{profile_table(result)}"
    report.finish("daemon-decode", record, tables, options.save)


if __name__ == "__main__":
    main()
