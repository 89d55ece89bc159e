"""The digest of all bytes of a model: SHA-256 of each file, cached in the cache folder.

A file's digest is what ``sha256sum`` prints and model sites publish. The cache key is the file's
device, inode, size, mtime and ctime. Errors of the cache folder only cost time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_adapters.gguf.watch import FileWatch
from dflash_protocol.errors import ModelFileError, SettingsError
from dflash_protocol.fingerprint import digest
from dflash_protocol.process.text_files import write_file

CHUNK_BYTES = 1 << 20
_FOLDER = "digests"
_MOST_KEPT = 1024
_SETTLED_S = 2.0
"""A file changed more recently than this may change again without a new ctime, since file systems'
clocks advance in steps of some ms. Its digest is not cached."""
_DIGEST = re.compile(rb"[0-9a-f]{64}\n")

Stamp = tuple[int, int, int, int, int]
OnChunk = Callable[[int], None]
"""Called with the number of bytes just read; an exception from it ends the reading."""


def whole_digest(digests: Sequence[str]) -> str:
    """The digest of a model, from those of its files."""
    return digest("model-bytes-v1", (bytes.fromhex(each) for each in digests))


def file_digests(
    watch: FileWatch,
    folder: Path | None,
    on_chunk: OnChunk,
    *,
    wait: Callable[[], object] | None = None,
) -> list[str]:
    """SHA-256 of each shard, hexadecimal, from the cache in `folder` or computed and cached there.

    No cache if `folder` is None. While another process hashes the same file, `wait` is called
    repeatedly, until its result is cached; an exception from it ends that. None = do not wait.
    Raises: ModelFileError if a file cannot be read or changes meanwhile; exceptions of `on_chunk`.
    """
    stamps = watch.stamps()
    found = []
    for shard, stamp in enumerate(stamps):
        kept = None if folder is None else kept_path(folder, stamp)
        known = read_kept(kept)
        if known is None:
            with watch.reopened(shard) as descriptor:
                while known is None and _is_locked_elsewhere(descriptor) and wait is not None:
                    wait()
                    known = read_kept(kept)
                if known is None:
                    known = _sha256(watch, shard, descriptor, on_chunk)
                    if watch.stamps()[shard] == stamp and kept is not None:
                        _keep(kept, known, changed_ns=stamp[4])
        found.append(known)
    for shard, (before, now) in enumerate(zip(stamps, watch.stamps(), strict=True)):
        if before != now:
            raise ModelFileError("changed while it was read", path=watch.paths[shard])
    return found


def kept_digests(watch: FileWatch, folder: Path) -> list[str] | None:
    """The cached digests of all shards; None unless all are cached."""
    found = [read_kept(kept_path(folder, stamp)) for stamp in watch.stamps()]
    known = [each for each in found if each is not None]
    return known if len(known) == len(found) else None


def _is_locked_elsewhere(descriptor: int) -> bool:
    """Whether another process has the file's lock; else it is taken until the descriptor closes."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # some file systems have no locks
        return False
    return False


def _sha256(watch: FileWatch, shard: int, descriptor: int, on_chunk: OnChunk) -> str:
    """SHA-256 of a shard. Pages that were not in the page cache are dropped from it again: a model
    may be larger than memory, which other programs need."""
    # No read-ahead: its pages would look as if they had been cached before.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    state = hashlib.sha256()
    buffer = bytearray(CHUNK_BYTES)
    num_bytes = watch.stamps()[shard][2]
    for offset in range(0, num_bytes, CHUNK_BYTES):
        part = memoryview(buffer)[: min(CHUNK_BYTES, num_bytes - offset)]
        try:
            if not _is_read_from_cache(descriptor, part, offset):
                if os.preadv(descriptor, [part], offset) != len(part):
                    raise ModelFileError("became shorter while read", path=watch.paths[shard])
                os.posix_fadvise(descriptor, offset, len(part), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise ModelFileError(
                f"cannot be read: {error.strerror}", path=watch.paths[shard], offset_bytes=offset
            ) from error
        state.update(part)
        on_chunk(len(part))
    return state.hexdigest()


def _is_read_from_cache(descriptor: int, part: memoryview, offset: int) -> bool:
    try:
        return os.preadv(descriptor, [part], offset, os.RWF_NOWAIT) == len(part)
    except OSError:  # not cached, or the file system does not support the flag
        return False


def kept_path(folder: Path, stamp: Stamp) -> Path:
    """The cache file of the digest for this stamp."""
    return folder / _FOLDER / hashlib.sha256(repr(stamp).encode()).hexdigest()[:32]


def read_kept(path: Path | None) -> str | None:
    """The cached digest; None if it is missing or damaged."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            content = file.read(128)
    except OSError:
        return None
    return content[:-1].decode() if _DIGEST.fullmatch(content) else None


def _keep(path: Path, made: str, *, changed_ns: int) -> None:
    if time.time_ns() - changed_ns < _SETTLED_S * 1e9:
        return
    with contextlib.suppress(OSError, SettingsError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_file("digest", path, f"{made}\n")
        found = sorted(path.parent.glob("[!.]*"), key=lambda each: each.stat().st_mtime)
        for each in found[:-_MOST_KEPT]:
            each.unlink(missing_ok=True)
