"""File descriptors that a process has open."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def num_descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextmanager
def no_descriptor_leak() -> Iterator[None]:
    """Check that the block closes all descriptors it opens, without the garbage collector.

    Collects garbage first, so that descriptors of other tests are not closed meanwhile.
    """
    gc.collect()
    before = _open()
    gc.disable()
    try:
        yield
        assert not (left := _open() - before), left
    finally:
        gc.enable()


def _open() -> set[tuple[str, str]]:
    """Open descriptors and their targets."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.add((descriptor, os.readlink(f"/proc/self/fd/{descriptor}")))
    return found
