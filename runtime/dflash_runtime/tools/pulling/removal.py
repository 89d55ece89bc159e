"""Removes what ``dflash-moe pull`` has brought, and nothing else; finds what is unfinished."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_adapters.library.file_sets import FileSet, choose, file_sets
from dflash_adapters.library.finding import find_model, require_model
from dflash_adapters.library.found_model import Library, files_below, subfolders
from dflash_adapters.library.hub_cache import (
    BLOBS,
    REFS,
    SNAPSHOTS,
    cache_folder,
    models_in,
    repositories,
    repository_folder,
)
from dflash_adapters.library.names import ModelName
from dflash_adapters.library.pulled_files import (
    PulledFile,
    notes_folder,
    notes_of,
    remove_note,
)
from dflash_protocol.errors import DflashError, SettingsError, one_line
from dflash_runtime.tools.pulling.hub import HubFile
from dflash_runtime.tools.pulling.transfer import num_present, partial_path

_LONGEST_MAP_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Removable:
    """A model that ``pull`` has brought, or begun to: what is on the disk of it, in bytes, and what
    it has in all."""

    name: str
    folder: Path
    notes: tuple[PulledFile, ...]
    present_bytes: int
    size_bytes: int

    @property
    def blobs(self) -> list[Path]:
        return [self.folder / BLOBS / note.blob for note in self.notes]


def unfinished() -> list[Removable]:
    """The models that ``pull`` has begun and not finished."""
    return [
        each
        for _, folder in repositories(cache_folder())
        for each in _unfinished_in(folder).values()
    ]


def removable(name: ModelName) -> Removable:
    """What ``pull`` has brought of a model, finished or not.

    Raises: SettingsError if there is no such model, or another program has brought it.
    """
    if name.owner:
        folder = repository_folder(cache_folder(), name)
        notes = notes_of(folder)
        ours = _unfinished_in(folder)
        for model in models_in(name.repository, folder, name.revision):
            if model.is_pulled:
                own = tuple(notes[path.resolve().name] for path in model.paths)
                ours[model.files] = _removable(model.name, folder, own)
        if ours:
            with contextlib.suppress(SettingsError):  # another program may have what it stands for
                return ours[choose(sorted(ours), name)]
    model = find_model(name) or require_model(name)
    owner = "another program" if model.library is Library.HUB else model.library
    # docs: only what `pull` has brought is removed; remove it with the program that has brought it
    raise SettingsError(f"{name}: was brought by {owner}, which has to remove it: {model.path}")


def remove(model: Removable) -> None:
    """Remove a model's files, and what of its repository's folder is empty then.

    Raises: SettingsError if a process uses it; DflashError if a file cannot be removed.
    """
    users = users_of(model.blobs)
    if users:
        # docs: end that process first
        raise SettingsError(f"{model.name}: is in use by {', '.join(users)}")
    try:
        for note in model.notes:
            _check_not_fetched(model, note)
        for note in model.notes:
            blob = model.folder / BLOBS / note.blob
            for link in _links_to(blob, model.folder):
                link.unlink()
            for path in (blob, partial_path(blob.parent, note.blob)):
                path.unlink(missing_ok=True)
            remove_note(model.folder, note.blob)
        _tidy(model.folder)
    except OSError as error:
        # docs: the cache's folder belongs to another account, or is read-only
        raise DflashError(f"cannot remove {error.filename}: {error.strerror or error}") from error


def users_of(paths: Iterable[Path]) -> list[str]:
    """The processes that have one of these files mapped, as ``NAME (process PID)``: those of this
    account, or as root all."""
    wanted = {os.fsencode(os.path.realpath(path)) for path in paths}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            with (process / "maps").open("rb") as file:
                maps = file.read(_LONGEST_MAP_BYTES)
            # Five columns come before the path, which may have blanks.
            mapped = {
                fields[5] for line in maps.splitlines() if len(fields := line.split(None, 5)) > 5
            }
            if mapped & wanted and process.name != str(os.getpid()):
                name = one_line((process / "comm").read_text(errors="replace").strip(), 40)
                found.append(f"{name} (process {process.name})")
        except OSError:
            continue
    return found


def _unfinished_in(folder: Path) -> dict[FileSet, Removable]:
    notes = notes_of(folder)
    linked = {link.resolve().name for link in _all_links(folder)}
    by_name = {note.name: note for note in notes.values() if note.blob not in linked}
    return {
        each: _removable(by_name[each[0]].chosen, folder, tuple(by_name[name] for name in each))
        for each in file_sets(by_name)
    }


def _removable(name: str, folder: Path, notes: tuple[PulledFile, ...]) -> Removable:
    files = [HubFile(note.name, note.size_bytes, note.blob) for note in notes]
    return Removable(
        name,
        folder,
        notes,
        sum(num_present(folder / BLOBS, each) for each in files),
        sum(each.size_bytes for each in files),
    )


def _check_not_fetched(model: Removable, note: PulledFile) -> None:
    """Raises: SettingsError if a process is fetching the file; OSError."""
    try:
        descriptor = os.open(
            partial_path(model.folder / BLOBS, note.blob), os.O_RDONLY | os.O_CLOEXEC
        )
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SettingsError(f"{model.name}: is being fetched by another process") from None
    finally:
        os.close(descriptor)


def _all_links(folder: Path) -> Iterator[Path]:
    snapshots = folder / SNAPSHOTS
    return (snapshots / name for name in files_below(snapshots))


def _links_to(blob: Path, folder: Path) -> list[Path]:
    target = blob.resolve()
    return [link for link in _all_links(folder) if link.resolve() == target]


def _tidy(folder: Path) -> None:
    """Remove empty snapshots, references to them and, if nothing is left, the repository's folder.

    Raises: OSError.
    """
    for place, _, _ in os.walk(folder / SNAPSHOTS, topdown=False):
        if Path(place) != folder / SNAPSHOTS:
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(place)
    commits = {each.name for each in subfolders(folder / SNAPSHOTS)}
    if commits:
        for name in files_below(folder / REFS):
            reference = folder / REFS / name
            if reference.read_text(errors="replace").strip() not in commits:
                reference.unlink()
    elif not any(files_below(folder / BLOBS)) and not any(notes_folder(folder).glob("*")):
        shutil.rmtree(folder)
