"""What was typed in chats, kept in a file that its owner alone can read.

A line of the file is a JSON string. Several chats may append to it at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.history import History

from dflash_protocol.errors import SettingsError
from dflash_protocol.process.text_files import file_error, read_file, write_file

_KIND = "chat history"
_MOST = 1000
"""Texts that are kept when the file is shortened."""
_SHORTEN_BYTES = 1 << 20
_LIMIT_BYTES = 64 << 20
_LONGEST = 1 << 16
"""Characters; a longer text, as one that was pasted, is not kept."""


class TypedTexts(History):
    """The texts of a file, the latest first; what is typed is appended.

    Raises: SettingsError, at the start, if the file cannot be created or read, is no file, or
    belongs to another user. A text that cannot be written later is left out.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        os.close(self._opened())
        self._texts = self._read()

    def load_history_strings(self) -> Iterable[str]:
        """The texts, the latest first."""
        return reversed(self._texts)

    def store_string(self, string: str) -> None:
        """Append a text to the file."""
        if len(string) > _LONGEST:
            return
        with contextlib.suppress(OSError, SettingsError):  # a talk does not end for it
            file = self._opened()
            try:
                os.write(file, (json.dumps(string) + "\n").encode())
            finally:
                os.close(file)

    def _opened(self) -> int:
        """A descriptor to append to. Raises: SettingsError."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            file = os.open(self._path, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise file_error(_KIND, self._path, error.strerror or str(error)) from error
        except ValueError as error:  # a name with a NUL in it
            raise file_error(_KIND, self._path, str(error)) from error
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            os.close(file)
            raise file_error(_KIND, self._path, "is no file, or belongs to another user")
        os.fchmod(file, 0o600)
        return file

    def _read(self) -> list[str]:
        """The texts, oldest first; shortens a file that has become large."""
        content = read_file(_KIND, self._path, limit_bytes=_LIMIT_BYTES)
        texts = [text for line in content.splitlines() if (text := _text_of(line)) is not None]
        if len(content) > _SHORTEN_BYTES:
            texts = _latest(texts)
            write_file(_KIND, self._path, "".join(json.dumps(text) + "\n" for text in texts))
        return texts[-_MOST:]


def _latest(texts: list[str]) -> list[str]:
    """The latest that together take half of what the file may have, `_MOST` at most."""
    kept: list[str] = []
    num_bytes = 0
    for text in reversed(texts[-_MOST:]):
        num_bytes += len(json.dumps(text)) + 1
        if num_bytes > _SHORTEN_BYTES // 2:
            break
        kept.append(text)
    return kept[::-1]


def _text_of(line: bytes) -> str | None:
    """None for a line that is no text: one that was cut."""
    try:
        text = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(text, str) else None
