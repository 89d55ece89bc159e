"""Files in which Linux says what a process may use; read with bounds, as a container may fake them.

What is missing, malformed or too long counts as absent. Needs the standard library alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_CGROUP = Path("proc/self/cgroup")
_CGROUPS = Path("sys/fs/cgroup")
_LONGEST_FILE = 1 << 16
_DEEPEST_CGROUP = 64
_LONGEST_NUMBER = 18


def text_of(path: Path) -> str:
    """What a file says, without white space around it; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
        return content.decode("ascii").strip() if len(content) <= _LONGEST_FILE else ""
    except (OSError, ValueError):
        return ""


def number_in(text: str) -> int | None:
    """A number of up to 18 digits; None for anything else."""
    text = text.strip()
    is_number = text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER
    return int(text) if is_number else None


def cgroup_folders(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Version (2 or 1) and folder of this process's cgroups that may limit something, each followed
    by those above it. Folders need not exist: in a container only the mount may."""
    for line in text_of(root / _CGROUP).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield from ((2, folder) for folder in _upwards(root / _CGROUPS, path))
        elif controller in controllers.split(","):
            for name in dict.fromkeys((controllers, controller)):
                yield from ((1, folder) for folder in _upwards(root / _CGROUPS / name, path))


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part]
    if ".." in parts or "\0" in path:  # outside of this namespace
        parts = []
    for end in range(min(len(parts), _DEEPEST_CGROUP), -1, -1):
        yield mount.joinpath(*parts[:end])
