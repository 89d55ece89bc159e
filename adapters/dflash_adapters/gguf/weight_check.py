"""Digests of the weights in an open model file, to detect changes and to compare with peers.

Blocks of the weights in use are hashed first, to compare with if the file's ctime changes, then all
bytes. A background thread does that at a low rate; work of a few ms is done at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dflash_adapters.gguf.digest import file_digests, kept_digests, whole_digest
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.weight_blocks import (
    NONCE_BYTES,
    Blocks,
    OnGroup,
    expert_blocks,
    model_blocks,
    no_pause,
)
from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import ModelFileError, SettingsError
from dflash_protocol.fingerprint import digest
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.settings import cache_folder

_LOG = logging.getLogger(__name__)

_AT_ONCE_BYTES = 4 << 20
"""Blocks of up to this total size are hashed at once, in some ms."""
_ATTEMPTS = 3
"""Attempts at an answer if ctime changes during each."""
_DIGEST_AFTER_S = 10.0
"""Delay of the full digest, so that short-lived processes do not start it."""
_SHARE_OF_CORE = 0.0025
"""Share of each core of the machine for the full digest. The thread's priority is not lowered: it
might be preempted while it has the GIL, for which the other threads would wait."""
_MOST_OF_A_CORE = 0.25
_SHARE_OF_ONE = 0.1
"""Share of one core for hashing blocks in the background, for some seconds."""
_WAIT_S = 1.0
"""Interval of checks whether another process has computed the digest of the same file."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Closed(Exception):
    """Ends the thread's current work."""


class WeightCheck:
    """Digests of one open model, cached in `cache_dir` (see `cache_folder`). Thread-safe.

    Owns: a background thread from `start` to `close`. Close it before the file.
    """

    def __init__(self, file: GgufFile, moe: MoeSpec, cache_dir: str | None = None) -> None:
        self._file = file
        self._cache_dir = cache_dir
        self._moe = moe
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._answering = threading.Lock()
        """One answer at a time: each uses several threads."""
        self._wanted: list[tuple[str, Blocks]] = []
        self._thread: threading.Thread | None = None
        try:
            self._boot_id = _BOOT_ID.read_text().strip()
        except OSError:
            self._boot_id = secrets.token_hex(NONCE_BYTES)  # equal to no other process's
        folder = self._folder()
        known = None if folder is None else kept_digests(file.watch, folder)
        if known is not None:
            with contextlib.suppress(ModelFileError):  # the next require_unwritten raises it
                file.watch.keep_full_digest(whole_digest(known))

    @property
    def full_digest(self) -> str:
        """Digest of all bytes of all files, hexadecimal; empty until it is known."""
        return self._file.watch.full_digest

    def stamp(self) -> str:
        """Stamp of the open files: equal stamps mean the same unchanged files on the same host.

        Raises: ModelFileError if the file was written to since it was opened.
        """
        self._file.require_unwritten()
        chunks = [repr(each).encode() for each in self._file.watch.stamps()]
        return digest("file-stamp-v1", (self._boot_id.encode(), *chunks))

    def answer(self, owned: OwnedExperts, nonce: bytes, on_group: OnGroup = no_pause) -> str:
        """Digest of the blocks that a nonce selects from the weights of these experts.

        Raises: ModelFileError; any exception of `on_group`.
        """
        blocks = expert_blocks(nonce, self._moe, owned, tensors=self._file.tensors.values())
        for attempts_left in reversed(range(_ATTEMPTS)):
            with self._answering:
                self._file.require_unwritten()
                made = blocks.digest(self._file.watch.read, on_group)
            try:
                self._file.watch.keep_record(owned.fingerprint, blocks, made)
                break
            except ModelFileError:  # perhaps only its mode was changed meanwhile
                if not attempts_left:
                    raise
        return made

    def remember(self, owned: OwnedExperts | None = None) -> None:
        """Record a digest of blocks of these experts' weights, or of the whole model, to compare
        with when ctime has changed. Hashes small ones at once. Idempotent.

        Raises: ModelFileError.
        """
        watch, tensors = self._file.watch, self._file.tensors.values()
        name = "model" if owned is None else owned.fingerprint
        if watch.has_record(name):
            return
        self._file.require_unwritten()
        nonce = secrets.token_bytes(NONCE_BYTES)
        if owned is None:
            blocks = model_blocks(nonce, self._moe, tensors)
        else:
            blocks = expert_blocks(nonce, self._moe, owned, tensors=tensors)
        if blocks.num_bytes <= _AT_ONCE_BYTES:
            watch.keep_record(name, blocks, blocks.digest(watch.read, alone=True))
            return
        watch.expect_record(name)
        with self._lock:
            self._wanted.append((name, blocks))
        self._file.watch.wake.set()

    def start(self) -> None:
        """Start the background thread."""
        self._file.watch.wake.set()
        self._thread = threading.Thread(target=self._run, name="dflash-digest", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        self._file.watch.wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        wake = self._file.watch.wake
        digest_from_s = time.monotonic() + _DIGEST_AFTER_S
        with contextlib.suppress(_Closed):
            while True:
                wake.clear()
                self._require_open()  # after clear(): `close` sets the flag before it wakes us
                try:
                    self._hash_wanted()
                    if time.monotonic() >= digest_from_s:
                        self._make_digest()
                except ModelFileError as error:
                    # Computing with the file checks it too, and reports the error.
                    # docs: it could not be computed in the background; computing with the file
                    # checks it too
                    _LOG.info("the digest of the model's file: %s", error)
                left_s = digest_from_s - time.monotonic()
                wake.wait(left_s if left_s > 0 else None)

    def _hash_wanted(self) -> None:
        pace = self._pace(_SHARE_OF_ONE)
        while True:
            with self._lock:
                if not self._wanted:
                    return
                name, blocks = self._wanted.pop()
            watch = self._file.watch
            made = blocks.digest(watch.read, lambda num_done, num_total: pace(), alone=True)
            watch.keep_record(name, blocks, made)

    def _make_digest(self) -> None:
        watch = self._file.watch
        if watch.full_digest:
            return
        watch.require_unwritten()
        pace = self._pace(min(_MOST_OF_A_CORE, _SHARE_OF_CORE * (os.cpu_count() or 1)))
        found = file_digests(watch, self._folder(), lambda num_bytes: pace(), wait=self._wait)
        watch.keep_full_digest(whole_digest(found))

    def _pace(self, share: float) -> Callable[[], None]:
        """A function to call between pieces of work, which sleeps so that they take this share of a
        core."""
        resumed_s = time.monotonic()

        def pause() -> None:
            nonlocal resumed_s
            self._stop.wait((time.monotonic() - resumed_s) * (1 / share - 1))
            self._require_open()
            resumed_s = time.monotonic()

        return pause

    def _folder(self) -> Path | None:
        try:
            return cache_folder(self._cache_dir)
        except SettingsError:
            return None  # the kernels' cache reports the error

    def _wait(self) -> None:
        self._stop.wait(_WAIT_S)
        self._require_open()

    def _require_open(self) -> None:
        if self._stop.is_set():
            raise _Closed
