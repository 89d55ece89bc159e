"""Folders that belong to one process, and that another process removes after it has ended.

The owner holds a file lock on the folder. The kernel releases it when the process ends, however it
ends, and every pid namespace sees that; a pid may mean another process there. Children do not
inherit the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path

from dflash_protocol.errors import SettingsError

_PREFIX = "d"
_MOST_TRIES = 100
"""A try fails only if a sweeper comes between mkdir and lock."""
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class HeldFolder:
    """A new folder of mode 0700 in `parent`; folders of ended processes there are removed.

    Owns: the folder with all that is in it, and the lock.
    Raises: SettingsError if it cannot be made.
    """

    def __init__(self, parent: Path) -> None:
        for leftover in parent.glob(f"{_PREFIX}*-*"):
            remove_if_abandoned(leftover)
        for _ in range(_MOST_TRIES):
            self.path = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
            try:
                self.path.mkdir(mode=0o700)
                fd = _locked(self.path)
            except OSError as error:
                raise SettingsError(f"run directory {parent}: {error.strerror}") from error
            if fd is not None:
                self._lock_fd = fd
                return
        raise SettingsError(f"run directory {parent}: other processes remove what is made there")

    def close(self) -> None:
        """Remove the folder, then release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def remove_if_abandoned(folder: Path, *, only_if_empty: bool = False) -> None:
    """Remove a folder that has no owner; one that cannot be locked or removed stays.

    It is locked meanwhile, so that a process that has just made it sees that and makes another.
    With `only_if_empty` several may do so at once, each when it has removed what it had there:
    their locks exclude owners, not each other, so that the last one finds the folder empty.
    """
    with contextlib.suppress(OSError):
        fd = _locked(folder, fcntl.LOCK_SH if only_if_empty else fcntl.LOCK_EX)
        if fd is None:
            return
        try:
            if only_if_empty:
                folder.rmdir()
            else:
                shutil.rmtree(folder)
        finally:
            os.close(fd)


def _locked(folder: Path, lock: int = fcntl.LOCK_EX) -> int | None:
    """Descriptor of a folder, locked until the descriptor is closed.

    None if another process has the lock or has removed the folder. Raises: OSError.
    """
    try:
        fd = os.open(folder, _FLAGS)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, lock | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), folder.lstat()):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None
