"""Kernel files and all they include: their text, and a digest of it.

The texts are handed to NVRTC, hipRTC, hipcc or g++.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dflash_protocol.errors import SettingsError

KERNELS_FOLDER = Path(__file__).parents[1] / "kernels"

Defines = Mapping[str, int | str]
"""Preprocessor names and values that a kernel file is compiled with."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VALUE = re.compile(r"[A-Za-z0-9_:.+-]*")


@dataclass(frozen=True)
class KernelSource:
    """A kernel file with the headers that it includes, directly or not."""

    name: str
    text: str
    headers: tuple[tuple[str, str], ...]
    """Names as they are included, and texts, sorted by name."""

    @property
    def digest(self) -> bytes:
        return digest_of((self.name, self.text, *(part for pair in self.headers for part in pair)))


@cache
def kernel_source(file: str | Path, folders: tuple[Path, ...] = ()) -> KernelSource:
    """A file of the kernels' folder by name, or any by its path; read once a process.

    Headers lie in the kernels' folders or in `folders`; what is in none of them is a header that
    only another vendor's compiler includes, and left out.
    Raises: SettingsError if the file is not there.
    """
    places = (*kernel_folders(), *folders)
    path = kernel_path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"kernel file {path}: {error.strerror}") from error
    headers: dict[str, str] = {}
    pending = list(_INCLUDE.findall(text))
    while pending:
        name = pending.pop()
        found = _found(Path(name), places)
        if found is None or name in headers:
            continue
        headers[name] = found.read_text(encoding="utf-8")
        pending += _INCLUDE.findall(headers[name])
    return KernelSource(name=path.name, text=text, headers=tuple(sorted(headers.items())))


def kernel_folders() -> tuple[Path, ...]:
    """Where kernels and their headers lie; no two files have the same name."""
    return KERNELS_FOLDER, *sorted(each for each in KERNELS_FOLDER.iterdir() if each.is_dir())


def kernel_path(name: str | Path) -> Path:
    """Path of the kernel file of this name; a path is returned unchanged."""
    return _found(Path(name), kernel_folders()) or KERNELS_FOLDER / name


def _found(file: Path, folders: Iterable[Path]) -> Path | None:
    return next((each / file for each in folders if (each / file).is_file()), None)


def define_options(defines: Defines) -> tuple[str, ...]:
    """``-DNAME=VALUE`` for each, sorted.

    Raises: SettingsError for what is no name or no plain value.
    """
    for name, value in defines.items():
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(str(value)):
            raise SettingsError(f"{name}={value} cannot be defined for a kernel")
    return tuple(f"-D{name}={value}" for name, value in sorted(defines.items()))


def digest_of(parts: Iterable[str | bytes]) -> bytes:
    """Digest of all parts, each preceded by its length."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()
