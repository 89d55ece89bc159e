"""What a measurement was made on: the processor, the machine's load, the version of the code."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parent.parent
"""The repository."""

BUILD = ROOT / "build"
"""Everything that benches make and git ignores."""


def processor() -> str:
    """The CPU's name, where the system tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def cpu_flags() -> frozenset[str]:
    """Features of the CPU and the kernel, as in /proc/cpuinfo; empty if unknown."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def describe() -> str:
    """One line for the head of a result."""
    flags = cpu_flags()
    sets = [each for each in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if each in flags]
    load = f"load {os.getloadavg()[0]:.1f}"
    return ", ".join([processor(), " ".join(sets), f"{os.cpu_count()} cores", load])


REALTIME_PRIORITY = 10


def be_realtime() -> None:
    """Give this thread and those it starts real-time priority (root)."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REALTIME_PRIORITY))


def may_be_realtime() -> bool:
    """Whether the system permits `be_realtime`; the priority stays as it is."""
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        be_realtime()
        os.sched_setscheduler(0, policy, priority)
    except PermissionError:
        return False
    return True


def touch_pages(data: npt.NDArray[np.uint8]) -> None:
    """Read a byte of every page of a mapping, so that no page fault occurs during a measurement."""
    int(data[:: mmap.PAGESIZE].sum())


def commit() -> str:
    """The commit of the working tree, with ``+`` if it has changes; empty outside git."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
