"""Detects whether the bytes of an open model have changed since it was opened.

A file is checked by size, mtime and ctime. A write changes size or mtime. If only ctime has
changed, then its mode, names or owner were changed, or it was written to and mtime was restored:
blocks that were hashed before are hashed again.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dflash_adapters.gguf.shards import FileChange, Shard
from dflash_adapters.gguf.weight_blocks import Blocks, Place
from dflash_protocol.errors import ModelFileError

LOOK_S = 0.1
"""Interval of the checks of `poll`; one takes about 1 µs a shard."""
_MOST_RECORDS = 16
"""Maximum number of recorded digests of blocks, each of the file as it was opened."""


@dataclass(frozen=True, slots=True, eq=False)
class _Watched:
    """An open shard, with its stat when it was opened."""

    path: Path
    file: io.FileIO
    stamp: os.stat_result

    def stat_now(self) -> os.stat_result:
        """Its current stat. Raises: ModelFileError if its size or mtime has changed."""
        now, was = os.fstat(self.file.fileno()), self.stamp
        if (now.st_size, now.st_mtime_ns) != (was.st_size, was.st_mtime_ns):
            raise _written(self)
        return now


class FileWatch:
    """Watches all shards of an open model. Thread-safe; the caller owns the descriptors.

    States: unchanged; touched (only ctime has changed, blocks are hashed again); failed, for good.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        # Not the shards themselves, whose mappings must be released when the file is closed.
        self._shards = tuple(_Watched(each.path, each.file, each.stamp) for each in shards)
        self._ctimes = [shard.stamp.st_ctime_ns for shard in shards]
        """The ctimes at which the bytes were last known to be those of the opened file."""
        self._next_check_s = 0.0
        self._lock = threading.Lock()
        """Protects the fields below; held while blocks are hashed again, so that all wait."""
        self._records: dict[str, tuple[Blocks, str]] = {}
        self._awaited: set[str] = set()
        self._full_digest = self._digest_before = ""
        self.wake = threading.Event()
        """Wakes the background hashing thread: after a change of ctime alone, the full digest has
        to be computed again."""
        self._has_failed = False

    @property
    def full_digest(self) -> str:
        """SHA-256 of all bytes, hexadecimal; empty until it is known."""
        return self._full_digest

    def read(self, places: Sequence[Place]) -> bytes:
        """Bytes of some places, concatenated. Read through descriptors, not the mapping, so that
        they do not stay in this process's resident set.

        Raises: ModelFileError if the file no longer has them.
        """
        descriptors = [shard.file.fileno() for shard in self._shards]
        try:
            # A tight loop, for tens of thousands of blocks.
            pread = os.pread
            pieces = [pread(descriptors[shard], size, offset) for shard, offset, size in places]
        except OSError as error:
            path = self._shards[0].path
            raise ModelFileError(f"cannot be read: {error.strerror}", path=path) from error
        data = b"".join(pieces)
        if len(data) != sum(size for _, _, size in places):
            path = self._shards[0].path
            raise ModelFileError("the file became shorter while it was read", path=path)
        return data

    def poll(self) -> float:
        """`require_unwritten`, unless the last call was less than LOOK_S ago. Returns when the next
        call will check again, by the monotonic clock."""
        now_s = time.monotonic()
        if now_s >= self._next_check_s:
            self.require_unwritten()
            self._next_check_s = now_s + LOOK_S
        return self._next_check_s

    def require_unwritten(self) -> None:
        """Raises: ModelFileError if the bytes may no longer be those of the opened file.

        If only ctime has changed, this hashes the recorded blocks again.
        """
        if self._has_failed:
            raise _written(self._shards[0])
        is_touched = False
        for shard, ctime_ns in zip(self._shards, self._ctimes, strict=True):
            is_touched |= shard.stat_now().st_ctime_ns != ctime_ns
        if is_touched:
            self._compare_again()

    def change(self) -> FileChange | None:
        """How the file has changed since it was opened, by size, mtime and path; of several shards,
        the worst change."""
        try:
            for shard in self._shards:
                shard.stat_now()
        except ModelFileError:
            return FileChange.WRITTEN
        for shard in self._shards:
            try:
                there = os.stat(shard.path)
            except OSError:
                return FileChange.REPLACED
            if not os.path.samestat(there, shard.stamp):
                return FileChange.REPLACED
        return None

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(shard.path for shard in self._shards)

    @contextmanager
    def reopened(self, shard_index: int) -> Iterator[int]:
        """A second descriptor of the open file, independent of its path, with its own lock and
        access advice.

        Raises: ModelFileError if it cannot be opened.
        """
        shard = self._shards[shard_index]
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC
            descriptor = os.open(f"/proc/self/fd/{shard.file.fileno()}", flags)
        except OSError as error:
            raise ModelFileError(f"cannot be read: {error.strerror}", path=shard.path) from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def stamps(self) -> list[tuple[int, int, int, int, int]]:
        """Current device, inode, size, mtime and ctime of each shard."""
        found = (os.fstat(shard.file.fileno()) for shard in self._shards)
        return [
            (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns) for now in found
        ]

    def has_record(self, name: str) -> bool:
        return name in self._records or name in self._awaited

    def expect_record(self, name: str) -> None:
        """Announce that blocks will be hashed and recorded as `name`. If ctime changes before that,
        a changed file can no longer be told from an unchanged one."""
        with self._lock:
            self._awaited.add(name)

    def keep_record(self, name: str, blocks: Blocks, digest: str) -> None:
        """Record the digest of blocks, to compare with it later.

        Raises: ModelFileError if the file has changed meanwhile, so that the digest may be wrong.
        """
        with self._lock:
            self._require_untouched()
            self._awaited.discard(name)
            self._records.setdefault(name, (blocks, digest))
            while len(self._records) > _MOST_RECORDS:
                self._records.pop(next(iter(self._records)))

    def keep_full_digest(self, digest: str) -> None:
        """Record the digest of all bytes, which were read since `wake` was cleared.

        The watch fails if the digest differs from an earlier one.
        Raises: ModelFileError if the file has changed meanwhile.
        """
        with self._lock:
            self._require_untouched()
            if self._digest_before not in ("", digest):
                self._has_failed = True
                return
            self._full_digest = self._digest_before = digest

    def _compare_again(self) -> None:
        with self._lock:
            # Taken before hashing, so that a change during it is noticed the next time.
            ctimes = [os.fstat(shard.file.fileno()).st_ctime_ns for shard in self._shards]
            if ctimes == self._ctimes:
                return  # another thread has done it
            if self._awaited:
                raise ModelFileError(
                    # docs: its ctime changed in the first seconds: start again; see *When a model's
                    # file changes*
                    "changed while it was in use, before its bytes were known well enough to "
                    "compare them; start again with the file as it is now",
                    path=self._shards[0].path,
                )
            for blocks, digest in self._records.values():
                if blocks.digest(self.read) != digest:
                    self._has_failed = True
                    raise _written(self._shards[0])
            self._ctimes = ctimes
            self._full_digest = ""
            self.wake.set()

    def _require_untouched(self) -> None:
        for shard, ctime_ns in zip(self._shards, self._ctimes, strict=True):
            if shard.stat_now().st_ctime_ns != ctime_ns:
                raise ModelFileError(
                    "changed while its bytes were read; start again with the file as it is now",
                    path=shard.path,
                )


def _written(shard: _Watched) -> ModelFileError:
    return ModelFileError(
        # docs: the model's file was changed in place; see *When a model's file changes*
        "was written to while it was in use; start again with the file as it is now",
        path=shard.path,
    )
