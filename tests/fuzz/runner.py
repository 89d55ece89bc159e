"""Hunts in several processes at once, watched from outside: what hangs or dies is found too.

Each worker tries its share of every target's cases. Knows nothing of formats.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import psutil

from fuzz.hunt import SLOW_S, Finding, Tally, hunt, load_target
from fuzz.mutation import Mutator
from support.processes import environment

_BLOCKED_S = 30.0
"""Waiting for so long, a case hangs, though it uses no processor."""
_POLL_S = 0.1
_PLACE = struct.Struct("<2q")
"""Where a worker is: index of the target, number of the case; -1 before the first."""


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    place: tuple[int, int] = (-1, -1)
    seen_s: float = 0.0
    cpu_s: float = 0.0
    is_hung: bool = False


def hunt_in_processes(
    names: Sequence[str],
    *,
    seed: int,
    num_workers: int,
    num_cases: int | None = None,
    seconds: float | None = None,
    on_progress: Callable[[list[tuple[int, int]]], None] = lambda places: None,
) -> list[Tally]:
    """All targets, each with `num_cases` cases or for `seconds`; one tally a target.

    `on_progress` is told now and then where each worker is: (index of the target, case). Ctrl-C
    ends it early, with the tallies of what was done.
    """
    with contextlib.ExitStack() as stack:
        board_file = stack.enter_context(tempfile.NamedTemporaryFile())
        board_file.write(_PLACE.pack(-1, -1) * num_workers)
        board_file.flush()
        board = stack.enter_context(
            mmap.mmap(board_file.fileno(), _PLACE.size * num_workers, access=mmap.ACCESS_READ)
        )
        workers = []
        for index in range(num_workers):
            share = None if num_cases is None else len(range(index, num_cases, num_workers))
            arguments = {
                "names": list(names),
                "seed": seed,
                "first": index,
                "step": num_workers,
                "num_cases": share,
                "seconds": seconds,
                "board": board_file.name,
            }
            output = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "fuzz.runner", json.dumps(arguments)],
                env=environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
                stdin=subprocess.DEVNULL,
                stdout=output,
            )
            stack.callback(_end, process)
            workers.append(_Worker(process, output, seen_s=time.monotonic()))
        while any(worker.process.poll() is None for worker in workers):
            try:
                time.sleep(_POLL_S)
            except KeyboardInterrupt:
                for worker in workers:
                    worker.process.send_signal(signal.SIGINT)
            for index, worker in enumerate(workers):
                _watch(worker, _PLACE.unpack_from(board, index * _PLACE.size))
            on_progress([worker.place for worker in workers])
        for index, worker in enumerate(workers):
            worker.place = _PLACE.unpack_from(board, index * _PLACE.size)
        tallies = [tally for worker in workers for tally in _tallies(worker, names, seed)]
    return [_sum(name, [tally for tally in tallies if tally.target == name]) for name in names]


def _watch(worker: _Worker, place: tuple[int, int]) -> None:
    """End a worker whose case takes too long, with a trace of where it is on standard error."""
    if worker.process.poll() is not None:
        return
    now_s = time.monotonic()
    try:
        times = psutil.Process(worker.process.pid).cpu_times()
    except psutil.Error:
        return
    cpu_s = times.user + times.system
    if place != worker.place:
        worker.place, worker.seen_s, worker.cpu_s = place, now_s, cpu_s
    elif place[0] >= 0 and (
        cpu_s - worker.cpu_s > 2 * SLOW_S or now_s - worker.seen_s > _BLOCKED_S
    ):  # twice: what comes to an end the worker finds itself, and tells more about it
        worker.is_hung = True
        worker.process.send_signal(signal.SIGABRT)
        worker.process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _tallies(worker: _Worker, names: Sequence[str], seed: int) -> Iterable[Tally]:
    worker.output.seek(0)
    for line in worker.output.read().splitlines():
        record = json.loads(line)
        findings = [Finding(**finding) for finding in record.pop("findings")]
        yield Tally(**record, findings=findings)
    code = worker.process.returncode
    if code:
        target_index, case = worker.place
        name = names[max(0, target_index)]
        what = f"took more than {SLOW_S:.0f} s" if worker.is_hung else f"ended with {code}"
        yield Tally(name, findings=[Finding(case, what, _input_of(name, seed, case))])


def _input_of(name: str, seed: int, case: int) -> list[str]:
    if case < 0:
        return []
    with contextlib.closing(load_target(name)) as target:
        mutator = Mutator(seed)
        mutator.start(case)
        return [frame.hex() for frame in target.make(mutator)]


def _sum(name: str, tallies: Sequence[Tally]) -> Tally:
    return Tally(
        name,
        num_cases=sum(tally.num_cases for tally in tallies),
        num_refused=sum(tally.num_refused for tally in tallies),
        seconds=sum(tally.seconds for tally in tallies),
        slowest_ms=max((tally.slowest_ms for tally in tallies), default=0.0),
        peak_mib=max((tally.peak_mib for tally in tallies), default=0.0),
        findings=[finding for tally in tallies for finding in tally.findings],
    )


def _work(text: str) -> None:
    """A worker's life: every target in turn, a line of JSON for each."""
    faulthandler.enable()
    told_to_end = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: told_to_end.set())
    arguments = json.loads(text)
    names, board_path = arguments.pop("names"), Path(arguments.pop("board"))
    offset = _PLACE.size * arguments["first"]
    with board_path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as board:
        for index, name in enumerate(names):

            def on_case(case: int, index: int = index) -> None:
                _PLACE.pack_into(board, offset, index, case)

            tally = hunt(name, **arguments, on_case=on_case, is_over=told_to_end.is_set)
            print(json.dumps(asdict(tally)), flush=True)
            _PLACE.pack_into(board, offset, -1, -1)
            if told_to_end.is_set():
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arguments", help="what fuzz.runner gives its workers, as JSON")
    _work(parser.parse_args().arguments)
