"""Scratch memory of kernels: reused from call to call, grown when needed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dflash_protocol.ids import U8Array

_LINE = 64
_COUNTER_BYTES = 2 * _LINE  # its own cache line, and the one fetched with it


class Scratch:
    """Buffers, each used by one call at a time; as many are kept as there were calls at once."""

    def __init__(self) -> None:
        self._spare: list[ScratchBuffer] = []

    def take(self, sizes: Iterable[int]) -> tuple[ScratchBuffer, list[int]]:
        """A buffer to give back after use; and addresses of parts of these sizes in bytes, each
        starting on a cache line, and last that of a counter. Memory is not initialised."""
        offsets, end = [], _COUNTER_BYTES
        for size in sizes:
            offsets.append(end)
            end += on_lines(size)
        offsets.append(0)
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = ScratchBuffer(end)
        if buffer.num_bytes < end:
            buffer = ScratchBuffer(end)
        first = buffer.address
        return buffer, [first + offset for offset in offsets]

    def give_back(self, buffer: ScratchBuffer) -> None:
        """Keep a buffer for later calls. One that is not given back is freed."""
        self._spare.append(buffer)


class ScratchBuffer:
    """Owns memory, and caches its address: looking that up costs more than a small kernel."""

    __slots__ = ("_room", "address", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self._room: U8Array = np.empty(num_bytes + _LINE, np.uint8)
        self.num_bytes = num_bytes
        self.address = -(-int(self._room.ctypes.data) // _LINE) * _LINE


def on_lines(num_bytes: int) -> int:
    """Bytes of the cache lines that so many bytes fill."""
    return -(-num_bytes // _LINE) * _LINE


def zeros_on_lines(*shape: int) -> U8Array:
    """Zero bytes that start on a cache line; pages are allocated on first write."""
    num_bytes = int(np.prod(shape, dtype=np.int64))
    room = np.zeros(num_bytes + _LINE, np.uint8)
    first = -room.ctypes.data % _LINE
    return room[first : first + num_bytes].reshape(shape)
