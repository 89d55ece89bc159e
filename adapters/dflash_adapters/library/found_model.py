"""A model that lies on this machine, by whichever program it was brought."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

MAGIC = b"GGUF"
"""What every file of a model begins with."""

_MOST_ENTRIES = 20_000
"""Of a walk through a folder."""


class Library(StrEnum):
    """Whose folder a model lies in."""

    HUB = "hub"
    """The cache of the hub's library, which ``dflash-moe pull`` shares with other programs."""
    LM_STUDIO = "LM Studio"
    OLLAMA = "Ollama"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A complete model: its `name`, its files in order, their bytes in all.

    `files`: their names in their repository; none of Ollama's models, which have none.
    `changed_s` and `used_s`: when a file was last written and read, in seconds since 1970; some
    file systems note reading once a day, or never. `is_pulled`: ``dflash-moe pull`` brought it.
    """

    name: str
    library: Library
    paths: tuple[Path, ...]
    files: tuple[str, ...]
    quantisation: str
    size_bytes: int
    changed_s: float
    used_s: float
    is_pulled: bool = False

    @property
    def path(self) -> Path:
        """The file that the others are found by."""
        return self.paths[0]


def found_model(
    name: str,
    library: Library,
    paths: Sequence[Path],
    *,
    files: tuple[str, ...] = (),
    quantisation: str = "",
    is_pulled: bool = False,
) -> FoundModel | None:
    """The model that these files are; None unless each is a regular file with GGUF's magic."""
    stats = []
    for path in paths:
        try:
            # O_NONBLOCK: opening a FIFO would otherwise block.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                # The magic is read last: reading changes when the file was used.
                if not stat.S_ISREG(found.st_mode) or os.pread(descriptor, 4, 0) != MAGIC:
                    return None
            finally:
                os.close(descriptor)
        except OSError:
            return None
        stats.append(found)
    return FoundModel(
        name,
        library,
        tuple(paths),
        files,
        quantisation,
        sum(each.st_size for each in stats),
        max(each.st_mtime for each in stats),
        max(each.st_atime for each in stats),
        is_pulled,
    )


def files_below(folder: Path) -> Iterator[str]:
    """Paths of the files below a folder, relative to it, as in a repository. Folders that cannot be
    read are left out; of a very large tree the rest is."""
    num_seen = 0
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            if (num_seen := num_seen + 1) > _MOST_ENTRIES:
                return
            yield (Path(place) / name).relative_to(folder).as_posix()


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, hidden ones left out, sorted; none if it cannot be read."""
    try:
        return sorted(each for each in folder.iterdir() if each.name[0] != "." and each.is_dir())
    except OSError:
        return []
