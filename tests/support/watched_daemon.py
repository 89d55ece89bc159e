"""The real daemon, which on SIGUSR1 prints the device resources it holds. For tests of leaks.
DFLASHTEST_LINK_SILENCE_S: silence after which it drops a parent.

Example:
  python -m support.watched_daemon model.gguf --device cuda:1 --listen ipc:///tmp/x/gpu.sock
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from dflash_daemon import __main__ as daemon
from dflash_daemon import control
from support.driver_use import DriverUse

HOLDS = "holds: "
RESIDENT = "resident bytes"


def resident_bytes() -> int:
    """Resident bytes of this process, without freed memory that the C library keeps, which grows
    with every thread that has run."""
    gc.collect()
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def serve(held: Callable[[], dict[str, int]]) -> int:
    """Run the daemon until its end; `held` returns the resources it holds."""

    def tell(*_: object) -> None:
        found = {**held(), RESIDENT: resident_bytes()}
        # Not print: the interrupted code may be inside a write to stderr.
        os.write(sys.stderr.fileno(), f"{HOLDS}{json.dumps(found)}\n".encode())

    with pytest.MonkeyPatch.context() as patched:
        signal.signal(signal.SIGUSR1, tell)
        silence_s = os.environ.get("DFLASHTEST_LINK_SILENCE_S")
        if silence_s is not None:
            patched.setattr(control, "_LINK_SILENCE_S", float(silence_s))
        return daemon.main(sys.argv[1:])


def main() -> int:
    with pytest.MonkeyPatch.context() as patched:
        return serve(DriverUse(patched).held)


if __name__ == "__main__":
    sys.exit(main())
