"""A DeviceMover in numpy, for tests of payload that goes between devices.

Windows are views of shared memory; everything else is its own. Attributes inject faults.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dflash_protocol.batch import Hidden, HostSums, SomeRows, Sums
from dflash_protocol.device_payload import ExpectedSums, digest_of
from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import AnyArray, F32Array, F64Array, I32Array, U8Array
from dflash_protocol.rows import HostCompute


class MovedRows:
    """Implements batch.Hidden, and counts how often they are wanted on the host."""

    is_on_device = True

    def __init__(self, array: F32Array) -> None:
        self.array = array
        self.num_downloads = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.array.shape[0], self.array.shape[1]

    def to_host(self) -> F32Array:
        self.num_downloads += 1
        return self.array

    def chosen(self, rows: SomeRows) -> MovedRows:
        return MovedRows(self.array[rows])

    def new_sums(self) -> MovedSums:
        return MovedSums(np.zeros(self.shape))


class MovedSums:
    """Implements batch.Sums."""

    is_on_device = True

    def __init__(self, array: F64Array) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, int]:
        return self.array.shape[0], self.array.shape[1]

    def add(self, sums: Sums, rows: SomeRows | None = None) -> None:
        self.array[slice(None) if rows is None else rows] += sums.to_host()

    def add_computed(self, hidden: Hidden, rows: I32Array | None, compute: HostCompute) -> None:
        sums = HostSums(np.zeros(hidden.shape))
        compute(hidden, sums.to_host())
        self.add(sums, rows)

    def to_host(self) -> F64Array:
        return self.array.copy()


class HostReadRows(MovedRows):
    """Implements device_payload.ReadRows."""

    def __init__(self, window: HostWindow, offset: int, shape: tuple[int, int]) -> None:
        self._window, self._offset, self._shape = window, offset, shape
        self._read: F32Array | None = None
        self.num_downloads = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def array(self) -> F32Array:  # type: ignore[override]
        if self._read is None:
            self._read = self._window.read(self._offset, self._shape, np.float32)
        return self._read

    def digest(self) -> int:
        return digest_of(self.array.reshape(-1).view(np.uint8))

    def abandon(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class HostExpected:
    """Implements device_payload.ExpectedSums."""

    sums: MovedSums


class HostCopy:
    """Implements device_payload.DmaCopy: copies as late as possible, when the end is polled."""

    def __init__(
        self, mover: HostMover, copy: Callable[[], int], sums: MovedSums | None = None
    ) -> None:
        """`sums`: the destination of a read of sums."""
        mover.copies.append(self)
        self._mover = mover
        self._copy = copy
        self._sums = sums
        self._digest: int | None = None

    def has_ended(self) -> bool:
        if not self._mover.is_slow:
            self.digest()
        return self._digest is not None

    def digest(self) -> int:
        if self._digest is None:
            self._digest = self._copy()
        return self._digest

    def is_finite(self) -> bool:
        assert self._digest is not None
        assert self._sums is not None
        return bool(np.isfinite(self._sums.array).all())


class HostWindow:
    """Implements device_payload.DeviceWindow."""

    def __init__(self, mover: HostMover, address: int, num_bytes: int) -> None:
        self._mover = mover
        kind = ctypes.c_ubyte * num_bytes
        self._memory: U8Array | None = np.ctypeslib.as_array(kind.from_address(address))

    def device_address(self, offset: int) -> int:
        memory = self._memory
        assert memory is not None
        return memory.ctypes.data + offset

    def write_rows(self, offset: int, rows: Hidden) -> HostCopy:
        self._mover.check()
        return HostCopy(self._mover, lambda: self._write(offset, rows.to_host()))

    def read_rows(self, offset: int, shape: tuple[int, int]) -> HostReadRows:
        return HostReadRows(self, offset, shape)

    def write_sums(self, offset: int, sums: Sums) -> int:
        return self._write(offset, sums.to_host())

    def expect_sums(self, shape: tuple[int, int]) -> HostExpected:
        return HostExpected(MovedSums(np.full(shape, np.nan)))

    def read_sums(self, offset: int, expected: ExpectedSums) -> HostCopy:
        sums = expected.sums
        assert isinstance(sums, MovedSums)
        self._mover.check()

        def copied() -> int:
            sums.array = self.read(offset, sums.shape, np.float64)
            return digest_of(sums.array.reshape(-1).view(np.uint8))

        return HostCopy(self._mover, copied, sums)

    def read(self, offset: int, shape: tuple[int, int], dtype: type) -> AnyArray:
        """A copy of the memory at `offset`."""
        self._mover.check()
        assert self._memory is not None, "a closed window is read"
        num_bytes = shape[0] * shape[1] * np.dtype(dtype).itemsize
        return self._memory[offset : offset + num_bytes].copy().view(dtype).reshape(shape)

    def close(self) -> None:
        if self._memory is not None:
            self._memory = None
            self._mover.num_open -= 1

    def _write(self, offset: int, array: AnyArray) -> int:
        self._mover.check()
        assert self._memory is not None, "a closed window is written"
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._memory[offset : offset + data.size] = data
        return digest_of(data)


class HostMover:
    """Implements device_payload.DeviceMover."""

    def __init__(self) -> None:
        self.num_open = 0
        """Number of open windows."""
        self.copies: list[HostCopy] = []
        """All that were begun, whether they are still wanted or not."""
        self.is_slow = False
        """Fault: copies end only when they are waited for."""
        self.has_failed = False
        """Fault: every call fails."""

    def open(self, address: int, num_bytes: int) -> HostWindow:
        self.check()
        self.num_open += 1
        return HostWindow(self, address, num_bytes)

    def end_copies(self) -> None:
        """Let all copies end that are under way."""
        for copy in self.copies:
            copy.digest()

    def check(self) -> None:
        if self.has_failed:
            raise DeviceUnavailable("the device has fallen off the bus")
