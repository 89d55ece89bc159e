"""Which CPU cores this process computes on, and with how many threads."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.topology import Topology, parse_processors, read_topology

LEAST_TIMED = 3
"""With fewer threads the fastest number for decode steps is not looked for: each core adds
bandwidth."""

_FEW = 8
"""Of so many processors decode steps beside a device leave one to others, of more two."""
_ALMOST = 0.25
"""A quota this close below a whole number of processors counts as that number."""


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """Compute threads of a process, the caller's included; each at least 1."""

    prompts: int
    """Of a pass over many rows, which computes more than it reads: its speed grows with cores."""
    decode: int
    """Of a pass over few rows (a decode step, a verify pass): it reads the weights once for them,
    and some cores may be enough to use all of the memory's bandwidth. At most `prompts`."""


def usable_cores(root: Path = Path("/")) -> list[int]:
    """Processors that this process may run on, one of each physical core; those that share a cache
    stand together.

    A core's second hardware thread adds next to nothing to kernels that fill its units. Where the
    system has no topology, every processor counts as a core. `root`: see `read_topology`.
    """
    return [core.processors[0] for core in read_topology(root).cores]


def most_threads(topology: Topology) -> int | None:
    """The threads that a quota has room for; None: no quota.

    With more of them the quota is used up before the end of each period (100 ms), and all threads
    are stopped together until the next one.
    """
    return None if topology.quota is None else max(1, int(topology.quota + _ALMOST))


def num_at_once(topology: Topology) -> int:
    """How many threads of this process can run at the same time."""
    most = most_threads(topology)
    return topology.num_processors if most is None else min(topology.num_processors, most)


def most_beside_device(topology: Topology) -> int:
    """The most threads for experts that the processor computes in a device's decode steps.

    Some processors are left to the thread that launches steps and reads tokens, to the driver's
    threads and to other programs: if all compute, a step is late now and then, as its last thread
    waits for a processor, or the device waits for its next step (figures in bench/README.md).
    """
    num = num_at_once(topology)
    return max(1, num - (1 if num <= _FEW else 2))


def default_counts(topology: Topology) -> ThreadCounts:
    """Counts for a process that has the machine to itself, before anything was measured.

    Prompts: every physical core, efficiency cores too, since work is shared out item by item.
    Decode: without efficiency cores. The fast ones can use nearly all of the memory's bandwidth,
    and a phase of a step is so short that a slow core's last item is noticed.
    """
    most = most_threads(topology)
    num_cores, num_fast = len(topology.cores), topology.num_fast_cores
    if most is not None:
        num_cores, num_fast = min(num_cores, most), min(num_fast, most)
    return ThreadCounts(num_cores, num_fast)


def parse_cores(text: str) -> list[int]:
    """Parse a processor list such as ``0-3,8``.

    Raises: SettingsError if it is malformed, or names a processor that this process may not use.
    """
    cores = parse_processors(text)
    if cores is None:
        raise SettingsError(f"cores {text!r}: expected numbers and ranges, as in 0-3,8")
    missing = cores - os.sched_getaffinity(0)
    if missing:
        raise SettingsError(f"cores {text!r}: {_as_text(missing)} cannot be used here")
    return sorted(cores)


def share_of_cores(cores: list[int], part_idx: int, num_parts: int) -> list[int]:
    """One of `num_parts` parts of the cores; with more parts than cores, parts share them."""
    first = len(cores) * part_idx // num_parts
    end = max(first + 1, len(cores) * (part_idx + 1) // num_parts)
    return cores[first:end]


def _as_text(cores: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cores)))
