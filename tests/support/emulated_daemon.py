"""A daemon on an emulated GPU, as a separate process; otherwise the real daemon.

At SIGUSR1 it prints the resources it holds, as `watched_daemon` does.

Example:
  python -m support.emulated_daemon model.gguf --device cuda:0 --listen ipc:///tmp/x/gpu.sock
"""

from __future__ import annotations

import sys

import pytest

from support.emulated_gpu import install_emulated_gpus
from support.watched_daemon import serve


def main() -> int:
    with pytest.MonkeyPatch.context() as patched:
        return serve(install_emulated_gpus(patched).held)


if __name__ == "__main__":
    sys.exit(main())
