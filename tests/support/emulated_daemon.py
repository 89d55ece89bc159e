"""A daemon on an emulated GPU, as a separate process; otherwise the real daemon.

At SIGUSR1 it prints the resources it holds, as `watched_daemon` does; at SIGRTMIN another program
takes what is free of its memory, at the next one gives it back. DFLASHTEST_DEVICE_BYTES: a file
with the size of the GPU's memory, which may change; it then comes in small blocks.

Example:
  python -m support.emulated_daemon model.gguf --device cuda:0 --listen ipc:///tmp/x/gpu.sock
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from dflash_runtime.compute.gpu.device.devices import DeviceMemory
from support.emulated_device import EmulatedDevice
from support.emulated_gpu import EmulatedGpus, install_emulated_gpus
from support.watched_daemon import serve

FREE = "free bytes: "
BLOCK_BYTES = 2048
STAYS_FREE_BYTES = 100_000


def resize(gpus: EmulatedGpus, patched: pytest.MonkeyPatch, file: Path) -> None:
    """Have the GPU as much memory as the file says."""

    def memory() -> DeviceMemory:
        free_bytes = max(0, int(file.read_text()) - gpus.used_bytes())
        return DeviceMemory(
            free_bytes, 1 << 40, is_shared_with_host=False, stays_free_bytes=STAYS_FREE_BYTES
        )

    patched.setattr(EmulatedDevice, "block_bytes", BLOCK_BYTES)
    patched.setattr(gpus, "_memory", memory)


def main() -> int:
    with pytest.MonkeyPatch.context() as patched:
        gpus = install_emulated_gpus(patched)
        file = os.environ.get("DFLASHTEST_DEVICE_BYTES")
        if file is not None:
            resize(gpus, patched, Path(file))
        sizes = gpus.free_bytes, 1000

        def take(*_: object) -> None:
            gpus.free_bytes = sizes[gpus.free_bytes == sizes[0]]
            os.write(sys.stderr.fileno(), f"{FREE}{gpus.free_bytes}\n".encode())

        signal.signal(signal.SIGRTMIN, take)
        return serve(gpus.held)


if __name__ == "__main__":
    sys.exit(main())
