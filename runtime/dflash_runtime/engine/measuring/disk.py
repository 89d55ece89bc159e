"""How fast the disk reads parts of a model file, past the page cache."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_protocol.ids import I64Array
from dflash_runtime.compute.memory import is_in_memory
from dflash_runtime.engine.measuring.timing import TimeLeft
from dflash_runtime.placement.box import Curve

DEPTHS = (1, 2, 4, 8, 16, 32)
_BLOCK = 4096
"""Offsets, sizes and addresses are multiples of this, as direct reads want."""
_MOST_BYTES = 1 << 30
"""Read at most, all depths together."""
_LARGEST_READ = 8 << 20
"""An expert is read in parts of this size."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """A file opened for reads that the page cache does not answer."""

    descriptor: int
    is_direct: bool

    def read(self, offset: int, buffer: mmap.mmap) -> int:
        """Bytes read at an offset: fewer than the buffer's at the end of the file."""
        size = len(buffer)
        if not self.is_direct:  # pages that others use stay
            os.posix_fadvise(self.descriptor, offset, size, os.POSIX_FADV_DONTNEED)
        return os.preadv(self.descriptor, [buffer], offset)


@contextmanager
def _opened(path: Path) -> Iterator[_Reader]:
    """Raises: OSError."""
    flags, is_direct = os.O_RDONLY | os.O_CLOEXEC, True
    try:
        descriptor = os.open(path, flags | os.O_DIRECT)
    except OSError:  # not every file system can
        descriptor, is_direct = os.open(path, flags), False
    try:
        yield _Reader(descriptor, is_direct)
    finally:
        os.close(descriptor)


def measure_disk(
    path: Path,
    *,
    expert_bytes: int,
    limit_s: float,
    report: Callable[[str, int, int], None] = lambda what, num_done, num_total: None,
) -> Curve | None:
    """Bytes a second of reads of an expert's size, spread over a file, by how many are pending.

    None if the file cannot be read so, is too small to tell, or lies in memory.
    """
    if is_in_memory(path):
        return None
    num_bytes = min(_LARGEST_READ, max(_BLOCK, -(-expert_bytes // _BLOCK) * _BLOCK))
    left, points, num_left = TimeLeft(limit_s), list[tuple[float, float]](), _MOST_BYTES
    try:
        num_places = path.stat().st_size // num_bytes
        if num_places < 2 * max(DEPTHS):
            return None
        offsets = np.random.default_rng().permutation(num_places) * num_bytes
        with _opened(path) as reader:
            for index, depth in enumerate(DEPTHS):
                report(f"disk: {depth} at a time", index, len(DEPTHS))
                part_s = left.seconds / (len(DEPTHS) - index)
                most = num_left // (len(DEPTHS) - index)
                if points and (not part_s or most < depth * num_bytes):
                    break
                rate, num_read = _rate(reader, offsets, num_bytes, depth, part_s, most)
                num_left = max(0, num_left - num_read)
                points.append((float(depth), rate))
                offsets = np.roll(offsets, -(num_read // num_bytes))
    except OSError:
        return None
    return Curve(tuple(points))


def _rate(
    reader: _Reader, offsets: I64Array, num_bytes: int, depth: int, limit_s: float, most: int
) -> tuple[float, int]:
    """Bytes a second, and how many were read. Raises: OSError."""
    end_s = time.perf_counter() + limit_s
    most_reads = max(1, min(most // num_bytes, offsets.size) // depth)

    def read_some(first: int) -> int:
        done = 0
        with mmap.mmap(-1, num_bytes) as buffer:
            for turn in range(most_reads):
                if turn and time.perf_counter() > end_s:
                    break
                place = offsets[(first + turn * depth) % offsets.size]
                done += reader.read(int(place), buffer)
        return done

    with ThreadPoolExecutor(depth, thread_name_prefix="dflash-disk") as threads:
        began_s = time.perf_counter()
        num_read = sum(threads.map(read_some, range(depth)))
        return num_read / max(time.perf_counter() - began_s, 1e-9), num_read
