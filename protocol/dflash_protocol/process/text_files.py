"""Reading small files up to a size limit, and writing them atomically."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from dflash_protocol.errors import SettingsError

_PIECE_BYTES = 1 << 16


def file_error(kind: str, path: Path, reason: str) -> SettingsError:
    """A SettingsError that names the file."""
    return SettingsError(f"{kind} {path}: {reason}")


def read_file(kind: str, path: Path, *, limit_bytes: int) -> bytes:
    """Content of a file. `kind` names it in messages.

    Raises: SettingsError if it cannot be read or is larger than the limit.
    """
    try:
        with path.open("rb") as file:
            content = file.read(min(limit_bytes, os.fstat(file.fileno()).st_size) + 1)
            # Its size may be unknown: a pipe, a device.
            while len(content) <= limit_bytes and (piece := file.read(_PIECE_BYTES)):
                content += piece
    except OSError as error:
        raise file_error(kind, path, error.strerror or str(error)) from error
    except ValueError as error:  # a name with a NUL in it
        raise file_error(kind, path, str(error)) from error
    if len(content) > limit_bytes:
        raise file_error(kind, path, f"larger than {limit_bytes >> 20} MiB")
    return content


def write_file(kind: str, path: Path, content: str | bytes) -> None:
    """Replace a file's content atomically: a reader sees the old content or the new. Text is
    written as UTF-8.

    Raises: SettingsError if it cannot be written; the old content stays.
    """
    try:
        data = content.encode() if isinstance(content, str) else content
        if path.exists() and not path.is_file():  # a pipe or /dev/stdout cannot be replaced
            path.write_bytes(data)
            return
        target = path.resolve()  # keep a symbolic link, replace what it points to
        beside = target.with_name(f".{target.name[:64]}-{secrets.token_hex(8)}")
        try:
            with beside.open("xb") as file:
                if target.exists():
                    os.fchmod(file.fileno(), target.stat().st_mode & 0o777)
                file.write(data)
            beside.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
    except OSError as error:
        raise file_error(kind, path, error.strerror or str(error)) from error
    except ValueError as error:  # a name with a NUL in it
        raise file_error(kind, path, str(error)) from error
