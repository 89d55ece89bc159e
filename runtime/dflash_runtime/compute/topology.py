"""The machine as a process sees it: physical cores, the caches they share, and its CPU quota.

Read from Linux's sysfs, procfs and cgroup file systems. What is missing, malformed or too long
counts as absent: the answer is then one core for each processor, and no quota.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CPUS = Path("sys/devices/system/cpu")
_EFFICIENT = Path("sys/devices/cpu_atom/cpus"), Path("sys/devices/cpu_lowpower/cpus")
"""Lists that Linux has on Intel's hybrids alone."""
_CGROUP = Path("proc/self/cgroup")
_CGROUPS = Path("sys/fs/cgroup")

MOST_PROCESSORS = 1 << 16
_LONGEST_FILE = 1 << 16
_DEEPEST_CGROUP = 64
_LONGEST_NUMBER = 18
_NUM_CACHES = 10

_EFFICIENT_SHARE = 0.8
"""A core below this share of the fastest core's capacity, or clock, is an efficiency core. Cores of
one kind differ by up to a tenth; the slower kinds of AMD, Arm and Intel have 0.3 to 0.75."""


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core, as far as this process may use it."""

    processors: tuple[int, ...]
    """Its hardware threads (SMT siblings) that may be used, ascending; at least one."""
    cluster: int
    """Index among the groups of cores that share a last cache."""
    is_efficient: bool
    """Whether it is an efficiency core, beside faster ones in the machine."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The cores that this process may run on; at least one."""

    cores: tuple[Core, ...]
    """By cluster, and within it by processor."""
    quota: float | None
    """Processors' worth of time that its cgroup, or one above it, may use; None: no limit."""

    @property
    def num_processors(self) -> int:
        return sum(len(core.processors) for core in self.cores)

    @property
    def num_clusters(self) -> int:
        return len({core.cluster for core in self.cores})

    @property
    def num_fast_cores(self) -> int:
        """Cores without efficiency cores; all if there are no others."""
        return sum(not core.is_efficient for core in self.cores) or len(self.cores)


def read_topology(root: Path = Path("/")) -> Topology:
    """The topology now: affinity and quota may change. `root` holds ``sys`` and ``proc``."""
    allowed = sorted(os.sched_getaffinity(0))
    efficient = _efficient_processors(root, allowed)
    by_core: dict[frozenset[int], list[int]] = {}
    for cpu in allowed:
        folder = root / _CPUS / f"cpu{cpu}"
        siblings = _processors_in(folder / "topology/thread_siblings_list") or frozenset()
        by_core.setdefault(siblings if cpu in siblings else frozenset({cpu}), []).append(cpu)
    clusters: dict[frozenset[int], int] = {}
    cores = []
    for processors in by_core.values():
        shared = _sharing_last_cache(root / _CPUS / f"cpu{processors[0]}", processors[0])
        cluster = clusters.setdefault(shared, len(clusters))
        cores.append(Core(tuple(processors), cluster, processors[0] in efficient))
    cores.sort(key=lambda core: (core.cluster, core.processors))
    return Topology(tuple(cores), _quota(root))


def processor_name() -> str:
    """What its maker calls the processor."""
    # As in `inventory`, which has to run without this package.
    with suppress(OSError), Path("/proc/cpuinfo").open(errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return value.strip()
    return platform.machine()


def parse_processors(text: str) -> frozenset[int] | None:
    """A list as in ``0-3,8``; None if it is malformed or has impossible numbers."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        bounds = [_number(bound) for bound in ((first, last) if dash else (first, first))]
        if bounds[0] is None or bounds[1] is None or not bounds[0] <= bounds[1] < MOST_PROCESSORS:
            return None
        found.update(range(bounds[0], bounds[1] + 1))
    return frozenset(found)


# -- cores ----------------------------------------------------------------------------------------


def _sharing_last_cache(folder: Path, cpu: int) -> frozenset[int]:
    """Processors that share the highest cache of one; empty, as for all others, if unknown."""
    highest, shared = 0, frozenset[int]()
    for index in range(_NUM_CACHES):
        cache = folder / f"cache/index{index}"
        level = _number(_text(cache / "level"))
        if level is None or level <= highest:
            continue
        sharing = _processors_in(cache / "shared_cpu_list")
        if sharing is not None and cpu in sharing:
            highest, shared = level, sharing
    return shared


def _efficient_processors(root: Path, allowed: list[int]) -> frozenset[int]:
    """The slower ones of a machine with two kinds of cores, by what it says first of: Intel's
    lists, capacities, highest clocks."""
    lists = [_processors_in(root / path) for path in _EFFICIENT]
    named = frozenset[int]().union(*(each for each in lists if each is not None))
    if named:
        return named
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        speeds = {cpu: _number(_text(root / _CPUS / f"cpu{cpu}" / name)) for cpu in allowed}
        known = {cpu: speed for cpu, speed in speeds.items() if speed}
        if len(known) == len(allowed):
            least = _EFFICIENT_SHARE * max(known.values())
            slower = frozenset(cpu for cpu, speed in known.items() if speed < least)
            if slower:
                return slower
    return frozenset()


# -- quota ----------------------------------------------------------------------------------------


def _quota(root: Path) -> float | None:
    """The tightest quota of this process's cgroups and those above, of version 2 or 1."""
    quotas = []
    for line in _text(root / _CGROUP).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for folder in _upwards(root / _CGROUPS, path):
                quota, _, period = _text(folder / "cpu.max").partition(" ")
                quotas.append(_ratio(quota, period))
        elif "cpu" in controllers.split(","):
            for name in (controllers, "cpu"):
                for folder in _upwards(root / _CGROUPS / name, path):
                    quota = _text(folder / "cpu.cfs_quota_us")  # -1: none
                    quotas.append(_ratio(quota, _text(folder / "cpu.cfs_period_us")))
    return min((each for each in quotas if each is not None), default=None)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """A cgroup's folder and those above it; in a container only the mount may exist."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts or "\0" in path:  # outside of this namespace
        parts = []
    for end in range(min(len(parts), _DEEPEST_CGROUP), -1, -1):
        yield mount.joinpath(*parts[:end])


def _ratio(quota: str, period: str) -> float | None:
    quota_us, period_us = _number(quota), _number(period)
    return quota_us / period_us if quota_us and period_us else None


# -- files ----------------------------------------------------------------------------------------


def _processors_in(path: Path) -> frozenset[int] | None:
    return parse_processors(_text(path))


def _text(path: Path) -> str:
    """What a file says, without white space around it; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
        return content.decode("ascii").strip() if len(content) <= _LONGEST_FILE else ""
    except (OSError, ValueError):
        return ""


def _number(text: str) -> int | None:
    text = text.strip()
    is_number = text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER
    return int(text) if is_number else None
