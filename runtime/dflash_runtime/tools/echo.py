"""The second process of ``dflash-moe doctor --mailbox``: answers as a daemon's device would,
without a model."""

from __future__ import annotations

import os
import select
import signal
import threading
from pathlib import Path

from dflash_protocol.device import Device, parse_device
from dflash_protocol.errors import DaemonUnavailable, DflashError, SettingsError
from dflash_protocol.process.output import say
from dflash_protocol.process.startup import end_with_parent
from dflash_protocol.ring.segment import open_segment
from dflash_protocol.settings import load_settings

_POLL_MS = 200


def main(device: str, segment: str, lifeline_fd: str) -> int:
    """Answer until the life-line closes. Returns the exit code."""
    try:
        cache_dir = load_settings().cache_dir
        _serve(parse_device(device), cache_dir, Path(segment), int(lifeline_fd))
    except (DflashError, OSError, ValueError) as error:
        say(f"error: {error}", program="dflash-daemon")
        return 2 if isinstance(error, SettingsError) else 1
    return 0


def _serve(device: Device, cache_dir: str, path: Path, lifeline_fd: int) -> None:
    """Raises: DflashError if the device or the memory cannot be used."""
    from dflash_runtime.compute import open_backend
    from dflash_runtime.compute.mail_trial import TRIAL_GENERATION

    os.umask(0o077)
    ended = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    if not end_with_parent(signal.SIGTERM):
        raise DaemonUnavailable("the parent is gone already")
    backend = open_backend(device, cache_dir=cache_dir)
    try:
        mail, mover = backend.mail, backend.mover
        if mail is None or mover is None:
            raise SettingsError(f"device {device} cannot have a mailbox")
        segment = open_segment(
            path.parent, path.name, mail.trial_shape, generation=TRIAL_GENERATION
        )
        try:
            segment.open_window(mover)
            segment.before_close = mail.serve_trial(segment).close
            poll = select.poll()
            poll.register(lifeline_fd, select.POLLIN)
            while not ended.is_set() and not poll.poll(_POLL_MS):
                pass
        finally:
            segment.close()
    finally:
        backend.close()
