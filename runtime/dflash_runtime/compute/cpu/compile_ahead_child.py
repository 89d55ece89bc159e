"""A child process of compile_ahead: runs jobs from stdin, one a line, and echoes each when done.

Arguments: the tier, the process id of its parent, with which it ends, and the cache folder.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

from dflash_protocol.process.startup import end_with_parent
from dflash_runtime.compute.cpu.compile.kernel_cache import can_keep, keeping_in
from dflash_runtime.compute.cpu.compile.tiers import choose_tier
from dflash_runtime.compute.cpu.kernel_jobs import run_job

_GC_THRESHOLD = 100_000
"""With Python's default threshold garbage collection takes a tenth of the time."""


def main() -> None:
    # The parent may have ended before we asked; then another process has become our parent.
    if not end_with_parent(signal.SIGKILL) or os.getppid() != int(sys.argv[2]):
        return
    choose_tier(sys.argv[1], sys.argv[3])
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    with keeping_in(sys.argv[3]):
        for line in sys.stdin:
            run_job(line.strip())
            if not can_keep():
                return  # the kernel would not be found by other processes
            os.write(1, line.encode())  # unbuffered


if __name__ == "__main__":
    main()
