"""What a process knows of the weights in its open model file, and what it tells others of them.

Blocks of what is in use are hashed, to compare with them if only the file's ctime moves, and then
all bytes. A thread of its own does it, slowly, so that nothing else becomes slower; what takes no
more than some ms is done at once. Knows nothing of links.
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
)
from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import ModelFileError, SettingsError
from dflash_protocol.fingerprint import digest
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.settings import cache_folder

_LOG = logging.getLogger(__name__)

_AT_ONCE_BYTES = 4 << 20
"""Blocks of so few bytes take some ms."""
_ATTEMPTS = 3
"""Answers that are begun if ctime moves before each is made."""
_DIGEST_AFTER_S = 10.0
"""Processes that end before read nothing for the full digest."""
_SHARE_OF_CORE = 0.0025
"""Of each core of the machine: what making the full digest takes. Its thread has the priority of
all others: with a lower one it may be put off where it holds the interpreter's lock, which they
then wait for."""
_MOST_OF_A_CORE = 0.25
_SHARE_OF_ONE = 0.1
"""Of one core: what hashing blocks in the background takes, for some seconds."""
_WAIT_S = 1.0
"""Time between two looks whether another process has made the digest of the same file."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Closed(Exception):
    """Ends what the thread is at."""


class WeightCheck:
    """Of one open model. Used by any thread. What it finds out is kept in `cache_dir`, as
    `cache_folder` has it.

    Owns: a thread while there is something to hash. Close it before the file.
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
            self._boot_id = secrets.token_hex(NONCE_BYTES)  # no other process's
        folder = self._folder()
        known = None if folder is None else kept_digests(file.watch, folder)
        if known is not None:
            with contextlib.suppress(ModelFileError):  # which those who compute with it will find
                file.watch.keep_full_digest(whole_digest(known))

    @property
    def full_digest(self) -> str:
        """Of all bytes of all files, as hexadecimal digits; empty while it is not known."""
        return self._file.watch.full_digest

    def stamp(self) -> str:
        """Equal stamps are of the same files of one host, unchanged between the two.

        Raises: ModelFileError if our file was written to since it was opened.
        """
        self._file.require_unwritten()
        chunks = [repr(each).encode() for each in self._file.watch.stamps()]
        return digest("file-stamp-v1", (self._boot_id.encode(), *chunks))

    def answer(
        self,
        owned: OwnedExperts,
        nonce: bytes,
        on_group: OnGroup = lambda num_done, num_total: None,
    ) -> str:
        """Digest of the blocks that a nonce chooses from what an owner of these experts uses.

        Raises: ModelFileError; what `on_group` raises.
        """
        blocks = expert_blocks(nonce, self._moe, owned, tensors=self._file.tensors.values())
        for attempts_left in reversed(range(_ATTEMPTS)):
            with self._answering:
                self._file.require_unwritten()
                made = blocks.digest(self._file.read, on_group)
            try:
                self._file.watch.keep_record(owned.fingerprint, blocks, made)
                break
            except ModelFileError:  # its mode was changed meanwhile, perhaps
                if not attempts_left:
                    raise
        return made

    def remember(self, owned: OwnedExperts | None = None) -> None:
        """Have blocks of what an owner of these experts uses hashed, of the whole model if that is
        None, to compare with them when ctime has moved. Twice does nothing.

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
            made = blocks.digest_alone(self._file.read, lambda num_done, num_total: None)
            watch.keep_record(name, blocks, made)
            return
        watch.expect_record(name)
        with self._lock:
            self._wanted.append((name, blocks))
        self._file.watch.wake.set()

    def start(self) -> None:
        """Hash in the background from now on."""
        self._file.watch.wake.set()
        self._thread = threading.Thread(target=self._run, name="dflash-digest", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Twice does nothing."""
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
                self._require_open()  # after that: `close` first says so, and then wakes us
                try:
                    self._hash_wanted()
                    if time.monotonic() >= digest_from_s:
                        self._make_digest()
                except ModelFileError as error:
                    # Those who compute with the file look at it themselves, and say so.
                    # docs: it could not be made in the background; who computes with the file looks
                    # at it too
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
            made = blocks.digest_alone(self._file.read, lambda num_done, num_total: pace())
            self._file.watch.keep_record(name, blocks, made)

    def _make_digest(self) -> None:
        watch = self._file.watch
        if watch.full_digest:
            return
        watch.require_unwritten()
        pace = self._pace(min(_MOST_OF_A_CORE, _SHARE_OF_CORE * (os.cpu_count() or 1)))
        found = file_digests(watch, self._folder(), lambda num_bytes: pace(), wait=self._wait)
        watch.keep_full_digest(whole_digest(found))

    def _pace(self, share: float) -> Callable[[], None]:
        """To be called between pieces of work, which then take this share of a core."""
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
            return None  # said by those who keep kernels there

    def _wait(self) -> None:
        self._stop.wait(_WAIT_S)
        self._require_open()

    def _require_open(self) -> None:
        if self._stop.is_set():
            raise _Closed
