"""A daemon on an emulated GPU, as a process of its own: the real daemon in all else.

Example:
  python -m support.emulated_daemon model.gguf --device cuda:0 --listen ipc:///tmp/x/gpu.sock
"""

from __future__ import annotations

import sys

import pytest

from dflash_daemon import __main__ as daemon
from support.emulated_gpu import install_emulated_gpus


def main() -> int:
    with pytest.MonkeyPatch.context() as patched:
        install_emulated_gpus(patched)
        return daemon.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
