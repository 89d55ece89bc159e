"""What the planner's placement loses against the best of a sweep, beside imposed daemons.

The parent computes on the processor; daemons are real processes whose computing takes longer, which
answer later, or which have little memory (bench.imposed_daemon). The planner knows what it always
does: its measurements of this machine, and what daemons offer. Each placement of the sweep gives
the parent some of each layer's experts and divides the others between daemons; a request is a
prompt and the tokens written after it.

Placements take turns, every other round in the reverse order, and the median of each one's times
counts. The planned one is opened in each round as a user opens it, and is none of the sweep, so
that a regret can be below zero.

  regret   how much longer the planned placement takes than the fastest of the sweep
  even     the same of the even split, which is what daemons get without a plan
  spread   the largest range of a placement's times, of its median: differences below it are noise

Threads of all of them: DFLASH_MOE_EXPERT_COMPUTE_THREADS.

Examples:
  python -m bench.placement_regret --model /tmp/q4_0.gguf
  python -m bench.placement_regret --model /tmp/q4_0.gguf --box slow far --rounds 5 --save
  python -m bench.placement_regret --parts 2 --limit 300
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.daemons import PATIENT_DEADLINE_MS, imposed_daemon
from bench.options import add_save_option, bench_parser
from bench.random_moe import model_path

from bench import report
from dflash_adapters.spec import MoeSpec
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from dflash_runtime.placement.split import LOCAL_OWNER, make_placement

_CONTEXT = 1024
_PLANNED = "planned"
_WITH_LITTLE_MEMORY = 48


@dataclass(frozen=True)
class Imposed:
    """One daemon's handicap, as arguments of bench.imposed_daemon."""

    factor: float = 1.0
    request_ms: float = 0.0
    free_mib: int | None = None

    @property
    def arguments(self) -> list[str]:
        found = ["--compute-factor", str(self.factor), "--request-ms", str(self.request_ms)]
        return found if self.free_mib is None else [*found, "--free-mib", str(self.free_mib)]


BOXES: dict[str, tuple[Imposed, ...]] = {
    "slow": (Imposed(4.0),),
    "very slow": (Imposed(12.0),),
    "far": (Imposed(1.5, request_ms=2.0),),
    "unlike": (Imposed(2.0), Imposed(8.0)),
    "little memory": (Imposed(2.0, free_mib=_WITH_LITTLE_MEMORY), Imposed(6.0)),
    "near and far": (Imposed(6.0), Imposed(2.0, request_ms=1.0)),
}


@dataclass(frozen=True)
class Share:
    """Parts of each layer's experts, by owner; the parent has the first ones."""

    parts: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        return ", ".join(f"{name} {part:.0%}" for name, part in self.parts if part)

    def placement(self, moe: MoeSpec) -> Placement:
        owned: dict[str, dict[int, list[int]]] = {name: {} for name, _ in self.parts}
        for layer in moe.layers:
            begin, due = 0, 0.0
            for name, part in self.parts:
                due += part * layer.num_experts
                owned[name][layer.layer_id] = [*range(begin, begin := round(due))]
        held = {name: {k: v for k, v in each.items() if v} for name, each in owned.items()}
        return make_placement(
            moe, {name: OwnedExperts.from_lists(each) for name, each in held.items() if each}
        )


@dataclass(frozen=True)
class Measured:
    """Seconds of the request by placement, in the order in which they were measured."""

    planned: str
    """The planned shares."""
    has_plan: bool
    """Whether something was planned; else daemons got what they get without a plan."""
    forecast: str
    even: str
    """The even split's key."""
    planned_s: list[float]
    sweep_s: dict[str, list[float]]

    @property
    def best(self) -> str:
        """The fastest of the sweep."""
        return min(self.sweep_s, key=lambda name: statistics.median(self.sweep_s[name]))

    def loss(self, times: Sequence[float]) -> float:
        """How much longer the median of `times` is than the fastest of the sweep takes."""
        return statistics.median(times) / statistics.median(self.sweep_s[self.best]) - 1

    @property
    def spread(self) -> float:
        """The largest range of a placement's times over their median."""
        every = [self.planned_s, *self.sweep_s.values()]
        return max((max(each) - min(each)) / statistics.median(each) for each in every)


def sweep_of(names: Sequence[str], num_parts: int) -> Iterator[Share]:
    """All divisions in steps of 1 / `num_parts`."""
    for parts in itertools.product(range(num_parts + 1), repeat=len(names)):
        if sum(parts) <= num_parts:
            here = (num_parts - sum(parts)) / num_parts
            yield Share(
                (
                    (LOCAL_OWNER, here),
                    *((name, part / num_parts) for name, part in zip(names, parts, strict=True)),
                )
            )


def main() -> None:
    """Command line."""
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("--model", help="a GGUF file (default: q4_0 of bench.random_moe)")
    parser.add_argument("--box", nargs="+", choices=list(BOXES), default=list(BOXES))
    parser.add_argument("--parts", type=int, default=4, help="of a layer in the sweep (default 4)")
    parser.add_argument("--rounds", type=int, default=2, help="of the sweep (default 2)")
    parser.add_argument("--repeats", type=int, default=3, help="of the request, each time (3)")
    parser.add_argument("--request", default="256:32", help="prompt and written tokens")
    parser.add_argument("--limit", type=float, default=3600, help="seconds in all (default 3600)")
    add_save_option(parser)
    options = parser.parse_args()
    path = Path(options.model) if options.model else model_path("q4_0")
    until_s = time.monotonic() + options.limit
    record = report.head("Placements beside imposed daemons")
    record["boxes"] = {}
    rows = []
    for number, name in enumerate(options.box):
        left_s = until_s - time.monotonic()
        found = measured(path, BOXES[name], options, left_s / (len(options.box) - number))
        record["boxes"][name] = asdict(found)
        rows.append(row_of(name, found))
        print(report.table(COLUMNS, rows), flush=True)
    report.finish("placement-regret", record, report.table(COLUMNS, rows), options.save)


COLUMNS = ("box", "planned", "s", "best of the sweep", "s", "regret", "even", "spread")


def row_of(name: str, found: Measured) -> list[str]:
    """A box in the table."""
    best = found.best
    return [
        name,
        found.planned if found.has_plan else f"{found.planned} (no plan)",
        f"{statistics.median(found.planned_s):.3f}",
        best,
        f"{statistics.median(found.sweep_s[best]):.3f}",
        f"{found.loss(found.planned_s):+.1%}",
        f"{found.loss(found.sweep_s[found.even]):+.1%}",
        f"{found.spread:.0%}",
    ]


def measured(
    path: Path, box: Sequence[Imposed], options: argparse.Namespace, limit_s: float
) -> Measured:
    """Times of the request by placement; the plan, and what it predicted."""
    until_s = time.monotonic() + limit_s
    prompt_size, _, written = options.request.partition(":")
    prompt = [(7 * index) % 1000 for index in range(int(prompt_size))]
    with contextlib.ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="regret-")))
        connect = [
            undo.enter_context(
                imposed_daemon(path, folder, name=f"d{index}", arguments=each.arguments)
            )
            for index, each in enumerate(box)
        ]
        settings = replace(
            load_settings(), connect=tuple(connect), context=_CONTEXT, plan_for=options.request,
            kv_type="f16", heat="off", deadline_ms=PATIENT_DEADLINE_MS,
        )  # fmt: skip

        def request_s(placement: Placement | None) -> tuple[list[float], Engine]:
            times = []
            with Engine.open(path, settings=settings, placement=placement) as engine:
                for _ in engine.generate(prompt[:64], 8, ignore_eos=True):
                    pass
                for _ in range(options.repeats):
                    for _ in engine.generate(prompt, int(written), ignore_eos=True):
                        pass
                    stats = engine.last_generation
                    times.append(stats.prefill_s + stats.decode_s)
                return times, engine

        _, planned = request_s(None)  # measures what is not known yet of this machine
        print(f"planned: {_text_of(planned.placement)}", flush=True)
        names = [f"link{index}" for index in range(len(box))]
        even = Share(((LOCAL_OWNER, 0.0), *((name, 1 / len(names)) for name in names)))
        shares = {str(each): each for each in (even, *sweep_of(names, options.parts))}
        moe = planned.spec.moe
        placements = {name: each.placement(moe) for name, each in shares.items()}
        times = in_turns(
            {_PLANNED: None, **placements},
            lambda placement: request_s(placement)[0],
            rounds=options.rounds,
            until_s=until_s,
        )
        return Measured(
            _text_of(planned.placement),
            planned.plan is not None,
            str(planned.plan.forecast) if planned.plan else "",
            str(even),
            times.pop(_PLANNED),
            times,
        )


def in_turns(
    placements: Mapping[str, Placement | None],
    times_of: Callable[[Placement | None], list[float]],
    *,
    rounds: int,
    until_s: float,
) -> dict[str, list[float]]:
    """Times by placement, every other round in the reverse order; the first round is always whole,
    later ones end at `until_s` of the clock."""
    times: dict[str, list[float]] = {name: [] for name in placements}
    for number in range(rounds):
        for name in list(placements)[:: -1 if number % 2 else 1]:
            if number and time.monotonic() > until_s:
                print("no time is left: the round is not whole", flush=True)
                return times
            times[name] += times_of(placements[name])
            print(f"  {statistics.median(times[name]):.3f} s  {name}", flush=True)
    return times


def _text_of(placement: Placement) -> str:
    total = sum(placement.experts_per_layer.values())
    parts = zip(placement.owner_names, placement.owners, strict=True)
    return ", ".join(f"{name} {each.num_experts / total:.0%}" for name, each in parts)


if __name__ == "__main__":
    main()
