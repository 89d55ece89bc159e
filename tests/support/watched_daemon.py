"""The real daemon, for tests that look into it: at SIGUSR1 it says what it holds of its devices.
DFLASHTEST_LINK_SILENCE_S: when it forgets a parent that has vanished.

Example:
  python -m support.watched_daemon model.gguf --device cuda:1 --listen ipc:///tmp/x/gpu.sock
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable

import pytest

from dflash_daemon import __main__ as daemon
from dflash_daemon import control
from support.gpu_devices import held_of_gpus

HOLDS = "holds: "


def serve(held: Callable[[], dict[str, int]]) -> int:
    """The daemon, until its end; `held` tells what it holds."""

    def tell(*_: object) -> None:
        # Whoever is interrupted may be writing there too.
        os.write(sys.stderr.fileno(), f"{HOLDS}{json.dumps(held())}\n".encode())

    with pytest.MonkeyPatch.context() as patched:
        signal.signal(signal.SIGUSR1, tell)
        silence_s = os.environ.get("DFLASHTEST_LINK_SILENCE_S")
        if silence_s is not None:
            patched.setattr(control, "_LINK_SILENCE_S", float(silence_s))
        return daemon.main(sys.argv[1:])


def main() -> int:
    return serve(held_of_gpus)


if __name__ == "__main__":
    sys.exit(main())
