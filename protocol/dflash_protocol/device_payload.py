"""Rows and sums that lie on devices, and go through shared memory without a CPU copying them.

A backend with a device implements it; transports and owners use it without knowing whose device
that is. What a device has copied is known by its digest, which another device takes of its own copy
in the same pass: see `ring` for what that protects.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np

from dflash_protocol.ids import F32Array, F64Array, I32Array, U8Array

SomeRows: TypeAlias = slice | I32Array
"""Rows of an array: a run of them, or their indices."""

_ODD = 0x9E3779B97F4A7C15


class DeviceRows(Protocol):
    """Hidden rows in a device's memory. Used by one thread, like all that is made of them."""

    @property
    def shape(self) -> tuple[int, int]:
        """[T, H]."""

    def to_host(self) -> F32Array:
        """A copy, made once. Raises: DeviceUnavailable."""

    def chosen(self, rows: SomeRows) -> DeviceRows:
        """Some of the rows, in this order; nothing is copied before somebody needs it."""

    def new_sums(self) -> DeviceSums:
        """Sums of as many rows on the same device, all zero."""


class DeviceSums(Protocol):
    """Sums of rows [T, H] in float64, in a device's memory."""

    @property
    def shape(self) -> tuple[int, int]:
        """[T, H]."""

    def add(self, sums: F64Array | DeviceSums, rows: SomeRows | None = None) -> None:
        """Add to some rows, each named once, or to all; `sums` may become part of these, and is
        not to be used any more. Raises: DeviceUnavailable."""

    def to_host(self) -> F64Array:
        """A copy. Raises: DeviceUnavailable."""


class ReadRows(DeviceRows, Protocol):
    """Rows that are read from shared memory when somebody first needs them, and only then."""

    def digest(self) -> int:
        """Of what was read, once it has been. Raises: DeviceUnavailable."""

    def abandon(self) -> None:
        """Nobody needs them: nothing reads shared memory for them once this has returned."""


class DmaCopy(Protocol):
    """A copy between a device and shared memory that is under way, or has ended.

    Everything raises DeviceUnavailable if the device fails.
    """

    def has_ended(self) -> bool:
        """Whether all has arrived, without waiting for it."""

    def digest(self) -> int:
        """Of what was copied; waits until all has arrived."""

    def is_finite(self) -> bool:
        """Of sums that were read, when their digest is known: whether none is NaN or infinite."""


class ExpectedSums(Protocol):
    """Memory of a device for sums that will be read into it."""

    @property
    def sums(self) -> DeviceSums:
        """What was read, once all has arrived."""


class DeviceWindow(Protocol):
    """A piece of the host's memory that a device reads and writes; others may write it meanwhile.

    Offsets are in bytes, whole lines, and the caller sees to it that what is there is large enough.
    Everything raises DeviceUnavailable if the device fails.
    """

    def device_address(self, offset: int) -> int:
        """As the device's kernels see it."""

    def write_rows(self, offset: int, rows: DeviceRows) -> DmaCopy:
        """Begin to copy rows there, when those before have arrived, and somebody has their digest,
        or nobody wants it any more."""

    def read_rows(self, offset: int, shape: tuple[int, int]) -> ReadRows:
        """The rows that lie there; they must stay there until their digest was asked for."""

    def write_sums(self, offset: int, sums: DeviceSums) -> int:
        """Copy sums there, once they are computed; their digest, when all has arrived."""

    def expect_sums(self, shape: tuple[int, int]) -> ExpectedSums:
        """Memory for sums, taken when they are asked for: what the device is given to do until they
        are read need not end before that."""

    def read_sums(self, offset: int, expected: ExpectedSums) -> DmaCopy:
        """Begin to copy the sums that lie there, each byte read once, as `write_rows` does; what
        lies there is not needed any more when all has arrived."""

    def close(self) -> None:
        """Give the memory back to the host, once nothing uses it. Twice does nothing."""


class DeviceMover(Protocol):
    """A device that can read and write the host's memory by itself."""

    def open(self, address: int, num_bytes: int) -> DeviceWindow:
        """Lock whole pages of memory, which must outlive the window, for the device.

        Raises: DeviceUnavailable if there can be no more of it.
        """


def digest_of(data: U8Array) -> int:
    """The digest of bytes: the sum of all 64-bit words, each mixed with its place, modulo 2^64.

    Mixing is a bijection, so that a change within one word is always found; the sum does not depend
    on who adds what first. It finds accidents and is no signature. This is what kernels are tested
    against, as an int64. Shapes: data [n], n a multiple of 8.
    """
    words = data.view("<u8")
    places = np.arange(1, words.size + 1, dtype=np.uint64)
    mixed = words ^ places * np.uint64(_ODD)
    mixed = (mixed ^ mixed >> np.uint64(32)) * np.uint64(_ODD)
    mixed ^= mixed >> np.uint64(29)
    return int(mixed.sum(dtype=np.uint64).view(np.int64))
