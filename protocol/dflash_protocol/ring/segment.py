"""Segments: creating, opening and removing the shared memory and the bells of a link.

One side creates the files under a random name in a private folder; the other opens them by that
name, in the same folder as it sees it; then the names are removed. A bell is a named pipe: one byte
wakes the side that sleeps on it.

::

    ring-<pid>-0-<32 random hex digits>                      the memory, 0600, fully allocated
    ring-…-….client                                          wakes the client
    ring-…-….server                                          wakes the server
    ring-…-….mail                                            bell of the mailbox, if any

``multiprocessing.shared_memory`` cannot be used: an attaching process removes the block when it
ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_protocol.device_payload import DeviceMover, DeviceWindow
from dflash_protocol.errors import DaemonUnavailable, ProtocolError
from dflash_protocol.ring import layout as ring
from dflash_protocol.ring.layout import RingShape

# Older versions have a start time where ours have 0.
_NAME = re.compile(r"ring-([0-9]{1,10})-([0-9]{1,20})-[0-9a-f]{32}\Z")
_BELLS = (".client", ".server")
_MAIL_BELL = ".mail"
_FILE_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
# Opened for reading and writing, so that open() does not wait for the peer and no EOF occurs.
_BELL_FLAGS = _FILE_FLAGS | os.O_NONBLOCK
_DRAIN_BYTES = 1 << 12
_MOST_TRIES = 100
"""A try fails only if a sweeper comes between create and lock."""


@dataclass(frozen=True, slots=True)
class MailTerms:
    """How a parent uses the mailbox of a segment; the daemon is told before it opens its end."""

    limit_ms: int
    """Time limit of a step."""
    in_host: bool = False
    """Whether the mailbox must be in host memory only."""
    by_processor: bool = False
    """Whether a processor of the daemon answers, which no device of it is needed for."""


class Segment:
    """Memory shared by two processes, from `create_segment` or `open_segment` until `close`.

    `names`, at the side that has made the files, removes their names and releases their lock.
    Owns: the mapping, the bells' descriptors, the device window, and the names until `unlink`. What
    both sides agreed on about it is not here: see `daemons.link.SharedMemory` and LinkLimits.
    """

    def __init__(
        self,
        shape: RingShape,
        generation: int,
        name: str,
        *,
        memory: mmap.mmap,
        bells: Sequence[int],
        names: contextlib.ExitStack | None = None,
    ) -> None:
        self.shape = shape
        self.generation = generation
        self.name = name
        """Name of the memory's file, which the peer opens in the shared folder."""
        self.window: DeviceWindow | None = None
        """The memory as mapped by a device of this process, if any."""
        self.mail_window: DeviceWindow | None = None
        """The mailbox alone, if only that is mapped."""
        self.before_close: Callable[[], None] = lambda: None
        """Called by `close` first, so that other users of the memory release it."""
        self.mail_terms: MailTerms | None = None
        """At a parent that has begun a mailbox: our own copy, which the peer cannot write."""
        self._memory = memory
        self._bells = tuple(bells)
        self._names = names
        # Keep the address, not the array: a live array would prevent closing the mapping.
        self.address = int(np.frombuffer(memory, np.uint8).ctypes.data)

    @property
    def client_bell(self) -> int:
        """Wakes the client."""
        return self._bells[0]

    @property
    def server_bell(self) -> int:
        """Wakes the server."""
        return self._bells[1]

    @property
    def mail_bell(self) -> int | None:
        """Wakes the daemon's end of the mailbox, if there is one."""
        return self._bells[2] if len(self._bells) > 2 else None

    @property
    def device_mail(self) -> int:
        """Address of the mailbox for a device to which it is mapped."""
        if self.mail_window is not None:
            return self.mail_window.device_address(0)
        assert self.window is not None
        return self.window.device_address(self.shape.mail_at)

    def write_nonce(self, *, is_client: bool) -> bytes:
        """Write random bytes, by which the peer can show that it has mapped the same memory."""
        nonce = secrets.token_bytes(ring.NONCE_BYTES)
        at = ring.CLIENT_NONCE_AT if is_client else ring.SERVER_NONCE_AT
        self._memory[at : at + ring.NONCE_BYTES] = nonce
        return nonce

    def read_nonce(self, *, is_client: bool) -> bytes:
        """The nonce that the client (or else the server) has written."""
        at = ring.CLIENT_NONCE_AT if is_client else ring.SERVER_NONCE_AT
        return self._memory[at : at + ring.NONCE_BYTES]

    def read_mail(self, offset: int, num_bytes: int) -> bytes:
        """Read bytes of the mailbox. Raises: DaemonUnavailable if the memory is closed."""
        at = self._mail_place(offset, num_bytes)
        return self._memory[at : at + num_bytes]

    def write_mail(self, offset: int, data: bytes) -> None:
        """Write bytes into the mailbox. Raises: DaemonUnavailable if the memory is closed."""
        at = self._mail_place(offset, len(data))
        self._memory[at : at + len(data)] = data

    def ring_mail(self) -> None:
        """Ring the mailbox's bell."""
        if self.mail_bell is not None and not self._memory.closed:
            with contextlib.suppress(BlockingIOError):  # full, so it is rung already
                os.write(self.mail_bell, b"\0")

    def _mail_place(self, offset: int, num_bytes: int) -> int:
        if self._memory.closed:
            raise DaemonUnavailable("the memory is not shared any more")
        assert 0 <= offset <= self.shape.mail_bytes - num_bytes
        return self.shape.mail_at + offset

    def unlink(self) -> None:
        """Remove the names, once both sides have the memory. Does nothing at the opening side."""
        if self._names is not None:
            self._names.close()

    def open_window(self, mover: DeviceMover) -> None:
        """Map the memory to a device. Raises: DeviceUnavailable if that fails, which it always
        does if the file is on a disk."""
        self.window = mover.open(self.address, self.shape.segment_bytes)

    def open_mail_window(self, mover: DeviceMover) -> None:
        """Map only the mailbox to a device. Raises: DeviceUnavailable, as `open_window`."""
        num_bytes = self.shape.segment_bytes - self.shape.mail_at
        self.mail_window = mover.open(self.address + self.shape.mail_at, num_bytes)

    def close(self) -> None:
        """Release everything; the address is invalid afterwards. Idempotent."""
        if self._memory.closed:
            return
        before_close, self.before_close = self.before_close, lambda: None
        before_close()
        for window in (self.window, self.mail_window):
            if window is not None:
                window.close()
        self.window = self.mail_window = None
        self.unlink()
        self._memory.close()
        for bell in self._bells:
            os.close(bell)


def silence_bell(bell: int) -> None:
    """Read the bell's bytes. Bytes beyond one read cause a spurious wake-up."""
    with contextlib.suppress(BlockingIOError):
        os.read(bell, _DRAIN_BYTES)


def create_segment(folder: Path, shape: RingShape, *, generation: int) -> Segment:
    """Create memory under a new name in `folder`, with all pages allocated.

    `folder` must belong to this user, with mode 0700, preferably on a tmpfs.
    Raises: DaemonUnavailable if the folder cannot be used, or memory or descriptors ran out;
    nothing is left behind then.
    """
    with contextlib.ExitStack() as undo, _as_unavailable(f"cannot share memory in {folder}"):
        names = undo.enter_context(contextlib.ExitStack())
        folder_fd = _open_folder(folder)
        names.callback(os.close, folder_fd)
        name, file = _new_locked_file(folder_fd)
        names.callback(os.close, file)  # locked as long as the names exist
        names.callback(_unlink, folder_fd, name)
        os.fchmod(file, 0o600)
        os.posix_fallocate(file, 0, shape.segment_bytes)
        memory = mmap.mmap(file, shape.segment_bytes)
        undo.callback(memory.close)
        struct.pack_into(ring.FACTS_FORMAT, memory, ring.FACTS_AT, *shape.facts(generation))
        bells = []
        for suffix in _bells_of(shape):
            os.mkfifo(name + suffix, 0o600, dir_fd=folder_fd)
            bells.append(os.open(name + suffix, _BELL_FLAGS, dir_fd=folder_fd))
            undo.callback(os.close, bells[-1])
        segment = Segment(shape, generation, name, memory=memory, bells=bells, names=names)
        undo.pop_all()
    return segment


def open_segment(folder: Path, name: str, shape: RingShape, *, generation: int) -> Segment:
    """Open memory that the peer has created, and check it.

    `name` may come from the peer; only names that `create_segment` makes are accepted.
    Raises: DaemonUnavailable if it does not exist (in a container the folder may be another one),
    is not a regular private file of this user, or cannot be mapped; ProtocolError if its size or
    header do not match `shape` and `generation`.
    """
    if not _NAME.match(name):
        raise ProtocolError("the name of the shared memory is malformed")
    with contextlib.ExitStack() as undo, _as_unavailable(f"cannot share memory in {folder}"):
        folder_fd = _open_folder(folder)
        undo.callback(os.close, folder_fd)
        file = os.open(name, _FILE_FLAGS | os.O_NONBLOCK, dir_fd=folder_fd)
        undo.callback(os.close, file)
        found = _check_ours(file, stat.S_ISREG, name)
        if found.st_size != shape.segment_bytes:
            raise ProtocolError(
                f"shared memory of {found.st_size} bytes, expected {shape.segment_bytes}"
            )
        # The creator could truncate the file, which would kill this process with SIGBUS; it runs
        # as the same user and could kill it anyway.
        memory = mmap.mmap(file, shape.segment_bytes)
        kept = contextlib.ExitStack()
        undo.push(kept)
        kept.callback(memory.close)
        if struct.unpack_from(ring.FACTS_FORMAT, memory, ring.FACTS_AT) != shape.facts(generation):
            raise ProtocolError("the shared memory is of another version, shape or generation")
        bells = []
        for suffix in _bells_of(shape):
            bells.append(os.open(name + suffix, _BELL_FLAGS, dir_fd=folder_fd))
            kept.callback(os.close, bells[-1])
            _check_ours(bells[-1], stat.S_ISFIFO, name + suffix)
        segment = Segment(shape, generation, name, memory=memory, bells=bells)
        kept.pop_all()
    return segment


def sweep_segments(folder: Path) -> int:
    """Remove segments of ended processes from `folder`; returns their number.

    Raises: DaemonUnavailable if the folder cannot be used.
    """
    num_removed = 0
    with contextlib.ExitStack() as undo, _as_unavailable(f"cannot sweep {folder}"):
        folder_fd = _open_folder(folder)
        undo.callback(os.close, folder_fd)
        names = {
            entry.removesuffix(".client").removesuffix(".server").removesuffix(_MAIL_BELL)
            for entry in os.listdir(folder_fd)
        }
        for name in sorted(names):
            if _NAME.match(name) and _is_swept(folder_fd, name):
                num_removed += 1
    return num_removed


def _bells_of(shape: RingShape) -> tuple[str, ...]:
    return (*_BELLS, _MAIL_BELL) if shape.mail_bytes else _BELLS


def _open_folder(folder: Path) -> int:
    """Raises: OSError, also if the folder is not private."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(errno.EPERM, "the folder is not private to this user")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_ours(fd: int, is_kind: object, name: str) -> os.stat_result:
    """Raises: DaemonUnavailable if an open file is of another type or not private to this user."""
    assert callable(is_kind)
    found = os.fstat(fd)
    if (
        not is_kind(found.st_mode)
        or found.st_uid != os.getuid()
        or stat.S_IMODE(found.st_mode) & 0o077
    ):
        raise DaemonUnavailable(f"{name} has a wrong type or is not private to this user")
    return found


def _unlink(folder_fd: int, name: str) -> None:
    for each in (name, *(name + suffix for suffix in (*_BELLS, _MAIL_BELL))):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each, dir_fd=folder_fd)


def _new_locked_file(folder_fd: int) -> tuple[str, int]:
    """Name and descriptor of a new file, locked until the name is removed: the lock shows that the
    owner lives, across pid namespaces. Raises: OSError."""
    flags = _FILE_FLAGS | os.O_CREAT | os.O_EXCL
    for _ in range(_MOST_TRIES):
        name = f"ring-{os.getpid()}-0-{secrets.token_hex(16)}"
        file = os.open(name, flags, 0o600, dir_fd=folder_fd)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                return name, file
        except BlockingIOError:
            pass  # a sweeper has locked it and removes it
        except BaseException:
            _unlink(folder_fd, name)
            os.close(file)
            raise
        os.close(file)
    raise OSError(errno.EBUSY, "other processes remove what is made there")


def _is_swept(folder_fd: int, name: str) -> bool:
    """Remove a segment that has no locked owner; False if it has one.

    The lock is held meanwhile, so that a creator that is about to lock it sees that.
    """
    with contextlib.ExitStack() as undo:
        try:
            fd = os.open(name, _FILE_FLAGS | os.O_NONBLOCK, dir_fd=folder_fd)
            undo.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass  # only bells are left: they are created and removed after the memory
        except OSError:
            return False
        _unlink(folder_fd, name)
    return True


@contextlib.contextmanager
def _as_unavailable(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DaemonUnavailable(f"{what}: {error.strerror}") from error
