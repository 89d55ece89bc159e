"""What ``dflash-moe pull`` notes of each file, beside it in the cache: ``rm`` removes no others.

A note is written before the first byte is fetched, so a file that was not finished is known too.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_adapters.library.names import is_file_name
from dflash_protocol.errors import SettingsError
from dflash_protocol.process.text_files import read_file, write_file

HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}", re.ASCII)
"""A file's name in the cache: its SHA-256, or, of small files, Git's SHA-1."""
PARTIAL_SUFFIX = ".incomplete"
"""Of a file that is being fetched; the library's older versions name it so too."""

_FOLDER = ".dflash-moe"
_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class PulledFile:
    """A file that was fetched, or is not finished; `name` is its path in the repository, `chosen`
    the model's name as it was asked for."""

    blob: str
    name: str
    size_bytes: int
    commit: str
    chosen: str


def write_note(repository_folder: Path, note: PulledFile) -> None:
    """Note a file. Raises: SettingsError if that cannot be written; OSError."""
    folder = repository_folder / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_file("note", folder / f"{note.blob}.json", json.dumps(asdict(note)))


def notes_of(repository_folder: Path) -> dict[str, PulledFile]:
    """The notes of a repository's files, by their names in the cache. Damaged ones are left out."""
    found = {}
    for path in sorted((repository_folder / _FOLDER).glob("*.json")):
        note = _read(path)
        if note is not None and note.blob == path.stem:
            found[note.blob] = note
    return found


def remove_note(repository_folder: Path, blob: str) -> None:
    """Forget a file. Raises: OSError."""
    (repository_folder / _FOLDER / f"{blob}.json").unlink(missing_ok=True)


def notes_folder(repository_folder: Path) -> Path:
    """The folder of the notes."""
    return repository_folder / _FOLDER


def _read(path: Path) -> PulledFile | None:
    try:
        value = json.loads(read_file("note", path, limit_bytes=_LIMIT_BYTES))
        note = PulledFile(**value)
    except (SettingsError, ValueError, TypeError, RecursionError):
        return None
    texts = (note.blob, note.name, note.commit, note.chosen)
    if not all(isinstance(each, str) for each in texts) or type(note.size_bytes) is not int:
        return None
    return note if HASH.fullmatch(note.blob) and is_file_name(note.name) else None
