"""Fetches a model by name into the cache of the hub's library, where other programs find it too.

All its files are fetched before the first one is linked into a snapshot, which is what makes it
found by name: a model is there whole, or not at all.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from dflash_adapters.library.file_sets import choose, file_sets, short_name
from dflash_adapters.library.hub_cache import (
    BLOBS,
    DEFAULT_REVISION,
    REFS,
    SNAPSHOTS,
    cache_folder,
    repository_folder,
)
from dflash_adapters.library.names import ModelName
from dflash_adapters.library.pulled_files import PulledFile, write_note
from dflash_protocol.errors import PullFailed, SettingsError
from dflash_protocol.process.text_files import write_file
from dflash_runtime.interrupts import uninterrupted
from dflash_runtime.tools.pulling.hub import MOST_FILE_BYTES, Hub, HubFile, Listing
from dflash_runtime.tools.pulling.transfer import FileTransfer, num_present
from dflash_runtime.tools.pulling.watched import PullProgress, watched

_STALLS = 6
"""Of the library's timeouts, without enough bytes, after which a transfer is given up."""
_LEAST_BYTES_PER_S = 1024
_LEAST_FILE_BYTES = 24
"""A header of GGUF."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model that was fetched: its shortest name, its first file, the bytes of all files, and how
    many of them were fetched now."""

    name: str
    path: Path
    num_files: int
    size_bytes: int
    fetched_bytes: int


def pull(
    name: ModelName,
    *,
    on_start: Callable[[str, int, int], None] = lambda name, num_files, num_bytes: None,
    on_progress: Callable[[PullProgress], None] = lambda progress: None,
) -> Pulled:
    """Fetch a model, or what is missing of it.

    `on_start` is told its name, its number of files and the bytes that are to be fetched.
    Raises: SettingsError if the name stands for none of the repository's models, or for several;
    PullFailed. What has come is kept for the next time.
    """
    if not name.owner:
        raise SettingsError(f"{name}: only OWNER/MODEL can be fetched; Ollama fetches its own")
    hub = Hub()
    stall_s = _STALLS * hub.timeout_s
    watch = partial(watched, stall_s=stall_s, least_bytes_per_s=_LEAST_BYTES_PER_S)
    listing: Listing = watch(lambda _: hub.listing(name))
    sets = file_sets(listing.files)
    chosen = choose(sets, name)
    files = [listing.files[each] for each in chosen]
    _check_sizes(files)
    shortest = short_name(name.repository, chosen, sets)
    folder = repository_folder(cache_folder(), name)
    blobs = folder / BLOBS
    try:
        blobs.mkdir(parents=True, exist_ok=True)
        missing = _check_room(files, blobs)
        for each in files:
            if not (blobs / each.blob).exists():
                write_note(
                    folder,
                    PulledFile(each.blob, each.name, each.size_bytes, listing.commit, shortest),
                )
    except OSError as error:
        raise PullFailed(f"cannot write {folder}: {error.strerror or error}") from error
    on_start(shortest, len(files), missing)

    def fetch(progress: PullProgress) -> None:
        progress.num_total = sum(each.size_bytes for each in files)
        for index, file in enumerate(files):
            progress.stage = f"{index + 1}/{len(files)}"
            opened = partial(_opened, hub, name, listing.commit, file)
            FileTransfer(file, blobs, progress, opened=opened).run()

    watch(fetch, on_progress=on_progress)
    with uninterrupted():
        path = _link(folder, listing.commit, files, revision=name.revision or DEFAULT_REVISION)
    total = sum(each.size_bytes for each in files)
    return Pulled(shortest, path, len(files), total, missing)


def _opened(hub: Hub, name: ModelName, commit: str, file: HubFile, from_byte: int) -> object:
    return hub.opened(name, commit, file, from_byte=from_byte)


def _check_sizes(files: Iterable[HubFile]) -> None:
    """Raises: PullFailed."""
    for file in files:
        if file.size_bytes > MOST_FILE_BYTES:
            # docs: the hub gives such files by its own transfer alone; `hf download` has it, and
            # puts the file where it is found by name
            raise PullFailed(
                f"{file.name}: has {file.size_bytes / 1e9:.0f} GB, and only files of up to "
                f"{MOST_FILE_BYTES / 1e9:.0f} GB are fetched; hf download OWNER/MODEL FILE does it"
            )
        if file.size_bytes < _LEAST_FILE_BYTES:
            raise PullFailed(f"{file.name} is not a GGUF file")


def _check_room(files: Iterable[HubFile], blobs: Path) -> int:
    """How many bytes are to be fetched. Raises: PullFailed if the disk has no room; OSError."""
    missing = sum(each.size_bytes - num_present(blobs, each) for each in files)
    free = shutil.disk_usage(blobs).free
    if missing > free:
        # docs: nothing was fetched; make room, or set `HF_HOME` to a folder on a larger disk
        raise PullFailed(
            f"{missing / 2**30:.2f} GiB are to be fetched, {blobs} has {free / 2**30:.2f} GiB free"
        )
    return missing


def _link(folder: Path, commit: str, files: Sequence[HubFile], *, revision: str) -> Path:
    """Make a snapshot with links to the files, and the revision a name of it. Returns the first
    link. Raises: PullFailed."""
    snapshot = folder / SNAPSHOTS / commit
    try:
        for file in files:
            link = snapshot / PurePosixPath(file.name)
            link.parent.mkdir(parents=True, exist_ok=True)
            up = os.path.relpath(folder / BLOBS / file.blob, link.parent)
            beside = link.with_name(f".{secrets.token_hex(8)}")
            beside.symlink_to(up)
            beside.replace(link)
        if revision != commit:
            (folder / REFS).mkdir(exist_ok=True)
            write_file("reference", folder / REFS / revision, commit)
    except OSError as error:
        raise PullFailed(f"cannot write {snapshot}: {error.strerror or error}") from error
    return snapshot / PurePosixPath(files[0].name)
