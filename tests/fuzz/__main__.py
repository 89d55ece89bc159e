"""Fuzzing at length: ``make fuzz``. Damaged input to everything that reads what others wrote.

Findings are kept in build/fuzz/, one file each. Knows nothing of formats.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence

from fuzz.hunt import TARGETS, Finding, Tally, load_target
from fuzz.mutation import Mutator
from fuzz.runner import hunt_in_processes
from support.processes import ROOT

FINDINGS = ROOT / "build" / "fuzz"
_REPORT_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--cases", type=int, default=1_000_000, help="of each (default 10^6)")
    parser.add_argument("--seconds", type=float, help="for each, instead of a number of cases")
    parser.add_argument("--seed", type=int, default=1, help="of all damage (default 1)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--case", type=int, help="show this one case of one target and what it does"
    )
    options = parser.parse_args()
    names = options.targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"unknown target {min(unknown)}; there are {', '.join(TARGETS)}")
    if options.case is not None:
        return show_case(names[0], options.seed, options.case)
    reporter = _Reporter(names)
    tallies = hunt_in_processes(
        names,
        seed=options.seed,
        num_workers=max(1, options.workers),
        num_cases=None if options.seconds else options.cases,
        seconds=options.seconds,
        on_progress=reporter,
    )
    print(report(tallies))
    num_findings = 0
    for tally in tallies:
        for finding in tally.findings:
            num_findings += 1
            keep(tally.target, options.seed, finding)
    return 1 if num_findings else 0


def report(tallies: Sequence[Tally]) -> str:
    """A line for each target."""
    lines = [
        f"{'target':16s}{'cases':>10s}{'refused':>10s}{'read':>9s}{'per s, core':>13s}"
        f"{'slowest ms':>12s}{'peak MiB':>10s}{'findings':>10s}"
    ]
    for tally in tallies:
        rate = tally.num_cases / tally.seconds if tally.seconds else 0.0
        lines.append(
            f"{tally.target:16s}{tally.num_cases:10d}{tally.num_refused:10d}"
            f"{tally.num_cases - tally.num_refused:9d}{rate:13.0f}{tally.slowest_ms:12.1f}"
            f"{tally.peak_mib:10.1f}{len(tally.findings):10d}"
        )
    return "\n".join(lines)


def keep(target: str, seed: int, finding: Finding) -> None:
    """Write a finding down and say how to see it again."""
    FINDINGS.mkdir(parents=True, exist_ok=True)
    path = FINDINGS / f"{target}-{seed}-{finding.case}.txt"
    again = f"PYTHONPATH=tests python -m fuzz {target} --seed {seed} --case {finding.case}"
    path.write_text("\n".join([f"# {again}", *finding.frames, "", finding.what]) + "\n")
    print(f"\n{target}, case {finding.case}: {finding.what.strip()}\n  kept in {path}\n  {again}")


def show_case(name: str, seed: int, case: int) -> int:
    """Print a case's input, and what its target makes of it. Returns the exit code."""
    target, mutator = load_target(name), Mutator(seed)
    mutator.start(case)
    frames = target.make(mutator)
    for frame in frames:
        print(frame[:4096])
    try:
        target.feed(frames)
    except target.refusals as error:
        print(f"refused: {error}")
    except Exception:
        traceback.print_exc()
        return 1
    else:
        print("read")
    finally:
        target.close()
    return 0


class _Reporter:
    """Says now and then how far the workers are."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._next_s = time.monotonic() + _REPORT_S

    def __call__(self, places: list[tuple[int, int]]) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s += _REPORT_S
        where = [f"{self._names[index]} case {case}" for index, case in places if index >= 0]
        print(f"at {', '.join(where)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
