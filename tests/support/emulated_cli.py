"""``dflash-moe`` on emulated GPUs, as a separate process; otherwise the real program.

Example:
  python -m support.emulated_cli doctor --mailbox cuda:0 cuda:1@/tmp/x/emulated-daemon
"""

from __future__ import annotations

import pytest

from dflash_runtime.cli.main import main
from support.emulated_gpu import install_emulated_gpus

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patched:
        install_emulated_gpus(patched)
        main()
