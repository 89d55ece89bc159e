"""A daemon on an emulated GPU, as a process of its own: the real daemon in all else.

At SIGUSR1 it says how much memory its device has. DFLASHTEST_LINK_SILENCE_S: when it forgets a
parent that has vanished.

Example:
  python -m support.emulated_daemon model.gguf --device cuda:0 --listen ipc:///tmp/x/gpu.sock
"""

from __future__ import annotations

import gc
import os
import signal
import sys

import pytest

from dflash_daemon import __main__ as daemon
from dflash_daemon import control
from support.emulated_gpu import install_emulated_gpus


def main() -> int:
    with pytest.MonkeyPatch.context() as patched:
        gpus = install_emulated_gpus(patched)

        def tell(*_: object) -> None:
            gc.collect()
            num_ranges = sum(device.num_ranges for device in gpus.opened)
            print(f"memory: {gpus.used_bytes()} {num_ranges}", file=sys.stderr, flush=True)

        signal.signal(signal.SIGUSR1, tell)
        silence_s = os.environ.get("DFLASHTEST_LINK_SILENCE_S")
        if silence_s is not None:
            patched.setattr(control, "_LINK_SILENCE_S", float(silence_s))
        return daemon.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
