"""Our engine, which plans by itself, beside llama.cpp with the same memory of one GPU.

A process takes all of the GPU's memory but a budget, and watches what is taken of that. Within it
come, one after the other:

  ours       opened without any option but the context; the plan is made with heat of other text
             than is measured, which the first opening of a run learns from two generations
  llama.cpp  with the fewest layers' experts on the CPU that fit (--n-cpu-moe), as --fit chooses,
             and with the largest cache of experts that fits (--moe-cache-mib), each with micro-
             batches of 512 and of the size that a long prompt is fastest with; flash attention,
             keys and values in f16. The best of all counts, row by row.

Decode goes on after 448 tokens, greedily; llama.cpp gets the tokens that this writes. Its times
contain no choice of a token.

With --daemons each of these GPUs has the same budget: ours gets a daemon there, and llama.cpp
splits its layers over all GPUs that it sees (by their free memory, its default).

Any model will do, such as the one that you use: it reads the documents of this project, and an
opening more writes what follows them (with --only peer they go on). Random weights need planted
routing, which tells what is written: python -m bench.random_moe q4_k_m --layers 48 --routing qwen3

Examples:
  python -m bench.gpu_budgets --model mine.gguf --budgets 8 12 --side-limit 600 --limit 3600
  python -m bench.gpu_budgets --model /dev/shm/m48.gguf --budgets 8 12 16 24 --save
  python -m bench.gpu_budgets --model /dev/shm/m48.gguf --budgets 8 --only ours
  python -m bench.gpu_budgets --model /dev/shm/m48.gguf --budgets 12 --daemons cuda:1 --save
  python -m bench.gpu_budgets --model small.gguf --budgets 4 --device cpu --peer native
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from bench.budget_peer import (
    LOAD_MODES,
    PeerSearch,
    PeerWork,
    decode_row,
    placed_peer,
    prompt_row,
)
from bench.build_peer import VARIANTS, build_record
from bench.gpu_engine import EngineSide
from bench.gpu_memory import Watch
from bench.gpu_parts import Parts, Result, say
from bench.gpu_peer import built_peer
from bench.gpu_record import OURS, PEER
from bench.options import add_save_option, bench_parser
from bench.planted_routing import KIND_KEY, Walk
from bench.sides import Side
from bench.texts import walk_of

from bench import report
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.device import parse_device
from dflash_runtime.compute.gpu.device.devices import VENDORS
from dflash_runtime.compute.gpu.device.driver import open_driver

_GIB, _MIB = 1 << 30, 1 << 20
_SAMPLE_S = 0.02
_LEARNT_PROMPT, _LEARNT_TOKENS = 2048, 400
_CONTEXT, _LONG_PROMPT = 448, 4096
_OWN_ROUTING = "its own"
"""Of a file in which none is planted, which would tell what is written."""
DECODE, LONG = "decode", f"prompt {_LONG_PROMPT}"
GOALS: dict[str, dict[int, dict[str, float]]] = {
    "qwen3": {
        8: {DECODE: 1.7, LONG: 1.2},
        12: {DECODE: 1.9, LONG: 1.3},
        16: {DECODE: 2.1, LONG: 1.4},
        24: {DECODE: 2.3, LONG: 1.9},
    },
    "flat": {
        8: {DECODE: 1.25, LONG: 1.2},
        12: {DECODE: 1.3, LONG: 1.3},
        16: {DECODE: 1.4, LONG: 1.4},
        24: {DECODE: 2.3, LONG: 1.9},
    },
}
"""Ours ÷ llama.cpp that is wanted, by routing and GiB: Qwen3-30B-A3B, Q4_K_M, one H100."""
GOALS_OF_TWO: dict[str, dict[int, dict[str, float]]] = {
    "qwen3": {12: {DECODE: 2.0}},
    "flat": {12: {DECODE: 2.0}},
}
"""The same of two cards with so much each, beside llama.cpp's layers split over both."""


class Ballast:
    """Holds all memory of a GPU but a budget, and watches how much of that others take.

    The object of a Side; it ends with its process.
    """

    def __init__(self, device: str, budget_bytes: int) -> None:
        """Raises: ValueError if so much is not free."""
        import cupy

        found = parse_device(device)
        driver = open_driver(VENDORS[found.kind])
        driver.use(found.index)
        self._watch = Watch(driver, found.index, sample_s=_SAMPLE_S)
        free = self._watch.free()
        if free < budget_bytes:
            raise ValueError(f"{free / _GIB:.1f} GiB are free, not {budget_bytes / _GIB:.1f}")
        with cupy.cuda.Device(found.index):
            self._held = cupy.cuda.runtime.malloc(free - budget_bytes)
        self._budget = self._watch.free()
        self._watch.begin()
        self._running = self._watch.running()
        self._running.__enter__()

    def begin(self) -> None:
        """Forget what was taken so far."""
        self._watch.begin()

    def budget(self) -> int:
        """Bytes that were left to others."""
        return self._budget

    def peak(self) -> int:
        """Most bytes of the budget that were taken since `begin`."""
        return self._budget - self._watch.least


def work_of(
    walk: Walk, *, context: int, rounds: int, num_tokens: int, lengths: Sequence[int]
) -> PeerWork:
    """What both sides are measured with: stretches of the walk that no heat is learnt on."""
    step = len(walk.token_ids) // 50
    decode: list[tuple[Sequence[int], Sequence[int]]] = []
    for number in range(rounds):
        text = walk.stretch(step * number, _CONTEXT + num_tokens + 1)
        decode.append((text[:_CONTEXT], text[_CONTEXT:-1]))
    prompts = {
        length: [walk.stretch(step * (17 + 2 * number), length) for number in range(rounds)]
        for length in lengths
    }
    return PeerWork(context, decode, prompts)


def learnt_prompts(walk: Walk) -> list[list[int]]:
    """Prompts of the texts that heat is learnt on."""
    step = len(walk.token_ids) // 50
    return [walk.stretch(step * number, _LEARNT_PROMPT) for number in (8, 10)]


class OurSide:
    """Our engine on a device, with heat that is learnt once. Owns a folder of heat files."""

    def __init__(
        self,
        path: Path,
        device: str,
        work: PeerWork,
        folder: Path,
        *,
        learnt: Sequence[Sequence[int]],
        writes: bool = False,
        daemons: Sequence[str] = (),
    ) -> None:
        """`learnt`: the prompts of the texts that heat is learnt on; `writes`: what follows those
        of decode is not known yet, and put into `work`."""
        self._path, self._device, self._work, self._folder = path, device, work, folder
        self._daemons = daemons
        self._prompts, self._writes = learnt, writes
        self._learnt = folder / "learnt.heat"

    def measure(self, result: Result, until_s: float) -> None:
        """Fill `result` with the plan and tokens per second."""
        if not self._learnt.exists():
            self._learn(until_s)
        if self._writes:
            self._write(until_s)
        heat = self._folder / f"used-{time.monotonic_ns()}.heat"
        shutil.copy(self._learnt, heat)  # what is measured now must not be known to later plans
        with self._open(heat, until_s) as side:
            result["opened"], result["plan"] = side.call("opened"), side.call("planned")
            say(f"ours: open after {result['opened']['open_s']} s\n{result['plan'].get('text')}")
            work, rows = self._work, result.setdefault("tokens_per_s", {})
            for length, prompts in sorted(work.prompts.items(), reverse=True):
                side.call("prefill", prompts[0])
                rows[prompt_row(length)] = [side.call("prefill", each) for each in prompts]
            prompt, following = work.decode[0]
            written = side.call("text", prompt, 1 + len(following))
            wanted = [*following, written[-1]]
            result["same_tokens"] = sum(a == b for a, b in zip(written, wanted, strict=True)) - 1
            rows[decode_row(work)] = [
                side.call("decode", prompt, len(following)) for prompt, following in work.decode
            ]
            result["owners"] = side.call("owners")
            side.call("close")
        say(f"ours: {_medians(result['tokens_per_s'])}")

    def _learn(self, until_s: float) -> None:
        with self._open(self._learnt, until_s) as side:
            say(f"ours: learning heat, open after {side.call('opened')['open_s']} s")
            for prompt in self._prompts:
                side.call("text", prompt, _LEARNT_TOKENS)
            side.call("close")

    def _write(self, until_s: float) -> None:
        """Find out what follows the prompts of decode, with heat that is not used again."""
        say("ours: writing what llama.cpp gets")
        with self._open(self._folder / "written.heat", until_s) as side:
            self._work.decode[:] = [
                (prompt, side.call("text", prompt, len(following)))
                for prompt, following in self._work.decode
            ]
            side.call("close")
        self._writes = False

    def _open(self, heat: Path, until_s: float) -> Side:
        return Side(
            OURS,
            EngineSide,
            self._path,
            device=self._device,
            daemons=self._daemons,
            context=self._work.context,
            heat=heat,
            until_s=until_s,
        )


def measure_peer(
    result: Result, until_s: float, *, folder: Path, work: PeerWork, options: argparse.Namespace
) -> None:
    """Fill `result` with what llama.cpp reaches, set-up by set-up."""
    threads = thread_counts(options.threads)
    open_side = partial(
        Side,
        PEER,
        placed_peer,
        folder,
        options.model,
        context=work.context,
        num_threads=threads[0],
        load_mode=options.load_mode,
        until_s=until_s,
    )
    layer_bytes, other_bytes = bytes_of(options.model, work.context)
    search = PeerSearch(open_side, layer_bytes, other_bytes, work)
    try:
        search.run(threads, options.fit_margin * _MIB)
    finally:
        search.close()
        result["setups"] = [{"name": str(each)} | asdict(each) for each in search.setups]
        result["threads_tried"] = {str(count): speed for count, speed in search.threads.items()}


def thread_counts(asked: int | None) -> list[int]:
    """Numbers of threads to try: those asked for, else all processors and all physical cores, of
    those that this process may use."""
    if asked:
        return [asked]
    logical = len(os.sched_getaffinity(0))
    physical = psutil.cpu_count(logical=False) or logical
    return sorted({logical, min(logical, physical)}, reverse=True)


def bytes_of(path: Path, context: int) -> tuple[list[int], int]:
    """Bytes of each layer's routed experts; bytes of all other tensors, keys and values in f16."""
    with GgufFile.open(path) as file:
        spec = read_spec(file)
        layers = [0] * spec.num_layers
        others = 0
        for name, tensor in file.tensors.items():
            if "_exps" in name:
                layers[int(name.split(".")[1])] += tensor.num_bytes
            elif name != "token_embd.weight":  # llama.cpp keeps it in the host's memory
                others += tensor.num_bytes
    width = sum(kv.num_heads * (kv.key_dim + kv.value_dim) for kv in spec.kv_layers)
    return layers, others + 2 * context * width


def best(setups: Sequence[Mapping[str, Any]], row: str) -> tuple[float, str]:
    """The best median of a row over set-ups, and which it is; (0, "") if none has it."""
    found = [
        (statistics.median(each["tokens_per_s"][row]), str(each["name"]))
        for each in setups
        if row in each["tokens_per_s"]
    ]
    return max(found, default=(0.0, ""))


def budgets_table(results: Mapping[str, Result], routing: str, num_cards: int = 1) -> str:
    """Both sides of each budget and row, their ratio, what is wanted, and what they took."""
    goals = GOALS if num_cards == 1 else GOALS_OF_TWO if num_cards == 2 else {}
    cards = "" if num_cards == 1 else f"{num_cards} cards, each "
    rows = []
    for name, result in results.items():
        budget = float(name)
        wanted = goals.get(routing, {}).get(int(budget), {})
        ours = result.get("ours", {}).get("tokens_per_s", {})
        setups = result.get("peer", {}).get("setups", [])
        names = dict.fromkeys([*ours, *(row for each in setups for row in each["tokens_per_s"])])
        for row in sorted(names):
            mine = statistics.median(ours[row]) if ours.get(row) else 0.0
            theirs, which = best(setups, row)
            goal = wanted.get(DECODE if row.startswith(DECODE) else row)
            rows.append(
                [
                    f"{cards}{budget:g} GiB, {routing}: {row}",
                    f"{mine:,.1f}" if mine else "",
                    f"{theirs:,.1f}" if theirs else "",
                    which,
                    f"{mine / theirs:.2f}" if mine and theirs else "",
                    f"{goal:g}" if goal else "",
                    _peaks(result),
                ]
            )
    columns = ["tokens/s", OURS, PEER, "as", f"{OURS} ÷ {PEER}", "wanted", "peak, MiB"]
    return report.table(columns, rows)


def _peaks(result: Result) -> str:
    """Of each side, card by card."""
    peaks = [result.get(side, {}).get("peak_bytes", []) for side in ("ours", "peer")]
    return " / ".join(" + ".join(f"{each / _MIB:,.0f}" for each in of_side) for of_side in peaks)


def _medians(rows: Mapping[str, Sequence[float]]) -> str:
    return "; ".join(f"{row} {statistics.median(values):.1f}" for row, values in rows.items())


def measure_budget(
    budget: float, parts: Parts, sides: Mapping[str, Any], options: argparse.Namespace
) -> Result:
    """Both sides within one budget, one after the other."""
    found: Result = {}
    with ExitStack() as stack:
        ballasts = [
            stack.enter_context(Side("ballast", Ballast, each, int(budget * _GIB)))
            for each in (options.device, *options.daemons)
            if parse_device(each).kind in VENDORS
        ]
        found["budget_bytes"] = [each.call("budget") for each in ballasts]
        for name, measure in sides.items():
            for each in ballasts:
                each.call("begin")
            found[name] = parts.run(f"{budget:g} GiB, {name}", options.side_limit, measure)
            found[name]["peak_bytes"] = [each.call("peak") for each in ballasts]
    return found


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("--model", type=Path, required=True, help="any model's file")
    parser.add_argument("--budgets", type=float, nargs="+", default=[8, 12, 16, 24], help="GiB")
    parser.add_argument("--device", default="cuda:0", help="cpu: no budget, to try this out")
    parser.add_argument(
        "--daemons", nargs="+", default=[], help="more GPUs with such a budget, such as cuda:1"
    )
    parser.add_argument("--only", choices=["ours", "peer"], help="one side alone")
    parser.add_argument(
        "--peer",
        choices=["auto", *VARIANTS],
        default="auto",
        help="which build of llama.cpp (default: one with CUDA)",
    )
    parser.add_argument("--context", type=int, default=8192, help="positions (default 8192)")
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[512, _LONG_PROMPT], help="default 512 4096"
    )
    parser.add_argument("--tokens", type=int, default=96, help="a sample of decode (default 96)")
    parser.add_argument("--rounds", type=int, default=3, help="a row (default 3)")
    parser.add_argument(
        "--threads", type=int, help="llama.cpp's (default: processors or cores, what is faster)"
    )
    parser.add_argument(
        "--load-mode", choices=list(LOAD_MODES), default="auto", help="llama.cpp's (default auto)"
    )
    parser.add_argument(
        "--fit-margin", type=int, default=1024, help="MiB that --fit leaves free (default 1024)"
    )
    parser.add_argument("--side-limit", type=float, default=150, help="seconds a side")
    parser.add_argument("--limit", type=float, default=570, help="seconds in all (default 570)")
    add_save_option(parser)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Measure, print, keep. Returns the exit status."""
    with GgufFile.open(options.model) as file:
        routing = file.get_str(KIND_KEY, _OWN_ROUTING)
    walk = walk_of(options.model)
    work = work_of(
        walk,
        context=options.context,
        rounds=options.rounds,
        num_tokens=options.tokens,
        lengths=options.prompts,
    )
    folder = None if options.only == "ours" else built_peer(options.peer)
    parts = Parts(options.limit)
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as heat:
        sides: dict[str, Any] = {}
        if options.only != "peer":
            our_side = OurSide(
                options.model,
                options.device,
                work,
                Path(heat),
                learnt=learnt_prompts(walk),
                writes=routing == _OWN_ROUTING,
                daemons=options.daemons,
            )
            sides["ours"] = our_side.measure
        if folder is not None:
            sides["peer"] = partial(measure_peer, folder=folder, work=work, options=options)
        for budget in options.budgets:
            results[f"{budget:g}"] = measure_budget(budget, parts, sides, options)
    record = report.head(
        "Our engine and llama.cpp within the same memory of a GPU",
        peer=None if folder is None else build_record(folder),
    )
    record |= {
        "cores": os.cpu_count(),
        "model": {"name": options.model.name, "bytes": options.model.stat().st_size},
        "routing": routing,
        "daemons": options.daemons,
        "context": options.context,
        "load_mode": options.load_mode,
        "fit_margin_mib": options.fit_margin,
        "budgets": results,
    }
    table = budgets_table(results, routing, num_cards=1 + len(options.daemons))
    report.finish("gpu-budgets", record, table, options.save)
    return 1 if parts.failed else 0


def main() -> None:
    raise SystemExit(run(parsed()))


if __name__ == "__main__":
    main()
