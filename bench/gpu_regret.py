"""What the planner's placement loses against the best of a sweep, within budgets of a GPU's memory.

A process takes all of the GPU's memory but a budget. Within it engines take turns: each is opened,
measured and closed, in a process of its own; every other round goes in the reverse order. All of
them know the same heat, of other texts than are measured. The sweep:

  hot n       the n hottest experts of each layer on the GPU, the others on the processor
  layers n    all experts of n layers on the GPU, the others' on the processor (--n-cpu-moe)
  CPU-MoE     all experts on the processor
  old n       the first n experts of each layer, the most that fit beside the plan's chunks, with
              and without copies of the others' weights for prompts
  copies ...  the planned way without such copies (whose memory experts get), and with them in all
              layers
  slots n     the planned way without slots of steps, if it has any, else with eight

n goes up to all that fit. The planned placement is opened as a user opens it, and is none of the
sweep: a regret can be below zero. Experts move between requests in its engine alone.

  regret      time of the planned ÷ least time of the sweep - 1, medians: of a step behind 448
              tokens, of prompts, of the request that plans are made for (1,000:400), and of what
              plans minimise: that request and a tenth of a prompt of 4,096
  predicted   tokens per second, of each placement that the planner prices, beside measured ones

The file needs planted routing. Twelve layers suffice:
  python -m bench.random_moe q4_k_m --layers 12 --routing qwen3 --out /dev/shm/m12.gguf

Examples:
  python -m bench.gpu_regret --model /dev/shm/m12.gguf --save
  python -m bench.gpu_regret --model /dev/shm/m12.gguf --parts 0.5 --limit 560 --keep $OUT/r.json
  python -m bench.gpu_regret --model /dev/shm/m12.gguf --budgets 3 --decode-only --grid 3
  python -m bench.gpu_regret --model /dev/shm/m48.gguf --budgets 8 12 --only old
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu_budgets import Ballast
from bench.gpu_parts import Parts, Result, say
from bench.gpu_turns import (
    DECODE,
    REQUEST,
    Bench,
    budget_of,
    is_gpu,
    medians,
    prompt_row,
    tokens_of,
)
from bench.options import add_save_option, bench_parser
from bench.sides import Side, SideError
from bench.texts import Texts, walk_of

from bench import report
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import MoeSpec
from dflash_protocol.device import parse_device
from dflash_protocol.errors import SettingsError
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_protocol.settings import Settings, load_settings
from dflash_runtime.compute.step_slots import SLOTS
from dflash_runtime.engine.deciding import plan_of_file
from dflash_runtime.placement.footprint import Memory, footprint
from dflash_runtime.placement.plan import Plan
from dflash_runtime.placement.plan_record import as_json
from dflash_runtime.placement.situation import PlannedRequest
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER, make_placement

PLANNED, MINIMISED = "planned", "what is minimised"
_GIB = 1 << 30
FORECASTS = {DECODE: "decode", "prompt 512": "prompt_512", "prompt 4096": "prompt_4096"}
"""Rows that plans predict, and what the prediction is called."""


class Sweep:
    """Plans of the sweep, saved as files. The object of a Side, within the budget."""

    def __init__(
        self, path: Path, *, device: str, context: int, heat: Path, folder: Path, grid: int
    ) -> None:
        self._folder, self._grid = folder, grid
        self._settings = replace(
            load_settings(),
            model=str(path),
            device=parse_device(device),
            context=context,
            hotness=str(heat),
            heat="off",
        )
        with GgufFile.open(path) as file:
            self._spec = read_spec(file)
            self._footprint = footprint(file, self._spec, Memory.GPU)
        self._saved: dict[str, dict[str, Any]] = {}

    def saved(self) -> dict[str, dict[str, Any]]:
        """Files of plans by name, each with its forecast; None if it was not priced."""
        moe = self._spec.moe
        planned = self._planned()
        self._add("CPU-MoE", self._planned(cpu_moe=True))
        each = min(layer.num_experts for layer in moe.layers)

        def hot(number: int) -> Plan:
            return self._planned(local_experts=number, expert_budget_pct=100)

        def layers(number: int) -> Plan:
            return self._planned(n_cpu_moe=self._spec.num_layers - number)

        for name, of_number, most in (("hot", hot, each), ("layers", layers, len(moe.layers))):
            largest = largest_that(lambda n, of=of_number: _is_possible(of, n), most)  # type: ignore[misc]
            for number in parts_of(largest, self._grid):
                self._add(f"{name} {number}", of_number(number))
        if planned.prompts_here:
            self._add("copies off", self._planned(prefill_offload="off"))
        on_host = _layers_of(planned.placement, HOST_OWNER)
        if planned.prompts_here and on_host != planned.prompts_here:
            self._add("copies in all", replace(planned, prompts_here=on_host), is_priced=False)
        slots = 0 if planned.setup.cache_slots else SLOTS
        self._add(f"slots {slots}", self._planned(moe_cache_slots=slots))
        for copies in (False, True):
            number = self._most_of_first(planned, copies)
            if number:
                placement = first_of_each(moe, number)
                copied = _layers_of(placement, HOST_OWNER) if copies else ()
                old = replace(planned, placement=placement, prompts_here=copied)
                name = f"old {number}{', copies' if copies else ''}"
                self._add(name, old, is_priced=False)
        return self._saved

    def _planned(self, **wishes: Any) -> Plan:
        settings: Settings = replace(self._settings, **wishes)
        return plan_of_file(settings, on_progress=lambda *_: None)

    def _most_of_first(self, planned: Plan, copies: bool) -> int:
        """How many first experts of each layer fit beside the plan's chunk."""
        setup, layers = planned.setup, self._spec.moe.layers
        needs = self._footprint.needs(
            num_positions=setup.context,
            kv_type=setup.kv_type,
            chunk=setup.chunk,
            num_remote_layers=len(layers),
        )
        room = planned.budgets[0].free_bytes - needs.total

        def fits(number: int) -> bool:
            taken = self._footprint.experts_bytes({each.layer_id: number for each in layers})
            if copies:
                missing = {each.layer_id: each.num_experts - number for each in layers}
                taken += self._footprint.offload_bytes(missing)
            return taken <= room

        return largest_that(fits, min(each.num_experts for each in layers) - 1)

    def _add(self, name: str, found: Plan, *, is_priced: bool = True) -> None:
        file = self._folder / f"{name.replace(' ', '-').replace(',', '')}.plan"
        file.write_text(as_json(found))
        forecast = found.forecast if is_priced else None
        self._saved[name] = {
            "file": file.name,
            "chunk": found.setup.chunk,
            "layers_copied": len(found.prompts_here),
            "forecast": forecast and {key: getattr(forecast, key) for key in FORECASTS.values()},
        }


def _is_possible(plan_of: Callable[[int], Plan], number: int) -> bool:
    try:
        plan_of(number)
    except SettingsError:
        return False
    return True


def largest_that(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, if all smaller ones do; 0 need not."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def parts_of(largest: int, grid: int) -> list[int]:
    """`grid` numbers up to the largest, evenly, without 0; the largest first."""
    return sorted({round(largest * step / grid) for step in range(1, grid + 1)} - {0}, reverse=True)


def first_of_each(moe: MoeSpec, number: int) -> Placement:
    """The old placement: the first experts of each layer on the device."""
    here = {each.layer_id: range(number) for each in moe.layers}
    there = {each.layer_id: range(number, each.num_experts) for each in moe.layers}
    return make_placement(
        moe,
        {LOCAL_OWNER: OwnedExperts.from_lists(here), HOST_OWNER: OwnedExperts.from_lists(there)},
    )


def _layers_of(placement: Placement, owner: str) -> tuple[int, ...]:
    if owner not in placement.owner_names:
        return ()
    owned = placement.owners[placement.owner_names.index(owner)]
    return tuple(sorted(layer_id for layer_id, ids in owned.by_layer.items() if ids.size))


def measure_budget(
    name: str,
    bench: Bench,
    parts: Parts,
    found: Result,
    *,
    options: argparse.Namespace,
    keep: Callable[[], None],
) -> None:
    """The planned placement and the sweep in turns, as far as time permits."""
    turns: dict[str, Result] = found.setdefault("turns", {})
    heat = bench.folder / "heat"
    learnt = parts.run(f"{name}: heat", options.turn_limit * 3, partial(_learn, bench, heat))
    found["learn_s"] = learnt["seconds"]
    if learnt["errors"]:
        return

    def plans(result: Result, until_s: float) -> None:
        with bench.open_side(
            "plans",
            Sweep,
            bench.path,
            device=bench.device,
            context=bench.context,
            heat=heat,
            folder=bench.folder,
            grid=options.grid,
            until_s=until_s,
        ) as side:
            found["sweep"] = side.call("saved")

    parts.run(f"{name}: plans", options.turn_limit * 2, plans)
    sweep = found.get("sweep", {})
    each = [PLANNED, *(way for way in sweep if not options.only or way.split()[0] in options.only)]

    def turn(_part: Result, until_s: float, into: Result, wishes: Mapping[str, Any]) -> None:
        bench.turn(into, until_s, heat=heat, wishes=wishes)

    # On a machine that has just started, copies of experts were three times as slow at first.
    dropped = partial(turn, into={}, wishes={})
    parts.run(f"{name}: one turn that is dropped", options.turn_limit, dropped)
    for number in range(options.rounds):
        for way in each[:: -1 if number % 2 else 1]:
            result = turns.setdefault(way, {})
            if result.get("refused"):
                continue
            wishes = {}
            if way != PLANNED:
                wishes = {"plan": str(bench.folder / found["sweep"][way]["file"]), "swap_max": 0}
            part = parts.run(
                f"{name}: round {number + 1}, {way}",
                options.turn_limit,
                partial(turn, into=result, wishes=wishes),
            )
            if part["errors"]:
                result["refused"] = part["errors"][-1].strip().splitlines()[-1]
            keep()
            if parts.left_s < 0:
                return


def _learn(bench: Bench, heat: Path, result: Result, until_s: float) -> None:
    if not heat.exists():
        heat.write_bytes(bench.learn(until_s).read_bytes())


def seconds_of(turn: Result) -> dict[str, float]:
    """Medians by row, that of what plans minimise among them."""
    times, wanted = medians(turn.get("seconds_of", {})), PlannedRequest()
    long = prompt_row(wanted.long_prompt)
    if REQUEST in times and long in times:
        times[MINIMISED] = times[REQUEST] + wanted.long_share * times[long]
    return times


def regrets(turns: Mapping[str, Result]) -> dict[str, tuple[float, str, float]]:
    """By row: the regret, the fastest of the sweep, and its seconds."""
    times = {name: seconds_of(each) for name, each in turns.items()}
    planned, found = times.pop(PLANNED, {}), {}
    for row, seconds in planned.items():
        sweep = [(each[row], name) for name, each in times.items() if row in each]
        if sweep:
            least, name = min(sweep)
            found[row] = seconds / least - 1, name, least
    return found


def regret_table(budgets: Mapping[str, Result]) -> str:
    """Regret, and the planned speed over the old placement's, by budget and row."""
    rows = []
    for budget, found in budgets.items():
        turns = found.get("turns", {})
        planned = seconds_of(turns.get(PLANNED, {}))
        for row, (regret, name, least) in regrets(turns).items():
            old = [
                seconds_of(each).get(row)
                for other, each in turns.items()
                if other.startswith("old")
            ]
            known = [each for each in old if each]
            rows.append(
                [
                    f"{budget}: {row}",
                    f"{1e3 * planned[row]:.2f}",
                    name,
                    f"{1e3 * least:.2f}",
                    f"{regret:+.1%}",
                    f"{min(known) / planned[row]:.2f}" if known else "",
                ]
            )
    columns = ["medians", "planned, ms", "best of the sweep", "ms", "regret", "planned ÷ old"]
    return report.table(columns, rows)


def speeds_table(budgets: Mapping[str, Result]) -> str:
    """What was measured of each placement, beside what was predicted."""
    rows = []
    for budget, found in budgets.items():
        for name, each in found.get("turns", {}).items():
            plan = found.get("sweep", {}).get(name) or each.get("plan") or {}
            times, cells = medians(each.get("seconds_of", {})), []
            for row in (*FORECASTS, REQUEST):
                cells.append(_cell(row, times.get(row), plan.get("forecast") or {}))
            spread = _spread(each.get("seconds_of", {}).get(DECODE, []))
            facts = f"{plan.get('chunk', '')}, {plan.get('layers_copied', '')}"
            rows.append([f"{budget}: {name}", *cells, spread, facts, each.get("refused", "")[:60]])
    columns = [
        "tokens/s (predicted, error)", *FORECASTS, "request, s", "spread of decode",
        "chunk, layers copied", "",
    ]  # fmt: skip
    return report.table(columns, rows)


def _cell(row: str, seconds: float | None, forecast: Mapping[str, float]) -> str:
    if seconds is None:
        return ""
    if row == REQUEST:
        return f"{seconds:.2f}"
    speed = tokens_of(row) / seconds
    predicted = forecast.get(FORECASTS[row])
    if not predicted:
        return f"{speed:,.1f}"
    return f"{speed:,.1f} ({predicted:,.1f}, {predicted / speed - 1:+.0%})"


def _spread(times: Sequence[float]) -> str:
    return f"{(max(times) - min(times)) / statistics.median(times):.0%}" if times else ""


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("--model", type=Path, required=True, help="a file with planted routing")
    parser.add_argument("--budgets", type=float, nargs="+", help="GiB (default: by --parts)")
    parser.add_argument(
        "--parts", type=float, nargs="+", default=[0.25, 0.5, 0.75],
        help="budgets that hold such parts of the experts (default 0.25 0.5 0.75)",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda:0", help="default cuda:0")
    parser.add_argument("--context", type=int, default=8192, help="positions (default 8192)")
    parser.add_argument("--decode-only", action="store_true", help="no prompts, no request")
    parser.add_argument("--grid", type=int, default=4, help="numbers of a way (default 4)")
    parser.add_argument("--only", nargs="+", help="ways by their first word (default: all)")
    parser.add_argument("--rounds", type=int, default=2, help="default 2")
    parser.add_argument("--turn-limit", type=float, default=60, help="seconds a turn (default 60)")
    parser.add_argument("--limit", type=float, default=560, help="seconds in all (default 560)")
    parser.add_argument(
        "--keep", type=Path, help="JSON that is written after each turn, for a run that is killed"
    )
    add_save_option(parser)
    return parser.parse_args(arguments)


def budgets_of(options: argparse.Namespace) -> dict[str, int]:
    """Bytes by name."""
    if options.budgets:
        return {f"{each:g} GiB": int(each * _GIB) for each in options.budgets}
    of_part = partial(budget_of, options.model, options.context)
    return {f"{part:.0%} ({of_part(part) / _GIB:.1f} GiB)": of_part(part) for part in options.parts}


def run(options: argparse.Namespace) -> int:
    """Measure, print, keep. Returns the exit status."""
    parts = Parts(options.limit)
    texts = replace(Texts.of(walk_of(options.model)), later=())
    if options.decode_only:
        texts = replace(texts, prompts={}, request=())
    record = report.head("Planned placements and a sweep within the memory of a GPU")
    budgets: dict[str, Result] = {}
    record |= {
        "cores": os.cpu_count(),
        "model": {"name": options.model.name, "bytes": options.model.stat().st_size},
        "context": options.context,
        "budgets": budgets,
    }

    def keep() -> None:
        if options.keep is not None:
            options.keep.write_text(report.as_text(record) + "\n")

    with tempfile.TemporaryDirectory(prefix="regret-") as folder:
        for name, num_bytes in budgets_of(options).items():
            say(f"=== {name}")
            found = budgets.setdefault(name, {})
            bench = Bench(options.model, options.device, options.context, texts, Path(folder))
            with ExitStack() as stack:
                try:
                    if is_gpu(options.device):
                        held = Side("ballast", Ballast, options.device, num_bytes)
                        found["budget_bytes"] = stack.enter_context(held).call("budget")
                except SideError as error:  # of one budget: the others are measured
                    say(str(error))
                    found["error"] = str(error)
                    continue
                measure_budget(name, bench, parts, found, options=options, keep=keep)
            say(regret_table({name: found}))
    tables = f"{regret_table(budgets)}\n\n{speeds_table(budgets)}"
    report.finish("gpu-regret", record, tables, options.save)
    return 1 if parts.failed else 0


def main() -> None:
    raise SystemExit(run(parsed()))


if __name__ == "__main__":
    main()
