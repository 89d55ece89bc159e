"""The machine as a process sees it: physical cores, the caches they share, and its CPU quota.

Read from Linux's sysfs, procfs and cgroup file systems. What is missing, malformed or too long
counts as absent: the answer is then one core for each processor, and no quota.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_runtime.compute.system_files import cgroup_folders, number_in, text_of

_CPUS = Path("sys/devices/system/cpu")
_EFFICIENT = Path("sys/devices/cpu_atom/cpus"), Path("sys/devices/cpu_lowpower/cpus")
"""Lists that Linux has on Intel's hybrids alone."""

MOST_PROCESSORS = 1 << 16
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
        bounds = [number_in(bound) for bound in ((first, last) if dash else (first, first))]
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
        level = number_in(text_of(cache / "level"))
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
        speeds = {cpu: number_in(text_of(root / _CPUS / f"cpu{cpu}" / name)) for cpu in allowed}
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
    for version, folder in cgroup_folders(root, "cpu"):
        if version == 2:
            quota, _, period = text_of(folder / "cpu.max").partition(" ")
        else:
            quota = text_of(folder / "cpu.cfs_quota_us")  # -1: none
            period = text_of(folder / "cpu.cfs_period_us")
        quotas.append(_ratio(quota, period))
    return min((each for each in quotas if each is not None), default=None)


def _ratio(quota: str, period: str) -> float | None:
    quota_us, period_us = number_in(quota), number_in(period)
    return quota_us / period_us if quota_us and period_us else None


# -- files ----------------------------------------------------------------------------------------


def _processors_in(path: Path) -> frozenset[int] | None:
    return parse_processors(text_of(path))
