"""The digest of all bytes of a model: SHA-256 of each file, kept in the cache folder.

That of a file is what ``sha256sum`` prints and what sites that offer models publish. It is kept
under the file's device, inode, size, mtime and ctime, and so is good until anything has happened to
the file. Trouble with the folder costs time and never more.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_adapters.gguf.watch import FileWatch
from dflash_protocol.errors import ModelFileError
from dflash_protocol.fingerprint import digest

CHUNK_BYTES = 1 << 20
_FOLDER = "digests"
_MOST_KEPT = 1024
_SETTLED_S = 2.0
"""A file that has changed less than this ago may change again without its ctime's moving: clocks of
file systems stand still for some ms. Its digest is not kept."""
_DIGEST = re.compile(rb"[0-9a-f]{64}\n")

Stamp = tuple[int, int, int, int, int]
OnChunk = Callable[[int], None]
"""Called with the bytes that were read now; what it raises ends the reading."""


def whole_digest(digests: Sequence[str]) -> str:
    """Of a model, by those of its files."""
    return digest("model-bytes-v1", (bytes.fromhex(each) for each in digests))


def file_digests(
    watch: FileWatch,
    folder: Path | None,
    on_chunk: OnChunk,
    *,
    wait: Callable[[], object] | None = None,
) -> list[str]:
    """SHA-256 of each shard, as hexadecimal digits: those that are kept in `folder`; the others
    are read, and kept there. None keeps nothing.

    `wait` is called while another process of those that wait reads the same file, again and again;
    what it raises ends that. Without it nothing is waited for.
    Raises: ModelFileError if a file cannot be read, or changes meanwhile; what `on_chunk` raises.
    """
    stamps = watch.stamps()
    found = []
    for shard, stamp in enumerate(stamps):
        kept = None if folder is None else kept_path(folder, stamp)
        known = read_kept(kept)
        if known is None:
            with watch.reopened(shard) as descriptor:
                while known is None and _is_read_by_others(descriptor) and wait is not None:
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
    """The same if all are kept, else None; nothing is read but that."""
    found = [read_kept(kept_path(folder, stamp)) for stamp in watch.stamps()]
    known = [each for each in found if each is not None]
    return known if len(known) == len(found) else None


def _is_read_by_others(descriptor: int) -> bool:
    """Whether another process holds the file's lock; ours is given up with the descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # some file systems lock nothing
        return False
    return False


def _sha256(watch: FileWatch, shard: int, descriptor: int, on_chunk: OnChunk) -> str:
    """What is not in the system's cache is taken out of it again: a model may be larger than this
    machine's memory, and others use that."""
    # Else pages that are read ahead for us would look as if they had been there before.
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
    except OSError:  # it is not there, or this file system cannot tell
        return False


def kept_path(folder: Path, stamp: Stamp) -> Path:
    """Where the digest of a file with this stamp is kept."""
    return folder / _FOLDER / hashlib.sha256(repr(stamp).encode()).hexdigest()[:32]


def read_kept(path: Path | None) -> str | None:
    """A digest that is kept, or None if there is none or the file is damaged."""
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
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        draft = path.with_name(f".{secrets.token_hex(8)}")
        try:
            draft.write_bytes(made.encode() + b"\n")
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        found = sorted(path.parent.glob("[!.]*"), key=lambda each: each.stat().st_mtime)
        for each in found[:-_MOST_KEPT]:
            each.unlink(missing_ok=True)
