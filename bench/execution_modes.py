"""Mode `auto` compared with `batched` and `stream` on three daemons: as is, slow, and far away.

Each daemon is a process that serves three engines, one for each mode: the daemon as it is; one that
takes 10 times as long to compute; one that takes 2 ms longer for every request. A sample is a
prompt of the demo model, or text after it. `auto` must reach 0.97 of the better of the other two on
every daemon.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.cpu_time import others_s
from bench.daemons import PATIENT_DEADLINE_MS, imposed_daemon, made_up_prompt
from bench.options import add_save_option, bench_parser
from bench.pairs import Sample, Spread, interleave, ratio

from bench import report
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from dflash_runtime.engine.demo_model import demo_model_path

DAEMONS: dict[str, tuple[str, ...]] = {
    "equal": (),
    "10 times slower": ("--compute-factor", "10"),
    "2 ms a request": ("--request-ms", "2"),
}
MODES = ("auto", "batched", "stream")
WORKS = ("prefill", "decode")
GOAL = 0.97
_WARM_UP = 2
"""Warm-up samples, in which `auto` tries both ways."""
_PROMPT = 2048
"""Four chunks in each of eight layers: as many batches as between two probes of `auto`, so that
each sample has its share of them."""
EXAMPLES = """examples:
  python -m bench.execution_modes --save               # five minutes; kept in bench/results/
  python -m bench.execution_modes --daemons equal --works prefill --rounds 3
  python -m bench.execution_modes --transport stream
"""


def measure_daemon(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All samples of the three modes with one of the daemons, by kind of work."""
    model = options.model or demo_model_path()
    prompt = made_up_prompt(options.prompt)
    with contextlib.ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="dflash-modes-")))
        address = undo.enter_context(
            imposed_daemon(model, folder, name="daemon", arguments=DAEMONS[name])
        )
        settings = replace(
            load_settings(),
            connect_timeout_ms=60_000,
            # Interruptions of a daemon that is 10 times slower count 10 times, too.
            deadline_ms=PATIENT_DEADLINE_MS,
            ipc_transport=options.transport,
        )
        engines = {
            mode: undo.enter_context(
                Engine.open(
                    model,
                    daemons=[],
                    connect=[address],
                    require_daemons=True,
                    settings=replace(settings, ipc_mode=mode),
                )
            )
            for mode in MODES
        }
        for engine in engines.values():
            for _ in range(_WARM_UP):
                rates(engine, prompt, options.decode)
        result: dict[str, Any] = {"daemon": name}
        for work in options.works:
            rounds = interleave(
                {mode: runner(engines[mode], work, prompt, options) for mode in MODES},
                options.rounds,
                timeout_s=options.timeout,
                at_most=2 * options.rounds,
            )
            result[work] = {"tokens_per_s": rounds.values, "quiet_rounds": rounds.label()}
        result["requests"] = {}
        for mode, engine in engines.items():
            stats = engine.stats()
            if stats.events:
                raise SystemExit(f"error: the run was disturbed: {stats.events}")
            (owner,) = (each for each in stats.owners.values() if each.transport)
            result["transport"] = owner.transport
            result["requests"][mode] = owner.requests
    return result


def rates(engine: Engine, prompt: list[int], num_tokens: int) -> dict[str, float]:
    """Tokens per second of one generation, by kind of work."""
    for _ in engine.generate(prompt, num_tokens, ignore_eos=True):
        pass
    last = engine.last_generation
    return {"prefill": last.prefill_tokens_per_s, "decode": last.decode_tokens_per_s}


def runner(
    engine: Engine, work: str, prompt: list[int], options: argparse.Namespace
) -> Callable[[int], Sample]:
    """A function that takes one sample of one mode."""
    cores = sorted(os.sched_getaffinity(0))
    # Text needs only a short prompt, whose time is not in its rate.
    prompt, num_tokens = (prompt, 1) if work == "prefill" else (prompt[:8], options.decode)

    def run(_number: int) -> Sample:
        started_s, before_s = time.perf_counter(), others_s(cores, os.getpid())
        rate = rates(engine, prompt, num_tokens)[work]
        used_s = others_s(cores, os.getpid()) - before_s
        wall_s = time.perf_counter() - started_s
        return Sample.by_cpu_time(rate, others_s=used_s, wall_s=wall_s, cores=len(cores))

    return run


def verdict(values: Mapping[str, list[float]]) -> tuple[str, Spread]:
    """The better mode of the two by its median, and `auto` divided by it, pair by pair."""
    better = max(MODES[1:], key=lambda mode: statistics.median(values[mode]))
    return better, ratio(values["auto"], values[better])


def table(results: list[dict[str, Any]], works: list[str]) -> str:
    """A line for each daemon and work."""
    rows = []
    for result in results:
        for work in works:
            values = result[work]["tokens_per_s"]
            better, spread = verdict(values)
            rows.append(
                [
                    f"{result['daemon']}, {work}",
                    *(f"{statistics.median(values[mode]):.1f}" for mode in MODES),
                    better,
                    str(spread),
                    "yes" if spread.median >= GOAL else "NO",
                    result[work]["quiet_rounds"],
                ]
            )
    columns = [
        "daemon, work",
        *(f"{mode}, tokens/s" for mode in MODES),
        "better",
        "auto ÷ better (range)",
        f"{GOAL} reached",
        "quiet rounds",
    ]
    return report.table(columns, rows)


def main() -> None:
    parser = bench_parser(__file__, __doc__, EXAMPLES)
    parser.add_argument("--daemons", nargs="+", choices=list(DAEMONS), default=list(DAEMONS))
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--model", type=Path, help="a file of your own (default: the demo model)")
    parser.add_argument(
        "--transport", choices=("auto", "shared", "stream"), default="auto", help="default: auto"
    )
    parser.add_argument("--rounds", type=int, default=7, help="samples of each mode (default 7)")
    parser.add_argument(
        "--prompt", type=int, default=_PROMPT, help=f"its tokens (default {_PROMPT})"
    )
    parser.add_argument("--decode", type=int, default=48, help="tokens of a text (default 48)")
    parser.add_argument(
        "--timeout", type=float, default=45, help="seconds a row for quiet rounds (default 45)"
    )
    add_save_option(parser)
    options = parser.parse_args()
    results = []
    for name in options.daemons:
        results.append(measure_daemon(name, options))
        print(table(results[-1:], options.works), flush=True)
    record = report.head("Mode auto beside batched and stream") | {
        "prompt_tokens": options.prompt,
        "daemons": results,
    }
    requests = "; ".join(
        f"{result['daemon']} ({result['transport']}): "
        + ", ".join(f"{mode} {count}" for mode, count in result["requests"].items())
        for result in results
    )
    tables = f"{table(results, options.works)}\n\nrequests: {requests}"
    report.finish("execution-modes", record, tables, options.save)


if __name__ == "__main__":
    main()
