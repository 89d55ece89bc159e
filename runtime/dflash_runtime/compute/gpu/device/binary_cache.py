"""Compiled kernels on disk: one file each, named by the digest of all compiler inputs.

Trouble with the folder costs time and never more. A file is written whole or not at all, and one
that is damaged is found by its checksum and compiled again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import cache_folder

_LOG = logging.getLogger(__name__)

_FOLDER = "gpu-kernels"
_CHECKSUM_BYTES = 32


class BinaryCache:
    """Files of one folder; beyond `max_bytes` the least recently used are removed.

    The `folder` is by default one in `cache_dir`, as `cache_folder` has it. Any thread may use it.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        cache_dir: str | None = None,
        max_bytes: int = 256 << 20,
    ) -> None:
        self._given_folder = folder
        self._cache_dir = cache_dir
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._num_bytes: int | None = None
        """Bytes of all files, as far as we know: found in the last scan, and written since. None:
        not scanned yet. Other processes may have written more, which their own scans bound."""

    def can_keep(self) -> bool:
        """Whether there is a usable folder."""
        return self._folder() is not None

    def get(self, key: bytes) -> bytes | None:
        """The binary of this key, or None."""
        folder = self._folder()
        if folder is None:
            return None
        path = folder / key.hex()
        try:
            found = path.read_bytes()
        except OSError:
            return None
        checksum, content = found[:_CHECKSUM_BYTES], found[_CHECKSUM_BYTES:]
        if hashlib.sha256(content).digest() != checksum:
            # docs: once: nothing to do; often: look at the disk
            _LOG.warning("cached kernel is damaged and will be compiled again: %s", path)
            path.unlink(missing_ok=True)
            return None
        with suppress(OSError):
            os.utime(path)
        return content

    def put(self, key: bytes, content: bytes) -> None:
        """Store a binary, if there is a usable folder."""
        folder = self._folder()
        if folder is None or len(content) > self._max_bytes:
            return
        temporary = None
        try:
            descriptor, temporary = tempfile.mkstemp(prefix=".", dir=folder)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(hashlib.sha256(content).digest() + content)
            os.replace(temporary, folder / key.hex())
        except OSError as error:
            # docs: it is compiled again at the next start; look at the cache folder, `CACHE_DIR`
            _LOG.warning("cannot cache a compiled kernel: %s", error)
            if temporary is not None:
                with suppress(OSError):
                    os.unlink(temporary)
            return
        with self._lock:
            if self._num_bytes is not None:
                self._num_bytes += _CHECKSUM_BYTES + len(content)
            if self._num_bytes is None or self._num_bytes > self._max_bytes:
                self._num_bytes = self._bounded(folder, folder / key.hex())

    def _folder(self) -> Path | None:
        """The folder, created and checked to be ours; None after a warning."""
        try:
            folder = self._given_folder or cache_folder(self._cache_dir) / _FOLDER
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (SettingsError, OSError) as error:
            _LOG.warning("kernels will be compiled at every start: %s", error)
            return None
        return folder

    def _bounded(self, folder: Path, newest: Path) -> int | None:
        """Scan the folder; beyond `max_bytes` remove old files, never `newest`, until there is room
        for more, so that the next writes need no scan. Another process may do the same at the same
        time.

        Returns the bytes that are left; None if the scan failed.
        """
        try:
            found = [(path, path.stat()) for path in folder.iterdir()]
            found.sort(key=lambda each: (each[0] == newest, each[1].st_mtime_ns))
            num_bytes = sum(stat.st_size for _, stat in found)
            if num_bytes > self._max_bytes:
                for path, stat in found[:-1]:
                    if num_bytes <= self._max_bytes * 7 // 8:
                        break
                    path.unlink(missing_ok=True)
                    num_bytes -= stat.st_size
        except OSError:
            return None
        return num_bytes
