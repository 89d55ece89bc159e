"""Models in the cache of the hub's library, ``models--OWNER--MODEL/snapshots/COMMIT/FILE``.

Files in snapshots are links to ``blobs``, named by their hash.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dflash_adapters.library.file_sets import (
    FileSet,
    file_sets,
    quantisation_of,
    short_name,
)
from dflash_adapters.library.found_model import (
    FoundModel,
    Library,
    files_below,
    found_model,
    subfolders,
)
from dflash_adapters.library.names import ModelName, is_file_name, parse_name
from dflash_adapters.library.pulled_files import notes_of
from dflash_protocol.errors import SettingsError
from dflash_protocol.process.text_files import read_file

BLOBS, SNAPSHOTS, REFS = "blobs", "snapshots", "refs"
DEFAULT_REVISION = "main"

_PREFIX = "models--"
_LONGEST_REF = 256


def cache_folder() -> Path:
    """The cache's folder, as the hub's library reads it from its environment."""
    # Late: this takes longer than all that is read from there.
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE).absolute()


def repository_folder(cache: Path, name: ModelName) -> Path:
    """The folder of a model's repository."""
    return cache / f"{_PREFIX}{name.owner}--{name.model}"


def repositories(cache: Path) -> Iterator[tuple[str, Path]]:
    """``OWNER/MODEL`` and folder of every repository in the cache that our names can name."""
    for folder in subfolders(cache):
        owner, _, model = folder.name.removeprefix(_PREFIX).partition("--")
        repository = f"{owner}/{model}"
        if folder.name.startswith(_PREFIX) and _is_repository(repository):
            yield repository, folder


def models_in(repository: str, folder: Path, revision: str = "") -> list[FoundModel]:
    """The models of a repository's folder: of each file the one of the newest snapshot, or of
    `revision`."""
    models: dict[FileSet, FoundModel] = {}
    pulled = notes_of(folder)
    for snapshot in _snapshots(folder, revision):
        sets = file_sets(filter(is_file_name, files_below(snapshot)))
        for each in sets:
            paths = [snapshot / name for name in each]
            model = found_model(
                short_name(repository, each, sets),
                Library.HUB,
                paths,
                files=each,
                quantisation=quantisation_of(each[0]),
                is_pulled=all(path.resolve().name in pulled for path in paths),
            )
            if model is not None:
                models.setdefault(each, model)
    return list(models.values())


def _snapshots(folder: Path, revision: str) -> list[Path]:
    """The snapshots to look at, the one of the main branch first, then newer ones first."""
    wanted = _commit_of(folder, revision or DEFAULT_REVISION)
    found = subfolders(folder / SNAPSHOTS)
    if revision:
        return [each for each in found if each.name in (wanted, revision)]
    return sorted(found, key=lambda each: (each.name != wanted, -_modified_s(each)))


def _commit_of(folder: Path, revision: str) -> str:
    try:
        path = folder / REFS / revision
        return read_file("reference", path, limit_bytes=_LONGEST_REF).decode().strip()
    except (SettingsError, UnicodeDecodeError):
        return ""


def _modified_s(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _is_repository(repository: str) -> bool:
    try:
        name = parse_name(f"hf://{repository}")
    except SettingsError:
        return False
    return name is not None and name.repository == repository
