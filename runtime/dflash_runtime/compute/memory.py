"""The host's memory that this process may still use: the machine's, within its memory cgroups.

The page cache of a mapped model counts as used in a cgroup, but is given up when memory is needed.
Swap is not counted. Needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_runtime.compute.system_files import cgroup_folders, number_in, text_of

_MEMINFO = Path("proc/meminfo")
_STATUS = Path("proc/self/status")
_LIMITS = {2: ("memory.max", "memory.high"), 1: ("memory.limit_in_bytes",)}
"""By version. Above memory.high a process is slowed down until it uses less."""
_USED = {2: "memory.current", 1: "memory.usage_in_bytes"}
_MOST_OF_MOUNTS = 1 << 20
_CACHED = {
    2: ("inactive_file", "active_file"),
    1: ("total_inactive_file", "total_active_file"),
}
"""Lines of memory.stat, with those of the cgroups below."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """In bytes, at one moment."""

    free_bytes: int
    """Can be had without swapping, page cache included."""
    total_bytes: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The smallest of what is available in the machine and in each memory cgroup of this process.

    `root`: where ``proc`` and ``sys`` are, for tests. What cannot be read is no limit; both are 0
    where the system says nothing of its memory.
    """
    of_system = _sizes(root / _MEMINFO)
    free = [of_system.get("MemAvailable", 0)]
    total = [of_system.get("MemTotal", 0)]
    for limit, room in _cgroup_rooms(root):
        total.append(limit)
        free.append(room)
    total_bytes = min(total)
    return HostMemory(min(*free, total_bytes), total_bytes)


def process_room(root: Path = Path("/")) -> int:
    """Bytes that this process may use in all: those that are free, and those that it has already,
    but for pages of files. 0 where the system says nothing of its memory."""
    free_bytes = host_memory(root).free_bytes
    return free_bytes + _sizes(root / _STATUS).get("RssAnon", 0) if free_bytes else 0


def _sizes(path: Path) -> dict[str, int]:
    """Lines of a name and a size in kB."""
    found = {}
    for line in text_of(path).splitlines():
        name, _, value = line.partition(":")
        number = number_in(value.strip().removesuffix("kB"))
        if number is not None:
            found[name] = 1024 * number
    return found


def _cgroup_rooms(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and room of each memory cgroup that has a limit."""
    for version, folder in cgroup_folders(root, "memory"):
        limits = (number_in(text_of(folder / name)) for name in _LIMITS[version])
        limit = min((each for each in limits if each is not None), default=None)
        if limit is None:
            continue
        used = number_in(text_of(folder / _USED[version])) or 0
        stat = dict(line.split(" ", 1) for line in _stat_lines(folder))
        cached = sum(number_in(stat.get(name, "")) or 0 for name in _CACHED[version])
        yield limit, max(0, limit - max(0, used - cached))


def _stat_lines(folder: Path) -> list[str]:
    return [line for line in text_of(folder / "memory.stat").splitlines() if " " in line]


def is_in_memory(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether a file's file system has no disk; False if unknown."""
    with contextlib.suppress(OSError, ValueError):
        device = path.stat().st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with mounts.open("rb") as file:
            lines = file.read(_MOST_OF_MOUNTS).decode("utf-8", "replace").splitlines()
        for line in lines:
            before, separator, after = line.partition(" - ")
            if separator and before.split()[2:3] == [wanted]:
                return after.split()[:1] in [["tmpfs"], ["ramfs"], ["devtmpfs"], ["hugetlbfs"]]
    return False
