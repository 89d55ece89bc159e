"""Tables of the documents, generated from the code: settings, log lines, errors, events, metrics.

Each is Markdown text.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from functools import cache

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from tooling.written_lines import ANY, Line, lines_of, sources

from dflash_protocol.device import CPU
from dflash_protocol.ids import Phase
from dflash_protocol.placement import Placement
from dflash_protocol.settings.kinds import Switch
from dflash_protocol.settings.table import (
    KNOBS,
    SETTINGS_FILE,
    SETTINGS_FLAG,
    SETTINGS_HELP,
    Knob,
)
from dflash_runtime.compute.expert_arena import ArenaStats, LookAheadStats, PinStats
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.slot_stats import SlotStats
from dflash_runtime.engine.engine import EngineStats, GenerationStats
from dflash_runtime.experts.events import EventKind
from dflash_runtime.experts.telemetry import ExpertMemoryStats, OwnerKind, OwnerStats
from dflash_runtime.placement.plan import (
    DeviceBudget,
    ExpertRoom,
    Forecast,
    Origin,
    Plan,
    RoomStatus,
    Setup,
)
from dflash_runtime.placement.wishes import MoeMode
from dflash_runtime.serving.metrics import NAMESPACE, Metrics


def settings() -> str:
    """Every setting, in the order of the table in the code."""
    rows = [(f"`{SETTINGS_FILE}`", f"`{SETTINGS_FLAG}`", "", "none", "a path", SETTINGS_HELP)]
    return _table(
        ("variable", "flag", "key", "default", "must be", "meaning"), [*rows, *map(_setting, KNOBS)]
    )


def _setting(knob: Knob) -> tuple[str, ...]:
    flag = f"{knob.flag}`, `--no-{knob.flag[2:]}" if isinstance(knob.kind, Switch) else knob.flag
    default = f"`{knob.default_text}`" if knob.default_text else "none"
    names = (f"`{knob.variable}`", f"`{flag}`", f"`{knob.key}`")
    return (*names, default, knob.kind.allowed, knob.help)


def log_lines() -> str:
    """Every line logged at level INFO or above, or written to stderr."""
    return _table(
        ("line", "level", "of", "what it means, what to do"),
        (
            (f"`{line.text}`", line.level, line.program, line.meaning)
            for line in merged(line for line in _written() if line.level)
        ),
    )


def errors() -> str:
    """Every error that a comment documents."""
    return _table(
        ("error", "what it means, what to do"),
        (
            (f"`{line.text}`", line.meaning)
            for line in merged(line for line in _written() if not line.level)
        ),
    )


def events() -> str:
    """Every kind of event."""
    [definition] = ast.parse(inspect.getsource(EventKind)).body
    assert isinstance(definition, ast.ClassDef)
    said = [
        " ".join(node.value.value.split())
        for node in definition.body[1:]
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    kinds = zip(EventKind, said, strict=True)
    return _table(("event", "what happened"), sorted((f"`{kind}`", what) for kind, what in kinds))


def metrics() -> str:
    """Every metric, without the common prefix."""
    rows = []
    for family in metric_families():
        labels = {label: None for sample in family.samples for label in sample.labels}
        listed = ",".join(label for label in labels if label != "le")
        name = family.name.removeprefix(f"{NAMESPACE}_")
        name += "_total" if family.type == "counter" else ""
        name += f"{{{listed}}}" if listed else ""
        what = family.documentation.rstrip(".")
        rows.append((f"`{name}`", family.type, what))
    return _table(("name", "kind", "what"), sorted(rows))


def metric_families() -> Iterator[Metric]:
    """All metrics of a server, each with all of its labels."""
    metrics, owner = Metrics(), OwnerStats(OwnerKind.DAEMON, num_experts=1)
    owner.of_phase(Phase.DECODE).round_trips.add(1e-3)
    stats = EngineStats(
        owners={"cpu": owner},
        events=[],
        selections={},
        disk=ArenaStats(0, 0, 0, 0, 0, 0.0, LookAheadStats(), 0.0, 0.0, 0.0, {}, PinStats()),
        slots=SlotStats(num_slots=1),
        memory=ExpertMemoryStats(0, 0, 0),
        daemon_memory={"gpu": ExpertMemoryStats(0, 0, 0)},
    )
    budget = DeviceBudget("cpu", *[0] * 6)
    plan = Plan(
        Origin("", "", 0),
        Setup(CPU, 1, KvType.F16, 1),
        Placement({}, (), ()),
        (),
        MoeMode.RESIDENT,
        "",
        Forecast(1.0, 1.0, 1.0),
        1.0,
        (budget,),
        ExpertRoom(RoomStatus.EMPTY, 0, 0, 0),
        (),
        "",
    )
    metrics.watch_engine(lambda: stats, lambda: plan)
    metrics.count_generation("stop", GenerationStats(512, 0, 2, prefill_s=1.0, decode_s=1.0))
    metrics.watch_queue(lambda: 0)
    metrics.count_owners(stats.owners)
    metrics.http_requests.labels("/ready", "200").inc()
    metrics.rejected.labels("queue_full").inc()
    metrics.finished.labels("stop").inc()
    for family in text_string_to_metric_families(metrics.text().decode()):
        if family.name.startswith(NAMESPACE):
            yield family


def merged(lines: Iterable[Line]) -> list[Line]:
    """One line for all places that write the same text, sorted.

    Raises: ValueError for a line that is explained nowhere, or in several places.
    """
    places: dict[str, list[Line]] = {}
    for line in lines:
        places.setdefault(line.pattern, []).append(line)
    return sorted(map(_one, places.values()), key=lambda line: line.text.casefold())


def _one(places: list[Line]) -> Line:
    where = ", ".join(line.where for line in places)
    explained = [line for line in places if line.meaning]
    if len(explained) != 1:
        raise ValueError(
            f"{where}: say what the line means in one comment `# docs: …` right above a call; "
            f"there are {len(explained)}"
        )
    levels = {line.level for line in places}
    programs = {line.program for line in places if line.program}
    [first] = explained
    return Line(
        first.text,
        first.pattern,
        levels.pop() if len(levels) == 1 else ANY,
        programs.pop() if len(programs) == 1 else "both",
        first.meaning,
        where,
    )


@cache
def _written() -> tuple[Line, ...]:
    return tuple(line for path in sources() for line in lines_of(path))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "|".join(("", *cells, "")) if cells[0] == "---" else f"| {' | '.join(cells)} |"
        for cells in lines
    )
