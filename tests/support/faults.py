"""Faults for a running engine, such as resource limits and full disks; resources of a process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from bench.memory_cgroup import drop_pages

from dflash_runtime import Engine

_PROCESS_MADVISE = 440  # the same number on all architectures
_PAGEOUT = 21


def spawned_daemons() -> list[psutil.Process]:
    """Running daemons that this process has started."""
    return spawned_by(os.getpid())


def spawned_by(pid: int) -> list[psutil.Process]:
    """Running daemons that a process has started."""
    children = psutil.Process(pid).children()
    return [each for each in children if "dflash_daemon" in " ".join(each.cmdline())]


def greedy(engine: Engine, prompt: list[int], num_tokens: int) -> list[int]:
    """Token ids of a greedy text."""
    return [token.token_id for token in engine.generate(prompt, num_tokens)]


@contextlib.contextmanager
def soft_limit(kind: int, value: int, *, pid: int = 0) -> Iterator[None]:
    """Set a resource limit of a process (0: this one), and restore it afterwards."""
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (value, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, kind, before)


@contextlib.contextmanager
def no_more_descriptors(*, num_left: int = 0, pid: int = 0) -> Iterator[None]:
    """Let a process open only `num_left` more descriptors, besides those that it closes.

    For another process, free numbers below its highest descriptor remain usable too.
    """
    highest = max(map(int, os.listdir(f"/proc/{pid or 'self'}/fd")))
    with contextlib.ExitStack() as undo:
        undo.enter_context(soft_limit(resource.RLIMIT_NOFILE, highest + 1 + num_left, pid=pid))
        if not pid:
            fillers: list[int] = []
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(os.dup(0))
            for filler in fillers[num_left:]:
                undo.callback(os.close, filler)
            for filler in fillers[:num_left]:
                os.close(filler)
        yield


@contextlib.contextmanager
def small_file_system(
    folder: Path, num_bytes: int = 1 << 20, *, num_inodes: int = 1 << 10
) -> Iterator[bool]:
    """Mount a tmpfs of that size at a folder; False without permission. Its root uses one inode."""
    options = f"size={num_bytes},nr_inodes={num_inodes},mode=700,uid={os.getuid()}"
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    try:
        is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        is_mounted = False
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all room that is left on a small file system; returns the file that has it."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 16, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    return filler


def shared_memory_of(pid: int) -> list[str]:
    """Ring segments that a process has mapped, and their doorbells that it has open."""
    held = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "ring-" in line]
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            held += [target] if "ring-" in target else []
    return held


def resident_bytes(pid: int, path: Path) -> int:
    """Resident bytes of a file in a process's mappings."""
    num_bytes, is_of_file = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_of_file = line.endswith(str(path))
        elif is_of_file and line.startswith("Rss:"):
            num_bytes += int(line.split()[1]) << 10
    return num_bytes


def drop_from_memory(path: Path, pids: Sequence[int]) -> None:
    """Drop a file from the page cache, and from the mappings of these processes."""
    drop_pages(path)  # writes dirty pages, which mappings would keep
    for pid in pids:
        _page_out(pid, path)
    drop_pages(path)


def _page_out(pid: int, path: Path) -> None:
    """Advise the kernel to page out a mapping; it may refuse."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if line.endswith(str(path)):
                first, last = (int(end, 16) for end in line.split()[0].split("-"))
                span = (ctypes.c_size_t * 2)(first, last - first)
                libc.syscall(_PROCESS_MADVISE, pidfd, span, ctypes.c_size_t(1), _PAGEOUT, 0)
    finally:
        os.close(pidfd)
