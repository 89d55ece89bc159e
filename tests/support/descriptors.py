"""What a process has open."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def num_descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """What is opened within is closed at the end, and not by the collector of garbage.

    Which closes before what other tests have left to it; it would else do so at any time.
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
    """Descriptors and what they are of."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the folder which is being listed
            found.add((descriptor, os.readlink(f"/proc/self/fd/{descriptor}")))
    return found
