"""Checks that only this user and root control what is found under a path.

A socket is only as safe as every folder on its path: a user who can write to one of them can
replace the socket, unnoticed by a client that connects. So folders and links are checked one by
one, as the kernel follows them. A path that passes stays safe unless this user or root changes it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from dflash_protocol.errors import SettingsError

_ROOT = 0
_MOST_LINKS = 40
"""The kernel's limit."""
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_EVERY_ID = "4294967295"
_OWN_FOLDER = "use a folder of your own, mode 0700"


def exists_privately(path: Path, what: str) -> bool:
    """Whether the folder of a path exists; every folder on the way must belong to us or root.

    The last folder must be writable by its owner only. Those above it may also be writable by our
    group, or by all if they have the sticky bit, as ``/tmp`` has. A user namespace shows all owners
    from outside as one uid, which is accepted for folders above the last.
    `what` begins the message. Raises: SettingsError if another account could replace the path.
    """
    place, names, num_links = Path("/"), list(reversed(path.absolute().parts[1:])), 0
    found = place.lstat()
    try:
        while names:
            name = names.pop()
            _require_private_folder(place, what, is_last=not names)
            if name == os.pardir:
                place = place.parent
                found = place.lstat()
                continue
            found = (place / name).lstat()
            if stat.S_ISLNK(found.st_mode):
                if (num_links := num_links + 1) > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                _require_owner(place / name, found, what, is_above=bool(names))
                target = Path(os.readlink(place / name))
                names += reversed(target.parts[target.is_absolute() :])
                place = Path("/") if target.is_absolute() else place
                continue
            place /= name
        _require_owner(place, found, what, is_above=False)
    except FileNotFoundError:
        return not names
    except OSError as error:
        raise SettingsError(f"{what}: {place}: {error.strerror}") from error
    return True


def _require_private_folder(folder: Path, what: str, *, is_last: bool) -> None:
    """Raises: SettingsError; OSError if it is missing or not a folder."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    _require_owner(folder, found, what, is_above=not is_last)
    mode = found.st_mode & _WRITABLE
    if not is_last:
        if mode & stat.S_IWGRP and found.st_gid in (os.getgid(), _ROOT):
            mode &= ~stat.S_IWGRP
        if found.st_mode & stat.S_ISVTX:
            mode = 0
    if mode:
        advice = "" if found.st_mode & stat.S_ISVTX else f"chmod go-w {folder}, or "
        raise SettingsError(
            f"{what}: other accounts may write to the folder {folder}; {advice}{_OWN_FOLDER}"
        )


def _require_owner(path: Path, found: os.stat_result, what: str, *, is_above: bool) -> None:
    if found.st_uid in (os.getuid(), _ROOT) or (is_above and _is_from_outside(found.st_uid)):
        return
    kind = "folder " if stat.S_ISDIR(found.st_mode) else ""
    advice = _OWN_FOLDER if kind else "start both sides under one account"
    raise SettingsError(
        f"{what}: {kind}{path} belongs to another account (user {found.st_uid}); {advice}"
    )


def _is_from_outside(uid: int) -> bool:
    """Whether a uid is the overflow uid, by which a user namespace shows owners from outside."""
    try:
        if uid != int(Path("/proc/sys/kernel/overflowuid").read_text()):
            return False
        return _EVERY_ID not in Path("/proc/self/uid_map").read_text().split()
    except (OSError, ValueError):
        return False
