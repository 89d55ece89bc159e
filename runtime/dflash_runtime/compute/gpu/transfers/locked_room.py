"""Locked memory of transfers, counted before there is any.

Needs no compiled code: daemons without numba count memory too.
"""

from __future__ import annotations

import os

_MOST_THREADS = 8
"""Enough to saturate PCIe 5; each costs 4 MiB of locked memory."""
PIECE_BYTES = 2 << 20
"""Bytes that a thread copies at once: few, so that they stay in the processor's caches until the
device reads them, and threads end together."""
HALVES = 2


def default_threads() -> int:
    """Each has a core, and one is left to the thread that launches kernels."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) - 1))


def copier_bytes() -> int:
    """Locked memory of a FileCopier, or a WeightCopier, with its default threads."""
    return default_threads() * HALVES * PIECE_BYTES


def rows_bytes(num_rows: int, columns: int) -> int:
    """Locked memory of HostRows for chunks of so many rows."""
    return num_rows * columns * (4 + 8)
