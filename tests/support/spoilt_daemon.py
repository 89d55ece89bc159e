"""A daemon on a GPU that overwrites its experts on SIGUSR2, as failing memory might, with the byte
in DFLASHTEST_SPOIL. DFLASHTEST_EMULATED: the GPU is emulated.

Example:
  DFLASHTEST_SPOIL=255 python -m support.spoilt_daemon model.gguf --device cuda:1 \\
      --listen ipc:///tmp/x/gpu.sock
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
import pytest

from dflash_runtime.compute.gpu.layers import resident
from support import emulated_daemon, watched_daemon


def main() -> int:
    byte = int(os.environ["DFLASHTEST_SPOIL"])
    held = list[tuple[Any, Any]]()
    memory = resident._memory

    def noted(device: Any, *arguments: Any) -> Any:
        arrays = memory(device, *arguments)
        held.extend((device, each) for each in arrays)
        return arrays

    def spoil(*_: object) -> None:
        for device, array in held:
            device.write(array, np.full(array.size, byte, np.uint8))
        os.write(sys.stderr.fileno(), b"spoilt\n")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(resident, "_memory", noted)
        signal.signal(signal.SIGUSR2, spoil)
        is_emulated = "DFLASHTEST_EMULATED" in os.environ
        return emulated_daemon.main() if is_emulated else watched_daemon.main()


if __name__ == "__main__":
    sys.exit(main())
