"""How many threads decode steps are fastest with: timed once for a model on a machine, and kept.

More cores read a step's weights faster only until the memory's bandwidth is used up; then more
threads just wait for each other. Where that is depends on the machine, and on the file's types and
shapes, so parts of real steps are timed with several counts.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Protocol

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol import __version__
from dflash_protocol.errors import SettingsError
from dflash_protocol.process.text_files import read_file, write_file
from dflash_protocol.settings import cache_folder
from dflash_runtime.compute.cores import ThreadCounts, default_counts
from dflash_runtime.compute.topology import Topology

LIMIT_S = 0.3
"""Longest time of all passes, but for the part that is computed when it is over."""

_ROUNDS = 5
"""Passes with each count, if there is time."""
_LEAST_ROUNDS = 2
_COLD_SHARE = 0.3
"""Share of the time that the first pass may take."""
_SLOWDOWN = 2
"""How much longer parts may take with other counts, on average."""
_MARGIN, _MOSTLY = 0.97, 0.8
"""A count replaces the default if it takes at most the first share of its time, and is faster in
the second share of rounds; less may be noise."""
_BUSY_SHARE = 0.5
_MANY_THREADS = 16
_PREFIX = "threads-"
_NUM_KEPT = 64
_LONGEST_TEXT = 16


class OnePass(Protocol):
    """Computes the parts of a decode step, one after the other, with the model's weights."""

    def __call__(self, *, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Call `before` and `after` around each part; an exception of theirs ends the pass."""


def counts_to_try(default: ThreadCounts) -> tuple[int, ...]:
    """Counts of threads for decode steps, the default one first."""
    most = default.prompts
    others = {most, 3 * most // 4, most // 2, most // 4 if most >= _MANY_THREADS else most}
    return default.decode, *sorted(others - {default.decode}, reverse=True)


def is_busy() -> bool:
    """Whether others use so much of the machine that a trial would say little of it."""
    try:
        return os.getloadavg()[0] > _BUSY_SHARE * (os.cpu_count() or 1)
    except OSError:
        return False


def fastest_count(
    one_pass: OnePass,
    counts: tuple[int, ...],
    use: Callable[[int], None],
    *,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.perf_counter,
) -> int | None:
    """The count with which passes are fastest: the first of `counts` unless another is clearly
    faster. None if the time was too short to tell.

    `use` sets the count of the parts that follow. Counts take turns from pass to pass, so that
    whatever else the machine does meets all of them alike; not from part to part, since threads
    take some time to wake up. Two passes do not count: the first reads what is not in memory yet,
    the second shows how many parts of a pass there is time for.
    """
    end_s = clock() + limit_s
    run = partial(_timed, one_pass, use, clock=clock)
    num_reached = len(run(repeat(counts[0]), end_s=clock() + _COLD_SHARE * limit_s))
    num_passes = _ROUNDS * len(counts)
    pass_s = (end_s - clock()) / num_passes / _SLOWDOWN
    num_parts = len(run(repeat(counts[0], num_reached), end_s=clock() + pass_s))
    times: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(num_passes if num_parts else 0):
        count = counts[turn % len(counts)]
        found = run(repeat(count, num_parts), end_s=end_s)
        if len(found) < num_parts:
            break
        times[count].append(sum(found))
    num_rounds = min(map(len, times.values()))
    if num_rounds < _LEAST_ROUNDS:
        return None
    best = min(counts, key=lambda count: median(times[count]))
    usual = times[counts[0]]
    num_faster = sum(here < there for here, there in zip(times[best], usual, strict=False))
    is_clear = num_faster >= _MOSTLY * num_rounds
    return best if is_clear and median(times[best]) <= _MARGIN * median(usual) else counts[0]


class _Enough(Exception):
    """Ends a pass."""


def _timed(
    one_pass: OnePass,
    use: Callable[[int], None],
    counts: Iterable[int],
    *,
    end_s: float,
    clock: Callable[[], float],
) -> list[float]:
    """Times of a pass's parts: of as many as there are `counts`, fewer if the time is over."""
    times: list[float] = []
    upcoming, begun_s = iter(counts), 0.0

    def before() -> None:
        nonlocal begun_s
        count = next(upcoming, None)
        if count is None or clock() >= end_s:
            raise _Enough
        use(count)
        begun_s = clock()

    def after() -> None:
        times.append(clock() - begun_s)

    with suppress(_Enough):
        one_pass(before=before, after=after)
    return times


# -- counts kept on disk --------------------------------------------------------------------------


def kept_count(file: GgufFile, topology: Topology, cache_dir: str | None) -> int | None:
    """The count that was measured for such a file on this machine; None if there is none.

    `cache_dir`: see `cache_folder`.
    """
    with suppress(SettingsError, ValueError):
        text = read_file("threads", _place(file, topology, cache_dir), limit_bytes=_LONGEST_TEXT)
        count = int(text)
        if 1 <= count <= default_counts(topology).prompts:
            return count
    return None


def keep_count(count: int, file: GgufFile, topology: Topology, *, cache_dir: str | None) -> None:
    """Keep a measured count for the next start, if there is a folder that can be written to."""
    with suppress(SettingsError, OSError):
        place = _place(file, topology, cache_dir)
        write_file("threads", place, f"{count}\n")
        for old in _oldest(place.parent.glob(f"{_PREFIX}*")):
            old.unlink(missing_ok=True)


def _oldest(places: Iterator[Path]) -> list[Path]:
    by_age = sorted(places, key=lambda place: place.stat().st_mtime)
    return by_age[:-_NUM_KEPT]


def _place(file: GgufFile, topology: Topology, cache_dir: str | None) -> Path:
    """Speed depends on types and shapes, not on weights. Raises: SettingsError."""
    tensors = sorted(
        (name, each.tensor_type.name, each.shape) for name, each in file.tensors.items()
    )
    digest = hashlib.sha256(repr((__version__, topology, tensors)).encode()).hexdigest()
    return cache_folder(cache_dir) / f"{_PREFIX}{digest[:16]}"
