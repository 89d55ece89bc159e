"""Segments as files: making, opening and removing the memory and the two bells of a link.

One side makes them under a random name in a folder that is its own alone; the other opens them by
that name, in the same folder as it sees it; once both have, the names are removed. A bell is a
named pipe: one byte wakes whoever sleeps. Knows nothing of what is in a slot.

::

    ring-<pid>-<start time>-<32 random hex digits>           the memory, 0600, all of it reserved
    ring-…-….client                                          rung by the server
    ring-…-….server                                          rung by the client
    ring-…-….mail                                            the same, for the mailbox, if any

Never ``multiprocessing.shared_memory``: a process that attaches to a block of that removes it when
it ends.
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
from pathlib import Path

import numpy as np

from dflash_protocol.device_payload import DeviceMover, DeviceWindow
from dflash_protocol.errors import DaemonUnavailable, ProtocolError
from dflash_protocol.ring import layout as ring
from dflash_protocol.ring.layout import RingShape

_NAME = re.compile(r"ring-([0-9]{1,10})-([0-9]{1,20})-[0-9a-f]{32}\Z")
_BELLS = (".client", ".server")
_MAIL_BELL = ".mail"
_FILE_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
# Read and write, so that a bell never closes and can be opened before the other side has.
_BELL_FLAGS = _FILE_FLAGS | os.O_NONBLOCK
_DRAIN_BYTES = 1 << 12
_MOST_TRIES = 100
"""Each is lost only to a sweeper that comes between the making of a file and its locking."""


class Segment:
    """Memory that two processes share. Made by `create_segment` or `open_segment`.

    Owns: the mapping, both bells' descriptors and, while they are there, the window and the names.
    """

    def __init__(
        self,
        shape: RingShape,
        generation: int,
        name: str,
        *,
        memory: mmap.mmap,
        bells: Sequence[int],
        folder_fd: int | None,
        lock_fd: int | None,
    ) -> None:
        self.shape = shape
        self.generation = generation
        self.name = name
        """What to tell the other side, to be opened in the folder we share."""
        self.client_bell, self.server_bell = bells[:2]
        self.mail_bell: int | None = bells[2] if len(bells) > 2 else None
        self.window: DeviceWindow | None = None
        """The memory as a device of ours sees it, if one does."""
        self.peer_moves = False
        """A device of the other side sees it."""
        self.before_close: Callable[[], None] = lambda: None
        """Has whoever uses the memory besides let go of it."""
        self.mail_limit_ms = 0
        """How long a step of ours through the mailbox may take, as we have told the other side."""
        self.mail_in_host = False
        """Nothing of a mailbox may lie in devices' memory."""
        self.peer_mails = False
        """The other side makes its end of the mailbox ready."""
        self._memory = memory
        self._folder_fd = folder_fd
        self._lock_fd = lock_fd
        # The mapping stays where it is until it is closed; an array kept would forbid closing it.
        self.address = int(np.frombuffer(memory, np.uint8).ctypes.data)

    def write_nonce(self, *, is_client: bool) -> bytes:
        """Random bytes, put where the other side can read them if it has the same memory."""
        nonce = secrets.token_bytes(ring.NONCE_BYTES)
        at = ring.CLIENT_NONCE_AT if is_client else ring.SERVER_NONCE_AT
        self._memory[at : at + ring.NONCE_BYTES] = nonce
        return nonce

    def read_nonce(self, *, is_client: bool) -> bytes:
        """What the client (else the server) has written; tell it, or compare with what it says."""
        at = ring.CLIENT_NONCE_AT if is_client else ring.SERVER_NONCE_AT
        return self._memory[at : at + ring.NONCE_BYTES]

    def read_mail(self, offset: int, num_bytes: int) -> bytes:
        """Of the mailbox, as it is now. Raises: DaemonUnavailable if the memory is closed."""
        at = self._mail_place(offset, num_bytes)
        return self._memory[at : at + num_bytes]

    def write_mail(self, offset: int, data: bytes) -> None:
        """Into the mailbox. Raises: DaemonUnavailable if the memory is closed."""
        at = self._mail_place(offset, len(data))
        self._memory[at : at + len(data)] = data

    def ring_mail(self) -> None:
        """Wake whoever waits for the mailbox's bell."""
        if self.mail_bell is not None and not self._memory.closed:
            with contextlib.suppress(BlockingIOError):  # it is rung already
                os.write(self.mail_bell, b"\0")

    def _mail_place(self, offset: int, num_bytes: int) -> int:
        if self._memory.closed:
            raise DaemonUnavailable("the memory is not shared any more")
        assert 0 <= offset <= self.shape.mail_bytes - num_bytes
        return self.shape.mail_at + offset

    def unlink(self) -> None:
        """Remove the names, once both sides have the memory. Only who made them removes them."""
        if self._folder_fd is None:
            return
        _unlink(self._folder_fd, self.name)
        os.close(self._folder_fd)
        self._folder_fd = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def open_window(self, mover: DeviceMover) -> None:
        """Have a device see the memory too. Raises: DeviceUnavailable if it cannot, which it never
        can if the memory is in a file on a disk."""
        self.window = mover.open(self.address, self.shape.segment_bytes)

    def close(self) -> None:
        """Let go of everything; nothing may use the address any more."""
        if self._memory.closed:
            return
        before_close, self.before_close = self.before_close, lambda: None
        before_close()
        if self.window is not None:
            self.window.close()
            self.window = None
        self.unlink()
        self._memory.close()
        for bell in (self.client_bell, self.server_bell, self.mail_bell):
            if bell is not None:
                os.close(bell)


def silence_bell(bell: int) -> None:
    """Take what was rung. What one read leaves wakes its sleeper once more, for nothing."""
    with contextlib.suppress(BlockingIOError):
        os.read(bell, _DRAIN_BYTES)


def create_segment(folder: Path, shape: RingShape, *, generation: int) -> Segment:
    """New memory under a new name in `folder`, with all of its pages reserved.

    `folder` must be ours with mode 0700, best on a tmpfs.
    Raises: DaemonUnavailable if the folder cannot be used, or there is no memory or descriptor
    left; nothing is left behind then.
    """
    with contextlib.ExitStack() as undo, _as_unavailable(f"cannot share memory in {folder}"):
        folder_fd = _open_folder(folder)
        undo.callback(os.close, folder_fd)
        name, file = _new_locked_file(folder_fd)
        undo.callback(_unlink, folder_fd, name)
        undo.callback(os.close, file)
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
        segment = Segment(
            shape,
            generation,
            name,
            memory=memory,
            bells=bells,
            folder_fd=folder_fd,
            lock_fd=file,
        )
        undo.pop_all()
    return segment


def open_segment(folder: Path, name: str, shape: RingShape, *, generation: int) -> Segment:
    """The memory that the other side made, if it is what was agreed.

    `name` may come from the other side; it names a file of `folder` and nothing else.
    Raises: DaemonUnavailable if it is not there (the folder may be another one for us), is no plain
    file of ours, or cannot be mapped; ProtocolError if its size or facts are not those of `shape`
    and `generation`.
    """
    if not _NAME.match(name):
        raise ProtocolError("the name of the shared memory is none of ours")
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
        # Who made the file may cut it and kill us with SIGBUS. It runs as the same user and could
        # do so anyway.
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
        segment = Segment(
            shape,
            generation,
            name,
            memory=memory,
            bells=bells,
            folder_fd=None,
            lock_fd=None,
        )
        kept.pop_all()
    return segment


def sweep_segments(folder: Path) -> int:
    """Remove what dead owners left in `folder`; how many segments that were.

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
    """Raises: OSError, also if it is not ours alone."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(errno.EPERM, "the folder is not ours alone")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_ours(fd: int, is_kind: object, name: str) -> os.stat_result:
    """Raises: DaemonUnavailable if an open file is not of its kind, ours and closed to others."""
    assert callable(is_kind)
    found = os.fstat(fd)
    if (
        not is_kind(found.st_mode)
        or found.st_uid != os.getuid()
        or stat.S_IMODE(found.st_mode) & 0o077
    ):
        raise DaemonUnavailable(f"{name} is not a private file of ours")
    return found


def _unlink(folder_fd: int, name: str) -> None:
    for each in (name, *(name + suffix for suffix in (*_BELLS, _MAIL_BELL))):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each, dir_fd=folder_fd)


def _new_locked_file(folder_fd: int) -> tuple[str, int]:
    """Name and descriptor of a new file, locked as long as there is a name: others tell by it that
    the owner lives, in whatever pid namespace it does. Raises: OSError."""
    flags = _FILE_FLAGS | os.O_CREAT | os.O_EXCL
    for _ in range(_MOST_TRIES):
        name = f"ring-{os.getpid()}-{_start_time(os.getpid()) or '0'}-{secrets.token_hex(16)}"
        file = os.open(name, flags, 0o600, dir_fd=folder_fd)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                return name, file
        except BlockingIOError:
            pass  # a sweeper has it, which removes it
        except BaseException:
            _unlink(folder_fd, name)
            os.close(file)
            raise
        os.close(file)
    raise OSError(errno.EBUSY, "other processes remove what is made there")


def _is_swept(folder_fd: int, name: str) -> bool:
    """Remove a segment whose owner has its lock no more, holding the lock meanwhile: its maker,
    who may just be about to take it, sees that. False if it has an owner."""
    with contextlib.ExitStack() as undo:
        try:
            fd = os.open(name, _FILE_FLAGS | os.O_NONBLOCK, dir_fd=folder_fd)
            undo.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass  # its bells are there; they are made after it, and removed after it
        except OSError:
            return False
        _unlink(folder_fd, name)
    return True


def _start_time(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty if there is none of that number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name may hold anything, brackets and blanks too; what follows its last bracket does not.
    return text.rpartition(")")[2].split()[19]


@contextlib.contextmanager
def _as_unavailable(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DaemonUnavailable(f"{what}: {error.strerror}") from error
