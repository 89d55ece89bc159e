"""Files that are kept with a model from start to start: beside it, else in the cache folder."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from dflash_adapters.library.finding import is_kept_for_others
from dflash_protocol.errors import SettingsError
from dflash_protocol.process.text_files import file_error, write_file
from dflash_protocol.settings import Settings, cache_directory

HEAT_SUFFIX, PLAN_SUFFIX = ".heat", ".plan"
"""Of the model's file name."""


def kept_places(model_path: Path, settings: Settings, suffix: str) -> tuple[Path, ...]:
    """Where a model's heat, or its plan, may be: where the user says, or beside the model unless
    another program keeps it, else in the cache; none if heat is off."""
    if settings.heat == "off":
        return ()
    if settings.heat not in ("auto", ""):
        place = Path(settings.heat).absolute()
        return (place if suffix == HEAT_SUFFIX else place.with_name(place.name + suffix),)
    path = model_path.absolute()
    places = [] if is_kept_for_others(path) else [path.with_name(path.name + suffix)]
    try:
        name = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
        folder = cache_directory(settings) / "heat"
        if not places:  # `write_first` makes the folders of later places alone
            folder.mkdir(mode=0o700, exist_ok=True)
        places.append(folder / (name + suffix))
    except (OSError, SettingsError):
        pass  # the kernels' cache reports the error
    return tuple(places)


def newest_first(kind: str, places: Sequence[Path], *, is_named: bool = False) -> list[Path]:
    """The files that exist, the one that was written last first.

    One that cannot be looked at, or is no file, is left out, or if the user has named it an error.
    Raises: SettingsError.
    """
    written_ns: dict[Path, int] = {}
    for place in places:
        try:
            modified_ns = _modified_ns(kind, place)
        except SettingsError:
            if is_named:
                raise
            continue
        if modified_ns is not None:
            written_ns[place] = modified_ns
    return sorted(written_ns, key=lambda each: -written_ns[each])


def write_first(kind: str, places: Sequence[Path], content: bytes | str) -> str:
    """Write to the first place that takes it. Returns why none did; empty if one did."""
    errors = []
    for place in places:
        try:
            if place != places[0]:
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_file(kind, place, content)
            return ""
        except (OSError, SettingsError) as error:
            errors.append(str(error))
    return errors[0] if errors else ""


def _modified_ns(kind: str, path: Path) -> int | None:
    """When a file was written last; None if there is none.

    Raises: SettingsError if that cannot be said, or it is no file: a pipe would be waited for.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise file_error(kind, path, error.strerror or str(error)) from error
    if not stat.S_ISREG(found.st_mode):
        raise file_error(kind, path, "not a file")
    return found.st_mtime_ns
