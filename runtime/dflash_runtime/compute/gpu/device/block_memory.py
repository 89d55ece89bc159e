"""Device memory in blocks behind a range of addresses: the last blocks can be given back to the
driver and taken anew, while what was recorded with the addresses stays valid."""

from __future__ import annotations

import weakref
from contextlib import suppress
from functools import partial

from dflash_protocol.errors import DeviceOutOfMemory, DeviceUnavailable
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.device.driver import Driver

_MOST_BLOCKS = 16
"""Of one array: a block costs the driver some 100 µs, and a sixteenth of a layer is little."""


class _Range:
    """Addresses, and the blocks behind their beginning. Owns both, until `release`."""

    def __init__(self, driver: Driver, index: int, *, num_bytes: int, unit: int) -> None:
        """`unit`: blocks have a multiple of so many bytes."""
        self.driver, self.index = driver, index
        self.num_bytes = -(-num_bytes // unit) * unit
        self.block_bytes = -(-num_bytes // (_MOST_BLOCKS * unit)) * unit
        self.held_bytes = 0
        driver.use(index)
        self.address = driver.reserve_addresses(self.num_bytes)

    def held_for(self, num_bytes: int) -> int:
        """What so many bytes take."""
        blocks = -(-num_bytes // self.block_bytes) * self.block_bytes
        return min(blocks, self.num_bytes)

    def keep(self, num_bytes: int) -> None:
        """See BlockArray.keep."""
        before, held_bytes = self.held_bytes, self.held_for(num_bytes)
        self.driver.use(self.index)
        try:
            while self.held_bytes < held_bytes:
                size = min(self.block_bytes, self.num_bytes - self.held_bytes)
                self.driver.map_block(self.index, self.address + self.held_bytes, size)
                self.held_bytes += size
        except BaseException:
            self._shrink(before)
            raise
        self._shrink(held_bytes)

    def _shrink(self, held_bytes: int) -> None:
        while self.held_bytes > held_bytes:
            begin = (self.held_bytes - 1) // self.block_bytes * self.block_bytes
            self.driver.unmap_block(self.address + begin, self.held_bytes - begin)
            self.held_bytes = begin

    def release(self) -> None:
        """Give everything back. Nothing may be running."""
        self.driver.use(self.index)
        self._shrink(0)
        self.driver.free_addresses(self.address, self.num_bytes)


class CudaBlocks:
    """Implements device.BlockArray."""

    def __init__(self, of: _Range, array: DeviceArray) -> None:
        """`array` keeps what `of` ends with."""
        self._range, self.array = of, array

    def held_for(self, num_bytes: int) -> int:
        return self._range.held_for(num_bytes)

    def keep(self, num_bytes: int) -> None:
        self._range.keep(num_bytes)


class _Owner:
    """What arrays of a range refer to: a range ends with the last of them."""


class BlockPool:
    """The ranges of a device; any thread may drop their arrays.

    A range whose array is gone is given back by `trim`, which its caller calls when nothing is
    running, as kernels that used the array may have been launched before.
    """

    def __init__(self, driver: Driver, index: int) -> None:
        self._driver, self._index = driver, index
        self._unit = driver.block_bytes(index)
        self._dropped: list[_Range] = []
        self._num_live = 0

    def new(self, num_bytes: int) -> tuple[_Range, object] | None:
        """A range with all its blocks, and what its array has to refer to; None if there is no such
        memory, or one block would be as large.

        Raises: DeviceOutOfMemory.
        """
        if not self._unit or num_bytes <= self._unit:
            return None
        try:
            found = _Range(self._driver, self._index, num_bytes=num_bytes, unit=self._unit)
            try:
                found.keep(num_bytes)
            except BaseException:
                found.release()
                raise
        except DeviceOutOfMemory:
            raise
        except DeviceUnavailable:  # the driver knows them, but not for this device
            self._unit = 0
            return None
        owner = _Owner()
        weakref.finalize(owner, partial(self._dropped.append, found)).atexit = False
        self._num_live += 1
        return found, owner

    @property
    def has_dropped(self) -> bool:
        """Whether `trim` will give something back."""
        return bool(self._dropped)

    def trim(self) -> bool:
        """Give back what no array uses. Returns whether nothing is left."""
        while self._dropped:
            found = self._dropped.pop()
            self._num_live -= 1
            with suppress(DeviceUnavailable):  # a failed device releases nothing
                found.release()
        return not self._num_live
