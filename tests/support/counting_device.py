"""A KernelDevice that only counts memory: no kernel runs, so that models have their real sizes.

Arrays are zeros of the host that are never written, so that they take no memory. What CuPy's pool
would take of the driver is counted as that pool works: freed pieces are reused, the smallest that
fits, cut to size, and joined with free neighbours.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.device import DeviceArray, Grid
from dflash_runtime.compute.gpu.device.devices import allocated
from dflash_runtime.compute.gpu.device.kernel_sources import Defines
from support.emulated_device import EmulatedDevice

_UNIT = 512
_SMALL_BYTES = 1 << 16
"""Up to this size what is written is there."""
_NUMBERS = itertools.count()


@dataclass(eq=False)
class _Piece:
    """A part of a block of the driver's; `before` and `after` are its neighbours in it."""

    size: int
    before: _Piece | None = None
    after: _Piece | None = None
    is_free: bool = False
    number: int = field(default_factory=lambda: next(_NUMBERS))


class BlockPool:
    """Counts as cupy.cuda.MemoryPool does."""

    def __init__(self) -> None:
        self.total_bytes = self.peak_bytes = 0
        """Taken of the driver, now and at most."""
        self.used_bytes = self.most_used_bytes = 0
        """In use, now and at most."""
        self._free: list[tuple[int, int, _Piece]] = []

    def take(self, num_bytes: int) -> _Piece:
        size = -(-num_bytes // _UNIT) * _UNIT
        self.used_bytes += size
        self.most_used_bytes = max(self.most_used_bytes, self.used_bytes)
        place = bisect.bisect_left(self._free, (size, -1))
        if place == len(self._free):
            self.total_bytes += allocated(size)
            self.peak_bytes = max(self.peak_bytes, self.total_bytes)
            return _Piece(size)
        _, _, piece = self._free.pop(place)
        piece.is_free = False
        if piece.size > size:
            rest = _Piece(piece.size - size, piece, piece.after)
            if piece.after is not None:
                piece.after.before = rest
            piece.after, piece.size = rest, size
            self._keep(rest)
        return piece

    def give_back(self, piece: _Piece) -> None:
        self.used_bytes -= piece.size
        after, before = piece.after, piece.before
        if after is not None and after.is_free:
            self._join(piece, after)
        if before is not None and before.is_free:
            self._free.remove((before.size, before.number, before))
            before.is_free = False
            piece = self._join(before, piece, is_listed=False)
        self._keep(piece)

    def trim(self) -> None:
        """Give whole blocks back to the driver."""
        for entry in [each for each in self._free if each[2].before is each[2].after is None]:
            self._free.remove(entry)
            self.total_bytes -= allocated(entry[0])

    def _join(self, first: _Piece, second: _Piece, *, is_listed: bool = True) -> _Piece:
        if is_listed:
            self._free.remove((second.size, second.number, second))
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _keep(self, piece: _Piece) -> None:
        piece.is_free = True
        bisect.insort(self._free, (piece.size, piece.number, piece))


class PooledDevice(EmulatedDevice):
    """An emulated device that counts what CuPy's pool would take."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool()

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        array = super().empty(shape, dtype)
        weakref.finalize(array.base, self.pool.give_back, self.pool.take(array.nbytes))
        return array

    def trim(self) -> None:
        self.pool.trim()


@dataclass(frozen=True)
class _Kernel:
    name: str
    args: type[ctypes.Structure]


class _Module:
    def kernel(self, name: str, args: type[ctypes.Structure]) -> _Kernel:
        return _Kernel(name, args)


class CountingDevice(EmulatedDevice):
    """Implements KernelDevice. A captured step ends at once, with token 0."""

    def __init__(self) -> None:
        super().__init__(num_multiprocessors=132, max_shared_bytes=227 << 10)
        self.pool = BlockPool()
        self.locked_bytes = 0

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        self._must_not_capture("allocate")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        num_bytes = prod(shape) * np.dtype(dtype).itemsize
        if num_bytes < _SMALL_BYTES:
            memory = np.zeros(num_bytes, np.uint8)
        else:
            memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        piece = self.pool.take(num_bytes)
        weakref.finalize(memory, self.pool.give_back, piece)
        return memory.view(dtype).reshape(shape)

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        return self.empty(shape, dtype)

    def upload(self, array: AnyArray) -> AnyArray:
        copy = self.empty(array.shape, array.dtype)
        self.write(copy, array)
        return copy

    def write(self, destination: DeviceArray, source: AnyArray) -> None:
        if source.nbytes < _SMALL_BYTES:
            super().write(destination, source)

    def download(self, array: DeviceArray) -> AnyArray:
        given: Any = array
        return given.copy() if given.nbytes < _SMALL_BYTES else np.zeros(given.shape, given.dtype)

    def copy(self, destination: DeviceArray, source: DeviceArray) -> None:
        assert destination.nbytes == source.nbytes

    def module(self, file: str | Path, defines: Defines) -> Any:
        return _Module()

    def launch(
        self,
        kernel: Any,
        grid: Grid,
        block: int,
        args: ctypes.Structure,
        *,
        shared_bytes: int = 0,
        overlaps_previous: bool = True,
    ) -> None:
        write = _WRITERS.get(kernel.name)
        if write is None:
            return
        copy = type(args).from_buffer_copy(args)

        def run() -> None:
            write(copy)

        if self._captured is not None:
            self._captured.append(run)
        else:
            run()

    def map_host(self, array: AnyArray) -> Any:
        self.locked_bytes += array.nbytes
        return super().map_host(array)

    def require_mapped(self, begin: int, num_bytes: int) -> None:
        """Nothing: no range is known."""

    def write_at(self, place: int, origin: int, num_bytes: int) -> None:
        """Nothing."""

    def trim(self) -> None:
        self.pool.trim()

    def add_range(self, begin: int, num_bytes: int) -> None:
        """Nothing: no kernel runs."""

    def drop_range(self, begin: int) -> None:
        """Nothing."""


def _write_token(args: Any) -> None:
    """Token 0 at the next position, as far as there is a history."""
    if not args.history:
        return
    position = ctypes.c_int32.from_address(args.positions)
    position.value += 1
    ctypes.c_int32.from_address(args.history + 4 * position.value).value = 0


def _signal(args: Any) -> None:
    if args.signal:
        ctypes.c_int32.from_address(args.signal).value = 1


_WRITERS: dict[str, Callable[[Any], None]] = {
    "argmax_logits": _write_token,
    "sample_token": _write_token,
    "exchange": _signal,
}
"""What the host waits for, by kernel."""
