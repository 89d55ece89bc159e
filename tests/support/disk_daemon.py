"""The real daemon, whose arenas' reads fail from SIGUSR1 on, and never end from SIGUSR2 on; after
DFLASHTEST_LIMIT_S it no longer waits for these. For tests of daemons that read from the disk.

Example:
  python -m support.disk_daemon model.gguf --listen ipc:///tmp/x/cpu.sock --host-memory-mb 3
"""

from __future__ import annotations

import os
import signal
import sys

import pytest

from dflash_daemon import __main__ as daemon
from dflash_runtime.compute.cpu import host_arena
from dflash_runtime.compute.cpu.host_arena import HostArena
from dflash_runtime.compute.cpu.kernels import arena_words as w
from support.arena_rig import read_from


def main() -> int:
    arenas: list[HostArena] = []
    made = HostArena._set_words

    def noted(arena: HostArena, *arguments: object) -> None:
        made(arena, *arguments)  # type: ignore[arg-type]
        arenas.append(arena)

    def fail(*_: object) -> None:
        for arena in arenas:
            read_from(arena, os.devnull)

    def hang(*_: object) -> None:
        """As if all control blocks were of reads that have not ended."""
        for arena in arenas:
            arena._words[w.NUM_FREE] = 0

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HostArena, "_set_words", noted)
        limit_s = float(os.environ.get("DFLASHTEST_LIMIT_S", host_arena.LIMIT_S))
        patched.setattr(host_arena, "LIMIT_S", limit_s)
        signal.signal(signal.SIGUSR1, fail)
        signal.signal(signal.SIGUSR2, hang)
        return daemon.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
