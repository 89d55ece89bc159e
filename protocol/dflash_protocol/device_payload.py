"""Interfaces for DMA copies of rows and sums between a device and shared memory.

A GPU backend implements them; transports and owners of experts use them. Each copy yields a digest
of what was copied, which the peer's device compares with that of its own copy: see
`ring.layout` for what that protects.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dflash_protocol.ids import U8Array
from dflash_protocol.rows import Hidden, Sums

_ODD = 0x9E3779B97F4A7C15


class ReadRows(Hidden, Protocol):
    """Rows that are read from shared memory lazily, and once."""

    def digest(self) -> int:
        """Digest of the rows; reads them if that has not happened. Raises: DeviceUnavailable."""

    def abandon(self) -> None:
        """Drop the rows: once this returns, shared memory is no longer read for them."""


class DmaCopy(Protocol):
    """An asynchronous copy between a device and shared memory.

    All methods raise DeviceUnavailable if the device fails.
    """

    def has_ended(self) -> bool:
        """Whether the copy is complete; does not wait."""

    def digest(self) -> int:
        """Wait for the copy; returns the digest of what was copied."""

    def is_finite(self) -> bool:
        """Whether all sums that were read are finite; call it after `digest`."""


class ExpectedSums(Protocol):
    """Device memory that sums will be read into."""

    @property
    def sums(self) -> Sums:
        """The sums, valid once the copy is complete."""


class DeviceWindow(Protocol):
    """Pinned host memory that a device reads and writes; another process may write it meanwhile.

    Offsets are in bytes, multiples of a cache line; the caller checks that the data fits.
    All methods raise DeviceUnavailable if the device fails.
    """

    def device_address(self, offset: int) -> int:
        """The address that the device's kernels use."""

    def write_rows(self, offset: int, rows: Hidden) -> DmaCopy:
        """Start to copy rows to `offset`. The previous copy must be complete, and its digest read
        or not needed any more."""

    def read_rows(self, offset: int, shape: tuple[int, int]) -> ReadRows:
        """The rows at `offset`, which must stay there until their digest is read."""

    def write_sums(self, offset: int, sums: Sums) -> int:
        """Copy sums to `offset` once they are computed; waits, and returns their digest."""

    def expect_sums(self, shape: tuple[int, int]) -> ExpectedSums:
        """Allocate memory for the reply to a request when it is sent, so that the read need not
        wait for work that the device is given in between."""

    def read_sums(self, offset: int, expected: ExpectedSums) -> DmaCopy:
        """Start to copy the sums at `offset`, each byte read once; same condition as `write_rows`.
        The source may be overwritten when the copy is complete."""

    def close(self) -> None:
        """Unpin the memory, once nothing uses it. Idempotent."""


class DeviceMover(Protocol):
    """A device that can access host memory by DMA."""

    def open(self, address: int, num_bytes: int) -> DeviceWindow:
        """Pin whole pages of memory for the device; the memory must outlive the window.

        Raises: DeviceUnavailable if they cannot be pinned.
        """


def digest_of(data: U8Array) -> int:
    """Sum modulo 2^64, as an int64, of all 64-bit words, each mixed with its index.

    Mixing is a bijection, so a change within one word is always detected; the sum does not depend
    on the order of additions. It detects accidents, not attacks. The kernels are tested against
    this function. Shapes: data [n], n a multiple of 8.
    """
    words = data.view("<u8")
    places = np.arange(1, words.size + 1, dtype=np.uint64)
    mixed = words ^ places * np.uint64(_ODD)
    mixed = (mixed ^ mixed >> np.uint64(32)) * np.uint64(_ODD)
    mixed ^= mixed >> np.uint64(29)
    return int(mixed.sum(dtype=np.uint64).view(np.int64))
