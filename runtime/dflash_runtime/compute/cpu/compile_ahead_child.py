"""A process that compiles what it is told, one job a line, and answers each when it is done.

Its arguments are the tier, the process that it works for, with which it ends, and the cache folder.
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

_OBJECTS_BETWEEN_LOOKS = 100_000
"""Looking for garbage as often as usual takes a tenth of the time."""


def main() -> None:
    # It may have ended before we could ask, and then another process counts as our parent.
    if not end_with_parent(signal.SIGKILL) or os.getppid() != int(sys.argv[2]):
        return
    choose_tier(sys.argv[1], sys.argv[3])
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_LOOKS)
    with keeping_in(sys.argv[3]):
        for line in sys.stdin:
            run_job(line.strip())
            if not can_keep():
                return  # for nothing: nobody will find it
            os.write(1, line.encode())  # at once, so that it is read at once


if __name__ == "__main__":
    main()
