"""Scratch memory of kernels: reused from call to call, grown when needed."""

from __future__ import annotations

from threading import Lock

import numpy as np

from dflash_protocol.ids import U8Array

_LINE = 64
_COUNTER_BYTES = 2 * _LINE  # its own cache line, and the one fetched with it


class Scratch:
    """One buffer, used by one call at a time; a concurrent call gets memory of its own."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.buffer = _Buffer(0)

    def take(self, *sizes: int) -> _Taken:
        """A context manager that gives addresses of parts of these sizes in bytes, each starting on
        a cache line, and last that of a counter. Memory is not initialised."""
        return _Taken(self, sizes)


class _Buffer:
    """Owns memory, and caches its address: looking that up costs more than a small kernel."""

    __slots__ = ("_room", "address", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self._room: U8Array = np.empty(num_bytes + _LINE, np.uint8)
        self.num_bytes = num_bytes
        self.address = -(-int(self._room.ctypes.data) // _LINE) * _LINE


class _Taken:
    """One call's use of the buffer. A class, since generators are slow to enter and leave."""

    __slots__ = ("_buffer", "_is_shared", "_scratch", "_sizes")

    def __init__(self, scratch: Scratch, sizes: tuple[int, ...]) -> None:
        self._scratch = scratch
        self._sizes = sizes

    def __enter__(self) -> tuple[int, ...]:
        offsets, end = [], _COUNTER_BYTES
        for size in self._sizes:
            offsets.append(end)
            end += (size + _LINE - 1) & -_LINE
        offsets.append(0)
        scratch = self._scratch
        self._is_shared = scratch.lock.acquire(blocking=False)
        if self._is_shared:
            if scratch.buffer.num_bytes < end:
                try:
                    scratch.buffer = _Buffer(end)
                except MemoryError:
                    scratch.lock.release()
                    raise
            self._buffer = scratch.buffer
        else:
            self._buffer = _Buffer(end)
        first = self._buffer.address
        return tuple([first + offset for offset in offsets])

    def __exit__(self, *error: object) -> None:
        if self._is_shared:
            self._scratch.lock.release()


def on_lines(num_bytes: int) -> int:
    """Bytes of the cache lines that so many bytes fill."""
    return -(-num_bytes // _LINE) * _LINE


def zeros_on_lines(*shape: int) -> U8Array:
    """Zero bytes that start on a cache line; pages are allocated on first write."""
    num_bytes = int(np.prod(shape, dtype=np.int64))
    room = np.zeros(num_bytes + _LINE, np.uint8)
    first = -room.ctypes.data % _LINE
    return room[first : first + num_bytes].reshape(shape)
