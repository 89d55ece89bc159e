"""A process that compiles what it is told, one job a line, and answers each when it is done."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys

from dflash_runtime.compute.cpu.kernel_jobs import run_job
from dflash_runtime.compute.cpu.tiers import choose_tier

_PR_SET_PDEATHSIG = 1


def main() -> None:
    tier, parent_pid = sys.argv[1:]
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent_pid):
            return
    choose_tier(tier)
    for line in sys.stdin:
        run_job(line.strip())
        os.write(1, line.encode())  # at once, so that it is read at once


if __name__ == "__main__":
    main()
