"""Memory cgroups of tests and benches, within their own, or version 2 beside it if that may be."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_runtime.compute.system_files import cgroup_folders

_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_NO_SWAP = {1: "memory.swappiness", 2: "memory.swap.max"}
_KILLS = {1: "memory.oom_control", 2: "memory.events"}
_PEAK = {1: "memory.max_usage_in_bytes", 2: "memory.peak"}
_END_S = 5.0


@dataclass(frozen=True)
class MemoryCgroup:
    """A cgroup with a limit, and no swap. Pages of files count, but are given up when needed."""

    version: int
    folder: Path

    def command(self, command: Sequence[str]) -> list[str]:
        """`command`, run within it."""
        procs = self.folder / "cgroup.procs"
        return ["sh", "-c", f'echo 0 > "{procs}" && exec "$@"', "sh", *command]

    def enter(self) -> None:
        """Move this process into it."""
        (self.folder / "cgroup.procs").write_text("0")

    @property
    def limit(self) -> Path:
        """The file that has its limit."""
        return self.folder / _LIMIT[self.version]

    @property
    def num_kills(self) -> int:
        """Processes that were killed for lack of memory."""
        lines = (self.folder / _KILLS[self.version]).read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])

    @property
    def peak_bytes(self) -> int:
        """Most memory that was used at once, pages of files included; 0 if that is not known."""
        path = self.folder / _PEAK[self.version]
        return int(path.read_text()) if path.exists() else 0


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup | None]:
    """A cgroup of that size, removed afterwards; None where none may be made."""
    group = _made()
    if group is None:
        yield None
        return
    try:
        group.limit.write_text(str(limit_bytes))
        (group.folder / _NO_SWAP[group.version]).write_text("0")
        yield group
    finally:
        _remove(group.folder)


def drop_pages(path: Path) -> None:
    """Drop a file from the page cache, but for pages that are mapped."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # dirty pages would stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _made() -> MemoryCgroup | None:
    for version, own in cgroup_folders(Path("/"), "memory"):
        folder = own / f"dflash-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            if (folder / _LIMIT[version]).exists():
                return MemoryCgroup(version, folder)
            folder.rmdir()
        if version == 1:
            return None  # not above our own, whose limits hold
    return None


def _remove(folder: Path) -> None:
    """Processes that have ended leave it a moment later."""
    end_s = time.monotonic() + _END_S
    while True:
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.02)
        else:
            return
