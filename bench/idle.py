"""CPU use of an idle parent and daemon: engine open, a text written, waiting.

Each thread's CPU time and wake-ups show what to improve. Counted by the kernel in nanoseconds
(/proc/PID/task/TID/schedstat).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.daemons import living_daemons, made_up_prompt, timed_tokens
from bench.options import add_save_option, bench_parser

from bench import report
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine

GOAL = 0.02
"""Share of one core, for each process."""
_SETTLE_S = 2.0
EXAMPLES = """examples:
  python -m bench.idle --save                          # a minute; kept in bench/results/
  python -m bench.idle --seconds 60 --transports shared
  DFLASH_MOE_EXPERT_COMPUTE_HEARTBEAT_MS=10000 python -m bench.idle
"""


@dataclass(frozen=True, slots=True)
class ThreadUse:
    """What one thread did since it started, or during some time."""

    name: str
    cpu_s: float
    wake_ups: int
    """How often it slept and was woken."""

    def since(self, before: ThreadUse | None) -> ThreadUse:
        if before is None:
            return self
        return ThreadUse(self.name, self.cpu_s - before.cpu_s, self.wake_ups - before.wake_ups)


def thread_uses(pid: int) -> dict[int, ThreadUse]:
    """All threads of a process by id. In this process the names are Python's."""
    names = {each.native_id: each.name for each in threading.enumerate()}
    uses = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            thread_id = int(folder.name)
            name = (folder / "comm").read_text().strip()
            if thread_id == pid:
                name = "main"
            elif pid == os.getpid():
                name = names.get(thread_id, name)
            match = re.search(
                r"^voluntary_ctxt_switches:\s+(\d+)", (folder / "status").read_text(), re.MULTILINE
            )
            on_cpu_ns = int((folder / "schedstat").read_text().split()[0])
            uses[thread_id] = ThreadUse(name, on_cpu_ns / 1e9, int(match[1]) if match else 0)
    return uses


def measure(transport: str, options: argparse.Namespace) -> dict[str, Any]:
    """CPU use of both processes, as a share of a core, in several spans of time."""
    spans: dict[str, list[float]] = {"parent": [], "daemon": []}
    threads: dict[str, list[ThreadUse]] = {}
    with tempfile.TemporaryDirectory(prefix="dflash-idle-") as folder:
        settings = replace(load_settings(), run_dir=folder, ipc_transport=transport)
        with Engine.open(daemons=["cpu"], settings=settings) as engine:
            timed_tokens(engine, made_up_prompt(256), 32)
            (daemon,) = living_daemons()
            pids = {"parent": os.getpid(), "daemon": daemon.pid}
            time.sleep(_SETTLE_S)
            first = {name: thread_uses(pid) for name, pid in pids.items()}
            started_s = time.perf_counter()
            before, before_s = first, started_s
            for _ in range(options.spans):
                time.sleep(options.seconds / options.spans)
                now, now_s = {n: thread_uses(pid) for n, pid in pids.items()}, time.perf_counter()
                for name, values in spans.items():
                    used_s = sum(
                        use.since(before[name].get(id_)).cpu_s for id_, use in now[name].items()
                    )
                    values.append(used_s / (now_s - before_s))
                before, before_s = now, now_s
            elapsed_s = before_s - started_s
            for name, uses in before.items():
                threads[name] = [use.since(first[name].get(id_)) for id_, use in uses.items()]
            timed_tokens(engine, made_up_prompt(8), 4)
            if events := engine.stats().events:
                raise SystemExit(f"error: the run was disturbed: {events}")
    return {
        "transport": transport,
        "seconds": elapsed_s,
        "share_of_core": spans,
        "threads": {name: [asdict(each) for each in uses] for name, uses in threads.items()},
    }


def tables(results: list[dict[str, Any]]) -> str:
    """Each process as a whole, then its threads that woke up at all."""
    wholes, parts = [], []
    for result in results:
        for name, shares in result["share_of_core"].items():
            who = f"{result['transport']}, {name}"
            mean = statistics.mean(shares)
            wholes.append(
                [
                    who,
                    f"{mean:.2%}",
                    f"{max(shares):.2%}",
                    f"{GOAL:.0%}",
                    "yes" if mean <= GOAL else "NO",
                ]
            )
            uses = sorted(result["threads"][name], key=lambda use: -use["cpu_s"])
            parts += [
                [
                    f"{who}: {use['name']}",
                    f"{use['cpu_s'] / result['seconds']:.3%}",
                    f"{use['wake_ups'] / result['seconds']:.1f}",
                ]
                for use in uses
                if use["wake_ups"] or use["cpu_s"]
            ]
    whole = report.table(["idle", "of a core", "worst span", "goal", "reached"], wholes)
    part = report.table(["thread", "of a core", "wake-ups/s"], parts)
    return f"{whole}\n\n{part}"


def main() -> None:
    parser = bench_parser(__file__, __doc__, EXAMPLES)
    parser.add_argument("--seconds", type=float, default=21, help="of idleness (default 21)")
    parser.add_argument("--spans", type=int, default=7, help="cut into so many (default 7)")
    parser.add_argument(
        "--transports", nargs="+", choices=("shared", "stream"), default=["shared", "stream"]
    )
    add_save_option(parser)
    options = parser.parse_args()
    results = [measure(transport, options) for transport in options.transports]
    record = report.head("CPU use of an idle parent and its daemon") | {"results": results}
    text = tables(results)
    report.finish("idle", record, text, options.save)


if __name__ == "__main__":
    main()
