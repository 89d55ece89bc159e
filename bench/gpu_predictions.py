"""What plans predict beside what is measured, for real set-ups with a GPU.

Each set-up is opened as a user opens it, without any option but those that make it this set-up; its
plan says how fast decode and prompts will be (`Engine.plan.forecast`; where nothing had to be
planned, `dflash-moe plan` says it). A process takes all of the GPU's memory but the budget of the
set-up. All know heat of other texts than are measured, which the first engine of a file learns.
Each set-up measures the machine anew, as a first start does: what others do on a shared host
changes within minutes. With --kept-box it is as at later starts: the machine is measured once, and
heat is learnt with half of the experts on the processor. Their times in steps replace those that
were measured.

  decode         after 448 tokens
  decode later   after 1,152: plans predict decode in the middle of the request that they are made
                 for, 1,000:400
  prompts        of 512 and 4,096 tokens

The error is predicted ÷ measured - 1, of medians. Median and worst are of decode and prompts; those
of decode later are shown besides.

Set-ups (--only, --list), those of other shapes with their own files. Routing is planted in all: a
model of random weights writes a few tokens again and again, and heat of that tells nothing.
  python -m bench.random_moe q4_k_m --layers 48 --routing qwen3 --out /dev/shm/m48.gguf
  python -m bench.random_moe qwen35moe --layers 16 --routing qwen3 --out /dev/shm/q35.gguf
  python -m bench.random_moe olmoe --routing qwen3 --out /dev/shm/olmoe.gguf

Examples:
  python -m bench.gpu_predictions --model /dev/shm/m48.gguf --save
  python -m bench.gpu_predictions --model /dev/shm/m48.gguf --only 8gib 12gib --keep $OUT/p.json
  python -m bench.gpu_predictions --qwen35moe /dev/shm/q35.gguf --olmoe /dev/shm/olmoe.gguf
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.cpu_time import use_cores
from bench.gpu_budgets import Ballast
from bench.gpu_parts import Parts, Result, say
from bench.gpu_turns import (
    DECODE,
    LATER,
    Bench,
    budget_of,
    is_gpu,
    medians,
    tokens_of,
)
from bench.options import add_save_option, bench_parser
from bench.sides import Side
from bench.texts import Texts, walk_of

from bench import report
from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.device import parse_device
from dflash_protocol.settings import load_settings
from dflash_runtime.engine.deciding import plan_of_file
from dflash_runtime.engine.measuring.kept import box_record, drop_box, kept_box
from dflash_runtime.engine.measuring.machine import gpus_of_machine, key_of_machine

_GIB = 1 << 30
_CONTEXT = 8192
_DECODES = 3
"""Texts that decode is measured with: their shares of experts differ."""
_ON_GPU = "gpu"
"""Stands for a daemon's GPU in a set-up."""
FORECASTS = {
    DECODE: "decode",
    LATER: "decode",
    "prompt 512": "prompt_512",
    "prompt 4096": "prompt_4096",
}
"""Rows, and what the forecast calls them."""
_CROSSINGS = "links", "copies", "together", "host_stop", "host_asked", "offload"
"""Of a box, what results keep."""
_COUNTED = (DECODE, "prompt 512", "prompt 4096")
"""Rows whose errors count."""


@dataclass(frozen=True)
class SetUp:
    """One way to open a model."""

    file: str = "model"
    """Which of the files."""
    gib: float = 0.0
    """The budget; 0: as `part` says."""
    part: float = 0.0
    """A budget that holds such a part of the experts."""
    device: str = ""
    """Empty: the bench's GPU."""
    daemons: tuple[str, ...] = ()
    """``gpu``: on a second one, within the same budget."""
    transport: str | None = None
    mode: str = "auto"
    """The way to place experts: a plan leaves a daemon out that gains nothing."""
    cores: int | None = None
    context: int = _CONTEXT
    samples: int = 2


SETUPS: dict[str, SetUp] = {
    "8gib": SetUp(gib=8),
    "12gib": SetUp(gib=12),
    "16gib": SetUp(gib=16),
    "24gib": SetUp(gib=24),
    "8gib-8cores": SetUp(gib=8, cores=8),
    "12gib-8cores": SetUp(gib=12, cores=8),
    "12gib-32k": SetUp(gib=12, context=32_768),
    "8gib-cpu-daemon": SetUp(gib=8, daemons=("cpu",)),
    "8gib-cpu-daemon-all": SetUp(gib=8, daemons=("cpu",), mode="remote"),
    "gpu-daemon-mail": SetUp(gib=12, daemons=("gpu",)),
    "gpu-daemon-host": SetUp(gib=12, daemons=("gpu",), transport="shared"),
    "cpu": SetUp(device="cpu", samples=1),
    "qwen35moe-half": SetUp("qwen35moe", part=0.5),
    "qwen35moe-quarter": SetUp("qwen35moe", part=0.25),
    "olmoe-half": SetUp("olmoe", part=0.5),
    "olmoe-quarter": SetUp("olmoe", part=0.25),
}


class Forecaster:
    """What `dflash-moe plan` predicts. The object of a Side."""

    def __init__(
        self, path: Path, *, device: str, context: int, heat: Path, cores: int | None
    ) -> None:
        use_cores(cores)
        settings = replace(
            load_settings(),
            model=str(path),
            device=parse_device(device),
            context=context,
            hotness=str(heat),
            heat="off",
        )
        self._forecast = asdict(plan_of_file(settings, on_progress=lambda *_: None).forecast)
        self._box = BoxSide(path, device=device, cores=cores)

    def forecast(self) -> dict[str, float]:
        return self._forecast

    def crossings(self) -> dict[str, Any]:
        """See BoxSide."""
        return self._box.crossings()


class BoxSide:
    """What is known of the machine. The object of a Side, as it may load drivers."""

    def __init__(self, path: Path, *, device: str, cores: int | None) -> None:
        use_cores(cores)
        settings = replace(load_settings(), model=str(path), device=parse_device(device))
        self._folder = settings.cache_dir
        with GgufFile.open(path) as file:
            self._key = key_of_machine(file, settings, gpus_of_machine())

    def forget(self) -> None:
        """Let the next start measure."""
        drop_box(self._key, self._folder)

    def crossings(self) -> dict[str, Any]:
        """What was measured between devices."""
        box = kept_box(self._key, self._folder)
        record = {} if box is None else box_record(box)
        return {name: record[name] for name in _CROSSINGS if record.get(name)}


def forgetting_box(
    result: Result,
    until_s: float,
    *,
    measure: Callable[[Result, float], None],
    bench: Bench,
    cores: int | None,
) -> None:
    """Measure after what was known of the machine is forgotten; what is known after serving, which
    replaces times of the processor's experts, is kept too."""
    options: dict[str, Any] = {"device": bench.device, "cores": cores, "until_s": until_s}
    with bench.open_side("box", BoxSide, bench.path, **options) as side:
        side.call("forget")
    measure(result, until_s)
    with bench.open_side("box", BoxSide, bench.path, **options) as side:
        result["box_served"] = side.call("crossings")


def measure_setup(
    result: Result, until_s: float, *, bench: Bench, heat: Path, of: SetUp, second: str
) -> None:
    """Fill `result` with one set-up's speeds within its budget, and its plan's forecast.
    `second`: the GPU of daemons."""
    with ExitStack() as stack:
        devices = [bench.device, *(second for each in of.daemons if each == _ON_GPU)]
        for device in devices:
            if is_gpu(device):
                num_bytes = int(of.gib * _GIB) or budget_of(bench.path, of.context, of.part)
                held = Side("ballast", Ballast, device, num_bytes, until_s=until_s)
                result["budget_bytes"] = stack.enter_context(held).call("budget")
        _measure_within(result, until_s, bench=bench, heat=heat, of=of, second=second)


def _measure_within(
    result: Result, until_s: float, *, bench: Bench, heat: Path, of: SetUp, second: str
) -> None:
    options: dict[str, Any] = {"cores": of.cores, "ipc_transport": of.transport}
    if of.mode != "auto":
        options["wishes"] = {"moe_mode": of.mode}
    if of.daemons:
        options["daemons"] = [second if each == _ON_GPU else each for each in of.daemons]
    if not of.daemons:  # before: it uses what the engine then measures anyway
        with bench.open_side(
            "plan",
            Forecaster,
            bench.path,
            device=bench.device,
            context=bench.context,
            heat=heat,
            cores=of.cores,
            until_s=until_s,
        ) as side:
            result["forecast"] = side.call("forecast")
            result["box"] = side.call("crossings")
    bench.turn(result, until_s, heat=heat, **options)
    planned = result["plan"].get("forecast")
    if planned:
        result["forecast"] = planned
        say(f"  {result['plan']['text']}")


def errors_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Predicted ÷ measured - 1, by row."""
    forecast, found = result.get("forecast") or {}, {}
    for row, seconds in medians(result.get("seconds_of", {})).items():
        predicted = forecast.get(FORECASTS.get(row, ""))
        if predicted:
            found[row] = predicted * seconds / tokens_of(row) - 1
    return found


def predictions_table(results: Mapping[str, Result]) -> str:
    """Set-ups, and the median and the worst error."""
    rows = []
    for name, result in results.items():
        errors, forecast = errors_of(result), result.get("forecast") or {}
        times, cells = medians(result.get("seconds_of", {})), []
        for row, what in FORECASTS.items():
            cell = f"{tokens_of(row) / times[row]:,.1f}" if row in times else ""
            if row in errors:
                cell = f"{forecast[what]:,.1f} / {cell} ({errors[row]:+.1%})"
            cells.append(cell)
        why = "".join(str(each).strip().splitlines()[-1] for each in result.get("errors", [])[-1:])
        rows.append([name, (result.get("plan") or {}).get("chosen", ""), *cells, why[:70]])
    for name, counted in (("decode and prompts", _COUNTED), (DECODE, (DECODE,)), (LATER, (LATER,))):
        sizes = [
            abs(error)
            for result in results.values()
            for row, error in errors_of(result).items()
            if row in counted
        ]
        if sizes:
            spread = f"median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}"
            rows.append([f"error, {name}", spread, *[""] * (len(FORECASTS) + 1)])
    columns = ["tokens/s, predicted / measured", "chosen", *FORECASTS, ""]
    return report.table(columns, rows)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("--model", type=Path, help="the 48-layer file, with planted routing")
    parser.add_argument("--qwen35moe", type=Path, help="a file of this shape")
    parser.add_argument("--olmoe", type=Path, help="a file of this shape")
    parser.add_argument("--only", nargs="+", choices=list(SETUPS), help="default: all with a file")
    parser.add_argument("--list", action="store_true", help="print the set-ups, and end")
    parser.add_argument("--device", default="cuda:0", help="default cuda:0")
    parser.add_argument("--daemon-device", default="cuda:1", help="GPU of daemons (default cuda:1)")
    parser.add_argument(
        "--kept-box", action="store_true", help="measure the machine once, not for each set-up"
    )
    parser.add_argument("--turn-limit", type=float, default=90, help="seconds a set-up (90)")
    parser.add_argument("--limit", type=float, default=560, help="seconds in all (default 560)")
    parser.add_argument(
        "--keep", type=Path, help="JSON that is written after each set-up, if a run is killed"
    )
    add_save_option(parser)
    return parser.parse_args(arguments)


def chosen_setups(options: argparse.Namespace) -> dict[str, SetUp]:
    """Those that were asked for and have a file."""
    names = options.only or list(SETUPS)
    return {name: SETUPS[name] for name in names if getattr(options, SETUPS[name].file)}


def measure_all(
    setups: Mapping[str, SetUp],
    results: dict[str, Result],
    *,
    options: argparse.Namespace,
    bench_of: Callable[[SetUp], Bench],
    keep: Callable[[], None],
) -> Parts:
    """Each set-up within its budget, as far as time permits."""
    parts, heats = Parts(options.limit), dict[str, Path]()
    wishes = {"expert_budget_pct": 50} if options.kept_box else {}
    for name, of in setups.items():
        bench = bench_of(of)
        if of.file not in heats:
            # Within all of the GPU's memory; each file's heat is the same whoever computes.
            learning = replace(bench, device=options.device)

            def learn(_result: Result, until_s: float, from_: Bench = learning) -> None:
                heats[of.file] = from_.learn(until_s, wishes=wishes)  # noqa: B023 - called at once

            if parts.run(f"heat of {of.file}", 2 * options.turn_limit, learn)["errors"]:
                results[name] = {"errors": ["no heat was learnt"]}
                continue
        measure: Callable[[Result, float], None] = partial(
            measure_setup, bench=bench, heat=heats[of.file], of=of, second=options.daemon_device
        )
        if not options.kept_box:
            measure = partial(forgetting_box, measure=measure, bench=bench, cores=of.cores)
        results[name] = parts.run(name, options.turn_limit, measure)
        keep()
    return parts


def run(options: argparse.Namespace) -> int:
    """Measure, print, keep. Returns the exit status."""
    setups = chosen_setups(options)
    if options.list:
        print("\n".join(f"{name:20s} {each}" for name, each in SETUPS.items()))
        return 0
    results: dict[str, Result] = {}
    record = report.head("Predictions of plans beside real set-ups")
    record |= {"cores": os.cpu_count(), "setups": results}

    def keep() -> None:
        if options.keep is not None:
            options.keep.write_text(report.as_text(record) + "\n")

    with tempfile.TemporaryDirectory(prefix="predictions-") as folder:

        def bench_of(of: SetUp) -> Bench:
            path = getattr(options, of.file)
            lengths = [each for each in (512, 4096) if each < of.context]
            texts = Texts.of(
                walk_of(path), lengths=lengths, samples=of.samples, decodes=_DECODES, request=None
            )
            device = of.device or options.device
            return Bench(path, device, of.context, texts, Path(folder), Side)

        parts = measure_all(setups, results, options=options, bench_of=bench_of, keep=keep)
    report.finish("gpu-predictions", record, predictions_table(results), options.save)
    return 1 if parts.failed else 0


def main() -> None:
    raise SystemExit(run(parsed()))


if __name__ == "__main__":
    main()
