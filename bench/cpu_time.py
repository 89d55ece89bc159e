"""CPU time of cores and of processes, as the kernel counts it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import psutil

_IDLE_COLUMNS = (3, 4)
"""Fields of a line of /proc/stat: idle, and waiting for a disk."""
_NUM_COLUMNS = 8
"""Fields up to the hypervisor's share; later ones are included in these."""


def use_cores(num: int | None) -> None:
    """Have this process run on the first `num` of its processors; None: on all."""
    if num is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num])


def family(pid: int | None) -> list[psutil.Process]:
    """A process and all its descendants; empty if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def used_s(process: psutil.Process) -> float:
    """CPU time of all threads of a process since it started; 0 if it has ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def busy_s(cores: Sequence[int]) -> float:
    """Time that these cores were not idle since boot."""
    names = {f"cpu{core}" for core in cores}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *columns = line.split()
        if name in names:
            counts = [int(column) for column in columns[:_NUM_COLUMNS]]
            ticks += sum(counts) - sum(counts[column] for column in _IDLE_COLUMNS)
    return ticks / os.sysconf("SC_CLK_TCK")


def others_s(cores: Sequence[int], pid: int | None) -> float:
    """Time that these cores worked for processes outside a process's family.

    Only differences are meaningful.
    """
    return busy_s(cores) - sum(used_s(process) for process in family(pid))
