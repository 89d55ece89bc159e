"""A daemon on an emulated GPU, as a separate process; otherwise the real daemon.

At SIGUSR1 it prints the resources it holds, as `watched_daemon` does; at SIGRTMIN another program
takes what is free of its memory, at the next one gives it back.

Example:
  python -m support.emulated_daemon model.gguf --device cuda:0 --listen ipc:///tmp/x/gpu.sock
"""

from __future__ import annotations

import os
import signal
import sys

import pytest

from support.emulated_gpu import install_emulated_gpus
from support.watched_daemon import serve

FREE = "free bytes: "


def main() -> int:
    with pytest.MonkeyPatch.context() as patched:
        gpus = install_emulated_gpus(patched)
        sizes = gpus.free_bytes, 1000

        def take(*_: object) -> None:
            gpus.free_bytes = sizes[gpus.free_bytes == sizes[0]]
            os.write(sys.stderr.fileno(), f"{FREE}{gpus.free_bytes}\n".encode())

        signal.signal(signal.SIGRTMIN, take)
        return serve(gpus.held)


if __name__ == "__main__":
    sys.exit(main())
