"""Feeds damaged input to targets, case after case, in this process; the worker of `fuzz.runner`.

The same seed and case number give the same input. Knows nothing of formats.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import resource
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.mutation import Mutator
from fuzz.target import Target

SLOW_S = 1.0
"""No case may take longer."""
MEMORY_BYTES = 64 << 20
"""No case may need more above what the target needs for sound input."""
MAX_FINDINGS = 5

_BATCH = 256
"""Cases between two sound inputs."""
_TRIES = 4
_NO_LIMIT = resource.RLIM_INFINITY

TARGETS = {
    "placement-files": "fuzz.file_targets:PlacementFiles",
    "hotness-files": "fuzz.file_targets:HotnessFiles",
    "heat-files": "fuzz.file_targets:HeatFiles",
    "kept-digests": "fuzz.file_targets:KeptDigests",
    "gguf-headers": "fuzz.file_targets:GgufHeaders",
    "data-frames": "fuzz.data_targets:DataFrames",
    "ring-slots": "fuzz.ring_targets:RingSlots",
    "handshakes": "fuzz.message_targets:Handshakes",
    "chat-messages": "fuzz.chat_targets:ChatMessages",
    "grammars": "fuzz.grammar_targets:Grammars",
    "model-names": "fuzz.library_targets:ModelNames",
    "hub-lists": "fuzz.library_targets:HubLists",
    "bodies": "fuzz.body_targets:DoorBodies",
}
"""Every target, by the name that is used on the command line."""


@dataclass(slots=True)
class Finding:
    """Something that must not happen, with what brought it about."""

    case: int
    what: str
    frames: list[str] = field(default_factory=list)
    """The input, each frame in hexadecimal digits."""


@dataclass(slots=True)
class Tally:
    """What came of one worker's cases of one target."""

    target: str
    num_cases: int = 0
    num_refused: int = 0
    seconds: float = 0.0
    slowest_ms: float = 0.0
    peak_mib: float = 0.0
    """Resident memory at its highest, above what it was before the first case."""
    findings: list[Finding] = field(default_factory=list)


def load_target(name: str) -> Target:
    """A target by its name in `TARGETS`, or as ``module:Class``."""
    module, _, class_name = TARGETS.get(name, name).partition(":")
    target: Target = getattr(importlib.import_module(module), class_name)()
    return target


def hunt(
    name: str,
    *,
    seed: int,
    first: int = 0,
    step: int = 1,
    num_cases: int | None = None,
    seconds: float | None = None,
    on_case: Callable[[int], None] = lambda case: None,
    is_over: Callable[[], bool] = lambda: False,
) -> Tally:
    """Try cases ``first, first + step, …``: `num_cases` of them, or for so many seconds.

    `on_case` is told each number before anything is made of it; `is_over` ends it early.
    """
    tally = Tally(name)
    with contextlib.closing(load_target(name)) as target:
        mutator = Mutator(seed)
        _serve_good(target, tally, first)
        _try_case(target, mutator, first, Tally(name))  # what is loaded once is no case's fault
        base_bytes = _reset_peak()
        with _bounded_memory():
            started_s = time.perf_counter()
            case = first
            while not is_over() and not _is_done(tally, started_s, num_cases, seconds):
                on_case(case)
                _try_case(target, mutator, case, tally)
                case += step
                if tally.num_cases % _BATCH == 0:
                    _serve_good(target, tally, case)
            _serve_good(target, tally, case)
            tally.seconds = time.perf_counter() - started_s
        tally.peak_mib = round((_peak_bytes() - base_bytes) / 2**20, 1)
    return tally


def _is_done(tally: Tally, started_s: float, num_cases: int | None, seconds: float | None) -> bool:
    if len(tally.findings) >= MAX_FINDINGS:
        return True
    if num_cases is not None:
        return tally.num_cases >= num_cases
    return time.perf_counter() - started_s >= (seconds or 0.0)


def _try_case(target: Target, mutator: Mutator, case: int, tally: Tally) -> None:
    mutator.start(case)
    frames = target.make(mutator)
    what, wall_s, cpu_s = _timed_fault(target, frames, tally)
    tally.num_cases += 1
    tally.slowest_ms = max(tally.slowest_ms, 1e3 * wall_s)
    for _ in range(_TRIES):  # what waits, but not every time, waits for the machine
        if cpu_s <= SLOW_S < wall_s:
            time.sleep(SLOW_S)
            _, wall_s, cpu_s = _timed_fault(target, frames, Tally(tally.target))
    if what is None and max(cpu_s, wall_s) > SLOW_S:
        what = f"took {wall_s:.1f} s, {cpu_s:.1f} s of them computing"
    if what is not None:
        tally.findings.append(Finding(case, what, [frame.hex() for frame in frames]))


def _timed_fault(
    target: Target, frames: list[bytes], tally: Tally
) -> tuple[str | None, float, float]:
    """What `_fault` says, and how long it took: by the clock, and of the processor's time."""
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    what = _fault(target, frames, tally)
    return what, time.perf_counter() - started_s, time.process_time() - started_cpu_s


def _fault(target: Target, frames: list[bytes], tally: Tally) -> str | None:
    """What is wrong with how this input was taken, if anything is."""
    try:
        target.feed(frames)
    except target.refusals as error:
        tally.num_refused += 1
        message = str(error)
        if len(message.splitlines()) != 1 or len(message) > 2000:
            return f"its message is not one short line: {message[:2000]!r}"
    except Exception:
        return traceback.format_exc()
    return None


def _serve_good(target: Target, tally: Tally, case: int) -> None:
    """A sound input must be taken after all that came before it."""
    try:
        target.serve_good()
    except Exception:
        tally.findings.append(
            Finding(case, f"sound input was not taken any more: {traceback.format_exc()}")
        )


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    """More address space than `MEMORY_BYTES` above the present is a MemoryError, touched or not."""
    present = _status_bytes("VmSize")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = present + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (min(limit, hard) if hard != _NO_LIMIT else limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _reset_peak() -> int:
    """Let the peak of resident memory begin anew here. Returns it."""
    with contextlib.suppress(OSError):  # not everywhere allowed; the bound holds all the same
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None, key
    return int(match[1]) << 10
