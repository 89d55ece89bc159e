"""Fetches one file: what is there already is kept and gone on from, and only a file whose size,
hash and magic are right gets its name.

The bytes are appended to ``BLOB.incomplete``, under a lock that ends with the process.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dflash_adapters.library.found_model import MAGIC
from dflash_adapters.library.pulled_files import PARTIAL_SUFFIX
from dflash_protocol.errors import PullFailed
from dflash_runtime.tools.pulling.hub import HubBusy, HubFile
from dflash_runtime.tools.pulling.watched import PullProgress

_READ_BYTES = 4 << 20
_MOST_TRIES = 6
"""In a row without a byte that came."""
_FIRST_PAUSE_S = 0.5


def partial_path(blobs: Path, blob: str) -> Path:
    """Where a file is while it is not complete."""
    return blobs / (blob + PARTIAL_SUFFIX)


def num_present(blobs: Path, file: HubFile) -> int:
    """How many bytes of a file are there, complete or not."""
    for path in (blobs / file.blob, partial_path(blobs, file.blob)):
        try:
            return min(path.stat().st_size, file.size_bytes)
        except OSError:
            continue
    return 0


class FileTransfer:
    """One file of a repository on its way into the folder `blobs`.

    `opened(from_byte)` asks for its bytes, as `Hub.opened`. Owns: the partial file while `run`
    runs.
    """

    def __init__(
        self, file: HubFile, blobs: Path, progress: PullProgress, *, opened: Callable[[int], Any]
    ) -> None:
        self._file = file
        self._target = blobs / file.blob
        self._partial = partial_path(blobs, file.blob)
        self._progress = progress
        self._opened = opened
        self._base = progress.num_done
        """Of earlier files."""
        self._hash = _new_hash(file)

    def run(self) -> None:
        """Fetch the file, unless it is there.

        Raises: PullFailed; what has come is kept, unless it is wrong.
        """
        try:
            if self._is_there():
                self._progress.num_done = self._base + self._file.size_bytes
                return
            with ExitStack() as undo:
                partial = undo.enter_context(self._locked())
                if self._is_there():  # another process was faster
                    self._progress.num_done = self._base + self._file.size_bytes
                    return
                self._complete(partial)
                os.fsync(partial.fileno())
                self._partial.rename(self._target)
        except OSError as error:
            # docs: of a full disk: make room, and pull again, which goes on where this ended; `rm`
            # removes what has come
            raise PullFailed(f"cannot write {self._partial}: {error.strerror or error}") from error

    def _is_there(self) -> bool:
        try:
            return self._target.stat().st_size == self._file.size_bytes
        except FileNotFoundError:
            return False

    def _locked(self) -> io.FileIO:
        """The partial file, ours alone. Raises: PullFailed if another process has it; OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            partial = io.FileIO(os.open(self._partial, flags, 0o666), "r+")
            try:
                fcntl.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.stat(self._partial).st_ino == os.fstat(partial.fileno()).st_ino:
                    return partial
            except BlockingIOError:
                partial.close()
                # docs: wait for it, or end it
                raise PullFailed(f"another process is fetching {self._file.name}") from None
            except FileNotFoundError:
                pass
            except BaseException:
                partial.close()
                raise
            partial.close()  # it was completed and renamed in between

    def _complete(self, partial: io.FileIO) -> None:
        """Make the partial file the right one. A wrong one that was begun earlier is begun anew,
        once: a machine that lost its power may have left anything."""
        is_resumed = self._take_up(partial)
        while True:
            self._fetch(partial)
            wrong = self._what_is_wrong()
            if wrong is None:
                return
            if not is_resumed:
                self._partial.unlink(missing_ok=True)
                # docs: the hub, or something on the way, sent other bytes than the hub lists; none
                # of them are kept: pull again
                raise PullFailed(f"{self._file.name}: {wrong}; it is not kept")
            is_resumed = False
            self._restart(partial)

    def _take_up(self, partial: io.FileIO) -> bool:
        """Hash what is there. Returns whether anything is."""
        self._restart(partial, keeps=True)
        if os.fstat(partial.fileno()).st_size > self._file.size_bytes:
            partial.truncate(0)
        while piece := partial.read(_READ_BYTES):
            self._hash.update(piece)
            self._progress.move(len(piece))
        return partial.tell() > 0

    def _fetch(self, partial: io.FileIO) -> None:
        """Append until the size is reached. Raises: PullFailed, OSError."""
        num_tries, pause_s = 0, _FIRST_PAUSE_S
        while (have := partial.tell()) < self._file.size_bytes:
            try:
                with self._opened(have) as (begins_at, pieces):
                    if begins_at != have:
                        self._restart(partial)
                    for piece in pieces:
                        self._append(partial, piece)
                if partial.tell() < self._file.size_bytes:
                    raise HubBusy(f"{self._file.name}: the hub ended the file too early")
            except HubBusy:
                num_tries, pause_s = (
                    (num_tries + 1, pause_s * 2) if partial.tell() <= have else (1, _FIRST_PAUSE_S)
                )
                if num_tries >= _MOST_TRIES:
                    raise
                time.sleep(pause_s)

    def _append(self, partial: io.FileIO, piece: bytes) -> None:
        had = partial.tell()
        if had + len(piece) > self._file.size_bytes:
            self._partial.unlink(missing_ok=True)
            raise PullFailed(
                f"{self._file.name}: the hub sends more than the {self._file.size_bytes:,} bytes "
                "that it lists; it is not kept"
            )
        rest = memoryview(piece)
        while rest:
            rest = rest[partial.write(rest) :]
        self._hash.update(piece)
        self._progress.move(len(piece))
        is_known = had < len(MAGIC) <= partial.tell()
        if is_known and os.pread(partial.fileno(), len(MAGIC), 0) != MAGIC:
            self._partial.unlink(missing_ok=True)
            raise PullFailed(f"{self._file.name} is not a GGUF file; it is not kept")

    def _restart(self, partial: io.FileIO, *, keeps: bool = False) -> None:
        if not keeps:
            partial.truncate(0)
        partial.seek(0)
        self._hash = _new_hash(self._file)
        self._progress.num_done = self._base

    def _what_is_wrong(self) -> str | None:
        found = self._hash.hexdigest()
        if found == self._file.blob:
            return None
        return f"its hash is {found[:16]}…, the hub lists {self._file.blob[:16]}…"


def _new_hash(file: HubFile) -> Any:
    """SHA-256, or for a hash of 40 digits Git's of a file."""
    if len(file.blob) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)
