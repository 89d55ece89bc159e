"""Soak test: the same greedy text repeatedly while the daemons are killed, stopped and continued.

A parent with two spawned daemons on the demo model. It must write the same tokens every time and,
at the end, have no more descriptors, processes, sockets, segments or threads than before, and
constant memory. Run it with ``make soak``; Ctrl-C ends it early, with a summary.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from bench.daemons import living_daemons, made_up_prompt, time_to_recover, timed_tokens
from bench.options import SPREAD, add_save_option, bench_parser
from bench.report import table

from bench import report
from dflash_protocol.settings import Settings, load_settings
from dflash_runtime import Engine

DAEMONS = ("cpu", "cpu")
WARM_UP_SHARE = 0.2
"""Warm-up share of the run's time, in which memory may grow."""
FLAT_MIB = 16.0
"""Most that the linear fit of the memory samples may rise over the whole run."""
_SAMPLE_S = 1.0
_SETTLE_S = 20.0
"""Timeout for processes and descriptors to disappear after the engine was closed."""


@dataclass(slots=True)
class Holdings:
    """What this process and its children hold of the system."""

    descriptors: dict[str, int]
    """Open descriptors by target, without numbers."""
    processes: int
    threads: int
    sockets: int
    """Connected or listening sockets of this process, of any family."""
    files: int
    """Sockets, locks and segments in the run directory."""
    segments: int
    """Memory shared with a daemon of this run, in the run directory or in /dev/shm."""

    @classmethod
    def now(cls, run_dir: Path, daemons: set[tuple[int, float]]) -> Holdings:
        gc.collect()
        process = psutil.Process()
        descriptors: dict[str, int] = {}
        for entry in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{entry}")
            except OSError:  # the descriptor of the listing itself
                continue
            kind = re.sub(r"\[?\d+\]?$", "", Path(target).name)
            descriptors[kind] = descriptors.get(kind, 0) + 1
        owners = {os.getpid(), *(pid for pid, _ in daemons)}
        return cls(
            descriptors=descriptors,
            processes=len(process.children(recursive=True)),
            threads=process.num_threads(),
            sockets=descriptors.get("socket:", 0),
            files=sum(1 for _ in run_dir.rglob("*")),
            segments=sum(
                1
                for folder in (run_dir, Path("/dev/shm"))
                for path in folder.rglob("ring-*")
                if (match := re.match(r"ring-(\d+)-", path.name)) and int(match[1]) in owners
            ),
        )

    def above(self, before: Holdings) -> dict[str, int]:
        """What there is more of than `before`."""
        now = {f"descriptor {kind}": count for kind, count in self.descriptors.items()}
        then = {f"descriptor {kind}": count for kind, count in before.descriptors.items()}
        for name in ("processes", "threads", "sockets", "files", "segments"):
            now[name], then[name] = getattr(self, name), getattr(before, name)
        return {
            name: count - then.get(name, 0)
            for name, count in now.items()
            if count > then.get(name, 0)
        }


@dataclass(slots=True)
class Gap:
    """A wait for a token, and the last thing done to a daemon before it ended."""

    ms: float
    at_s: float
    after: str


@dataclass(slots=True)
class Run:
    """What happened so far."""

    started_s: float = field(default_factory=time.monotonic)
    generations: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    actions: dict[str, int] = field(default_factory=dict)
    last_action: str = "start"
    gaps: list[Gap] = field(default_factory=list)
    """The longest waits, longest first."""
    waits_ms: list[float] = field(default_factory=list)
    """A sample of all waits."""
    longest_after: dict[str, float] = field(default_factory=dict)
    """The longest wait in ms by the last thing done to a daemon."""
    memory: list[tuple[float, float, float, int]] = field(default_factory=list)
    """Time in s, memory not backed by files and resident memory in MiB, descriptors."""
    daemons: set[tuple[int, float]] = field(default_factory=set)
    """Every daemon ever seen: process id and start time."""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s


class Disturber(threading.Thread):
    """Kills, stops and continues daemons at random (seeded); leaves none stopped."""

    def __init__(self, run: Run, seed: int, shortest_s: float, longest_s: float) -> None:
        super().__init__(name="disturber", daemon=True)
        self._run = run
        self._random = random.Random(seed)
        self._pauses_s = (shortest_s, longest_s)
        self._over = threading.Event()

    def run(self) -> None:
        actions: list[tuple[str, Callable[[list[psutil.Process]], None]]] = [
            ("kill", lambda daemons: self._send(daemons[:1], signal.SIGKILL)),
            ("stop", lambda daemons: self._pause(daemons[:1], then_kill=False)),
            ("stop and kill", lambda daemons: self._pause(daemons[:1], then_kill=True)),
            ("kill both", lambda daemons: self._send(daemons, signal.SIGKILL)),
            ("stop both", lambda daemons: self._pause(daemons, then_kill=False)),
            ("terminate", lambda daemons: self._send(daemons[:1], signal.SIGTERM)),
        ]
        weights = (4, 4, 2, 1, 1, 1)
        while not self._over.wait(self._random.uniform(*self._pauses_s)):
            daemons = living_daemons()
            self._run.daemons.update((each.pid, each.create_time()) for each in daemons)
            if daemons:
                self._random.shuffle(daemons)
                name, act = self._random.choices(actions, weights)[0]
                self._run.last_action = name
                act(daemons)
                self._run.actions[name] = self._run.actions.get(name, 0) + 1

    def end(self) -> None:
        """Stop disturbing. Returns when no daemon is stopped any more."""
        self._over.set()
        self.join()

    def _send(self, daemons: list[psutil.Process], number: signal.Signals) -> None:
        for daemon in daemons:
            try:
                daemon.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def _pause(self, daemons: list[psutil.Process], *, then_kill: bool) -> None:
        self._send(daemons, signal.SIGSTOP)
        try:
            self._over.wait(self._random.choice((0.02, 0.3, 1.0, 3.0)))
        finally:
            self._send(daemons, signal.SIGKILL if then_kill else signal.SIGCONT)


def generate(engine: Engine, prompt: list[int], num_tokens: int, run: Run | None) -> list[int]:
    """Token ids; with `run`, every wait for one is recorded there."""
    if run is None:
        return timed_tokens(engine, prompt, num_tokens)
    return timed_tokens(engine, prompt, num_tokens, on_token=partial(_note_wait, run))


def _note_wait(run: Run, ms: float) -> None:
    if run.tokens % 16 == 0:
        run.waits_ms.append(ms)
    run.tokens += 1
    longest = run.longest_after
    longest[run.last_action] = max(longest.get(run.last_action, 0.0), round(ms, 1))
    if len(run.gaps) < 10 or ms > run.gaps[-1].ms:
        run.gaps.append(Gap(round(ms, 1), round(run.elapsed_s, 1), run.last_action))
        run.gaps.sort(key=lambda gap: -gap.ms)
        del run.gaps[10:]


def sample_memory(run: Run) -> None:
    """Record the parent's memory, at most once a second."""
    if run.memory and run.elapsed_s - run.memory[-1][0] < _SAMPLE_S:
        return
    status = Path("/proc/self/status").read_text()

    def mib(key: str) -> float:
        match = re.search(rf"^{key}:\s+(\d+) kB", status, re.MULTILINE)
        return round(int(match[1]) / 1024, 1) if match else 0.0

    num_descriptors = len(os.listdir("/proc/self/fd"))
    run.memory.append((round(run.elapsed_s, 1), mib("RssAnon"), mib("VmRSS"), num_descriptors))


def growth_mib(run: Run) -> tuple[float, float]:
    """Rise of the linear fits after warm-up, over the time of the whole run: memory not backed by
    files, and resident memory."""
    samples = [each for each in run.memory if each[0] >= WARM_UP_SHARE * run.elapsed_s]
    if len(samples) < 3:
        return 0.0, 0.0
    times_s, anonymous, resident, _ = zip(*samples, strict=True)
    slopes = [statistics.linear_regression(times_s, each).slope for each in (anonymous, resident)]
    return round(slopes[0] * run.elapsed_s, 2), round(slopes[1] * run.elapsed_s, 2)


def soak(options: argparse.Namespace, settings: Settings, run: Run) -> dict[str, Any]:
    """Disturb and generate until the time is over or Ctrl-C is pressed. Returns the record."""
    prompt = made_up_prompt(options.prompt_tokens)
    with Engine.open(settings=settings) as engine:
        expected = generate(engine, prompt, options.tokens, None)
    # First with daemons and undisturbed: what libraries open once and keep is not a leak.
    calm = Run()
    with Engine.open(daemons=DAEMONS, settings=settings) as engine:
        for _ in range(3):
            if generate(engine, prompt, options.tokens, calm) != expected:
                run.wrong.append("tokens differ between one process and three, undisturbed")
    before = _settled(settings, run, None)
    was_interrupted = False
    run.started_s = time.monotonic()
    disturber = Disturber(run, options.seed, *options.pauses)
    with Engine.open(daemons=DAEMONS, settings=settings) as engine:
        disturber.start()
        try:
            while run.elapsed_s < 60.0 * options.minutes and len(run.wrong) < 10:
                token_ids = generate(engine, prompt, options.tokens, run)
                run.generations += 1
                if token_ids != expected:
                    run.wrong.append(_difference(token_ids, expected, run))
                sample_memory(run)
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            if not disturber.is_alive():
                run.wrong.append("the thread that disturbs ended by itself")
            disturber.end()
        elapsed_s, (anonymous_mib, resident_mib) = run.elapsed_s, growth_mib(run)
        recovered_s = time_to_recover(engine, lambda: generate(engine, prompt, 8, None))
        stats = engine.stats()
    after = _settled(settings, run, before)
    leaks = after.above(before)
    if orphans := [pid for pid, born_s in run.daemons if _is_alive(pid, born_s)]:
        leaks["daemons still alive"] = len(orphans)
    events: dict[str, int] = {}
    for event in stats.events:
        events[event.kind] = events.get(event.kind, 0) + 1
    record = report.head("Soak: greedy text from two daemons that are killed and stopped")
    return record | {
        "was_interrupted": was_interrupted,
        "seed": options.seed,
        "minutes": round(elapsed_s / 60, 2),
        "prompt_tokens": len(prompt),
        "tokens_a_generation": options.tokens,
        "generations": run.generations,
        "tokens": run.tokens,
        "wrong": run.wrong,
        "actions": run.actions,
        "daemons_seen": len(run.daemons),
        "events": events,
        "last_events": [f"{event.owner}: {event.reason}" for event in stats.events[-20:]],
        "owners": {
            name: {"requests": owner.requests, "restarts": owner.restarts}
            for name, owner in stats.owners.items()
        },
        "wait_ms": {
            "undisturbed_median": round(statistics.median(calm.waits_ms), 2),
            "undisturbed_longest": calm.gaps[0].ms,
            "median": round(statistics.median(run.waits_ms), 2) if run.waits_ms else 0.0,
            "longest": run.gaps[0].ms if run.gaps else 0.0,
        },
        "longest_after_ms": run.longest_after,
        "recovered_s": recovered_s,
        "gaps": [asdict(gap) for gap in run.gaps],
        "leaks": leaks,
        "growth_mib": {"anonymous": anonymous_mib, "resident": resident_mib},
        "holdings_before": asdict(before),
        "holdings_after": asdict(after),
        "memory": run.memory,
    }


def _difference(token_ids: list[int], expected: list[int], run: Run) -> str:
    same = next(
        (i for i, (a, b) in enumerate(zip(token_ids, expected, strict=False)) if a != b),
        min(len(token_ids), len(expected)),
    )
    return f"generation {run.generations}: differs from token {same} on, after {run.last_action}"


def _settled(settings: Settings, run: Run, before: Holdings | None) -> Holdings:
    """What is held once nothing more is released."""
    run_dir = Path(settings.run_dir)
    deadline_s = time.monotonic() + _SETTLE_S
    holdings = Holdings.now(run_dir, run.daemons)
    while time.monotonic() < deadline_s:
        if before is not None and not holdings.above(before):
            break
        time.sleep(0.2)
        last, holdings = holdings, Holdings.now(run_dir, run.daemons)
        if before is None and last == holdings and holdings.processes == 0:
            break
    return holdings


def _is_alive(pid: int, born_s: float) -> bool:
    try:
        return bool(psutil.Process(pid).create_time() == born_s)
    except psutil.Error:
        return False


def verdict(record: dict[str, Any]) -> list[str]:
    """What failed, one line each; empty if nothing did."""
    faults = [f"wrong: {line}" for line in record["wrong"]]
    faults += [f"leaked: {count} {name}" for name, count in record["leaks"].items()]
    for kind, mib in record["growth_mib"].items():
        if mib > FLAT_MIB:
            faults.append(f"{kind} memory grew by {mib} MiB, allowed are {FLAT_MIB:.0f}")
    if record["recovered_s"] is None:
        faults.append("not all daemons were used again, though left in peace")
    if not record["generations"]:
        faults.append("no text was finished")
    if not record["actions"]:
        faults.append("nothing was disturbed")
    return faults


def summary(record: dict[str, Any]) -> str:
    """The record as short Markdown."""
    waits, growth = record["wait_ms"], record["growth_mib"]
    first, last = (
        (record["memory"] or [(0.0, 0.0, 0.0, 0)])[0],
        (record["memory"] or [(0,) * 4])[-1],
    )
    rows = [
        ("time", f"{record['minutes']} min" + (", interrupted" * record["was_interrupted"])),
        ("texts, tokens", f"{record['generations']}, {record['tokens']}"),
        ("texts that differ", str(len(record["wrong"]))),
        ("done to daemons", ", ".join(f"{n} {name}" for name, n in record["actions"].items())),
        ("daemons seen", str(record["daemons_seen"])),
        ("events", ", ".join(f"{n} {name}" for name, n in record["events"].items()) or "none"),
        ("computed by", _shares(record["owners"])),
        ("all daemons in use again", f"{record['recovered_s'] or 'never'}, in s of peace"),
        ("left over", ", ".join(f"{n} {name}" for name, n in record["leaks"].items()) or "nothing"),
        ("resident memory, first and last", f"{first[2]} and {last[2]} MiB"),
        ("its trend over the run", f"{growth['resident']:+} MiB"),
        ("of it anonymous, first and last", f"{first[1]} and {last[1]} MiB"),
        ("its trend over the run", f"{growth['anonymous']:+} MiB"),
        ("descriptors, first and last", f"{first[3]} and {last[3]}"),
        (
            "token, undisturbed",
            f"{waits['undisturbed_median']} ms, longest {waits['undisturbed_longest']} ms",
        ),
        ("token, disturbed", f"{waits['median']} ms, longest {waits['longest']} ms"),
    ]  # fmt: skip
    longest = sorted(record["longest_after_ms"].items(), key=lambda each: -each[1])
    return (
        table(("what", "result"), rows)
        + "\n\nThe longest wait for a token, by what was last done to a daemon:\n\n"
        + table(("after", "ms"), [(name, f"{ms}") for name, ms in longest])
    )


def _shares(owners: dict[str, dict[str, int]]) -> str:
    """Share of the requests that each owner computed."""
    total = max(1, sum(owner["requests"] for owner in owners.values()))
    return ", ".join(
        f"{name} {100 * owner['requests'] / total:.0f} %" for name, owner in owners.items()
    )


def main() -> int:
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument(
        "--seed", type=int, default=1, help="of what is done to daemons (default 1)"
    )
    parser.add_argument("--tokens", type=int, default=48, help="of each text (default 48)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="of the prompt (default 32)")
    parser.add_argument(
        "--pauses", type=float, nargs=2, default=(0.5, 4.0), metavar="S",
        help="shortest and longest pause between two disturbances (default 0.5 4)",
    )  # fmt: skip
    add_save_option(parser, SPREAD)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dflash-soak-") as folder:
        settings = replace(load_settings(), run_dir=folder)
        record = soak(options, settings, Run())
    faults = verdict(record)
    text = "\n".join([summary(record), "", *(faults or ["Everything held."])])
    print(text)
    report.save("soak", record, text, options.save)
    return 1 if faults else 130 if record["was_interrupted"] else 0


if __name__ == "__main__":
    sys.exit(main())
