"""Copies of a GPU's rows and sums from and to shared memory, by kernels that compute the digest of
what they copy.

Implements dflash_protocol.device_payload. A parent's copies run in side streams, beside its
kernels; all others run in the device's main stream. The host waits only where it must know that
something has arrived, and always with a deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading

import numpy as np

from dflash_protocol import device_payload
from dflash_protocol.batch import Hidden, HostHidden, SomeRows, Sums
from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import F32Array, F64Array, I32Array
from dflash_protocol.rows import HostCompute
from dflash_runtime.compute.gpu.device.device import (
    DeviceArray,
    KernelDevice,
    Mark,
    address,
)
from dflash_runtime.compute.gpu.device.mapped_array import MappedBlock
from dflash_runtime.compute.gpu.transfers.host_rows import HostChoices, HostRows, RowIndices
from dflash_runtime.compute.gpu.transfers.payload_kernels import (
    COPY_DEADLINE_S,
    DmaCopies,
    PayloadKernels,
    Shares,
    StreamCopy,
)

_FEWEST_PLACES = 1024


class PayloadMover:
    """Implements device_payload.DeviceMover for one device.

    `lock` is held while it uses the device; other threads that use the device must hold it too.
    """

    def __init__(self, device: KernelDevice, lock: threading.RLock) -> None:
        self.device = device
        self.lock = lock
        self.kernels = PayloadKernels(device, lock)
        self.indices = RowIndices(device)
        self.host_rows = HostRows(self.kernels, self.indices)
        self.choices = HostChoices(device)

    def close(self) -> None:
        """Unmap memory of the host. Idempotent."""
        with self.lock:
            self.host_rows.close()
            self.indices.close()
            self.choices.close()

    def open(self, address: int, num_bytes: int) -> SegmentWindow:
        with self.lock:
            return SegmentWindow(self, address, num_bytes)

    def rows(self, array: DeviceArray) -> PlacedRows:
        """Wrap rows, which must not change any more. Shapes: array [T, H] float32, contiguous."""
        return PlacedRows(self, array)

    def sums(self, array: DeviceArray) -> PlacedSums:
        """Wrap sums, taking over the array. Shapes: array [T, H] float64, contiguous."""
        return PlacedSums(self, array.shape, array)

    def array_of(self, hidden: Hidden) -> DeviceArray:
        """Rows in this device's memory, copied if need be. Shapes: result [T, H] float32."""
        with self.lock:
            if isinstance(hidden, PlacedRows | SlotRows) and hidden.mover is self:
                return hidden.array()
            return self.device.upload(hidden.to_host())

    def array_of_sums(self, sums: Sums) -> DeviceArray:
        """Sums in this device's memory, copied if need be. Shapes: result [T, H] float64."""
        with self.lock:
            if isinstance(sums, PlacedSums) and sums.mover is self:
                return sums.array()
            return self.device.upload(sums.to_host())


class PlacedRows:
    """Implements batch.Hidden: all or some rows of an array."""

    is_on_device = True

    def __init__(
        self,
        mover: PayloadMover,
        array: DeviceArray,
        *,
        whole: PlacedRows | None = None,
        indices: I32Array | None = None,
        mark: Mark | None = None,
    ) -> None:
        """They are complete at `mark`; by default after all launches so far."""
        self.mover = mover
        self.mark = mover.device.mark() if mark is None else mark
        self._array = array
        self._whole = whole
        self._indices = indices
        self._on_host: F32Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        num_rows = self._array.shape[0] if self._indices is None else self._indices.size
        return num_rows, self._array.shape[1]

    def to_host(self) -> F32Array:
        """Downloads all rows of the array at the first call."""
        if self._on_host is None:
            if self._whole is not None and self._indices is not None:
                self._on_host = self._whole.to_host()[self._indices]
            else:
                with self.mover.lock:
                    self._on_host = self.mover.device.download(self._array)
        return self._on_host

    def chosen(self, rows: SomeRows) -> PlacedRows:
        if self._indices is None and isinstance(rows, slice):
            return PlacedRows(self.mover, self._array[rows], mark=self.mark)
        indices = self._indices
        if indices is None:
            indices = np.arange(self._array.shape[0], dtype=np.int32)
        indices = indices[rows]
        whole = self._whole or self
        return PlacedRows(self.mover, self._array, whole=whole, indices=indices, mark=self.mark)

    def new_sums(self) -> PlacedSums:
        return PlacedSums(self.mover, self.shape)

    def array(self) -> DeviceArray:
        """The rows as one array, read only. Call with the mover's lock held."""
        if self._indices is None:
            return self._array
        gathered = self.mover.device.empty(self.shape, np.float32)
        rows = self.mover.indices.put(self._indices)
        self.mover.kernels.move(
            address(self._array), address(gathered), self.shape, itemsize=4, rows=rows
        )
        return gathered

    @property
    def chosen_rows(self) -> tuple[DeviceArray, I32Array | None]:
        """The array and the indices of the rows in it; None: all. Shapes: [N, H], [T] int32."""
        return self._array, self._indices


class PlacedSums:
    """Implements batch.Sums; the array is made when something is added."""

    is_on_device = True

    def __init__(
        self, mover: PayloadMover, shape: tuple[int, ...], array: DeviceArray | None = None
    ) -> None:
        self.mover = mover
        self._shape = shape
        self._array = array

    @property
    def shape(self) -> tuple[int, int]:
        num_rows, columns = self._shape
        return num_rows, columns

    def add(self, sums: Sums, rows: SomeRows | None = None) -> None:
        """If the first sums added have all rows, their array is taken over."""
        mover = self.mover
        with mover.lock:
            more = mover.array_of_sums(sums)
            if rows is None:
                if self._array is None and more.shape == self._shape:
                    self._array = more
                    return
                rows = slice(None)
            if isinstance(rows, slice):
                mover.kernels.add_to_rows(self.array()[rows], more)
            else:
                mover.kernels.add_to_rows(self.array(), more, mover.indices.put(rows))

    def add_computed(self, hidden: Hidden, rows: I32Array | None, compute: HostCompute) -> None:
        mover = self.mover
        if not isinstance(hidden, PlacedRows) or hidden.mover is not mover:
            hidden = mover.rows(mover.array_of(hidden))
        with mover.lock:
            lent = mover.host_rows.lend(*hidden.chosen_rows, hidden.mark)
        compute(HostHidden(lent.hidden), lent.sums)
        with mover.lock:
            mover.host_rows.add_sums(lent, self.array(), rows)

    def to_host(self) -> F64Array:
        with self.mover.lock:
            sums: F64Array = self.mover.device.download(self.array())
        return sums

    def array(self) -> DeviceArray:
        """The sums. Call with the mover's lock held. Shapes: result [T, H] float64."""
        if self._array is None:
            self._array = self.mover.device.zeros(self._shape, np.float64)
        return self._array


class ReservedSums:
    """Implements device_payload.ExpectedSums: an array unused since `mark`."""

    def __init__(self, mover: PayloadMover, shape: tuple[int, int]) -> None:
        self.array = mover.device.empty(shape, np.float64)
        self.mark = mover.device.mark()
        self.sums = mover.sums(self.array)


class SlotRows:
    """Implements device_payload.ReadRows: rows in a window, copied to the device when needed."""

    is_on_device = True

    def __init__(self, window: SegmentWindow, offset: int, shape: tuple[int, int]) -> None:
        self.mover = window.mover
        self.shape = shape
        self._window = window
        self._offset = offset
        self._array: DeviceArray | None = None
        self._digest: int | None = None

    def to_host(self) -> F32Array:
        with self.mover.lock:
            rows: F32Array = self.mover.device.download(self.array())
        return rows

    def chosen(self, rows: SomeRows) -> PlacedRows:
        with self.mover.lock:
            return PlacedRows(self.mover, self.array()).chosen(rows)

    def new_sums(self) -> PlacedSums:
        return PlacedSums(self.mover, self.shape)

    def array(self) -> DeviceArray:
        """The rows, copied at the first call. Call with the mover's lock held."""
        if self._array is None:
            self._array = self._window.read(self, self._offset)
        return self._array

    def digest(self) -> int:
        with self.mover.lock:
            self.array()
            if self._digest is None:
                self._window.settle()
        assert self._digest is not None
        return self._digest

    def abandon(self) -> None:
        with self.mover.lock:
            if self._array is not None and self._digest is None:
                self._window.settle()

    def settle(self, digest: int) -> None:
        """Set the digest of the rows read."""
        self._digest = digest


class SegmentWindow:
    """Implements device_payload.DeviceWindow.

    Owns: the mapping, and a page of the host for digests.
    """

    def __init__(self, mover: PayloadMover, address: int, num_bytes: int) -> None:
        device = mover.device
        self.mover = mover
        # Not a view of the caller's object, which must stay closable.
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            mapping = device.map_host(memory)
            undo.callback(mapping.close)
            places = (mover.kernels.max_blocks,)
            block = MappedBlock(
                device, [(places, np.int64), (places, np.int64), (places, np.uint32)]
            )
            undo.callback(block.close)
            self._undo = undo.pop_all()
        self._base = mapping.device_address
        self._shares, self._read_shares, not_finite = (
            Shares(host, array.data.ptr)
            for host, array in zip(block.host, block.device, strict=True)
        )
        self._reading: tuple[SlotRows, int] | None = None
        """The last read, if its digest was not fetched yet, and its number of blocks."""
        self._out = DmaCopies(mover.kernels, "out", self._shares)
        self._in = DmaCopies(mover.kernels, "in", self._read_shares, not_finite=not_finite)
        self._places: DeviceArray | None = None
        """Indices of rows that are gathered while they are sent."""

    def device_address(self, offset: int) -> int:
        return self._at(offset)

    def write_rows(self, offset: int, rows: Hidden) -> StreamCopy:
        mover = self.mover
        with mover.lock:
            if not isinstance(rows, PlacedRows) or rows.mover is not mover:
                rows = mover.rows(mover.array_of(rows))
            target = self._at(offset)
            array, indices = rows.chosen_rows
            stream, places = self._out.stream, None
            self._out.hold(array, indices)
            if indices is not None and indices.size:
                places = self._places_for(indices.size)
                stream.write(places, indices)
            stream.wait_for(rows.mark)
            return self._out.begin(address(array), target, rows.shape, itemsize=4, rows=places)

    def read_rows(self, offset: int, shape: tuple[int, int]) -> SlotRows:
        return SlotRows(self, offset, shape)

    def write_sums(self, offset: int, sums: Sums) -> int:
        with self.mover.lock:
            source = self.mover.array_of_sums(sums)
            num_rows, columns = sums.shape
            shares = self._shares.device_address
            num_blocks = self.mover.kernels.move(
                address(source), self._at(offset), (num_rows, columns), itemsize=8, shares=shares
            )
            return self._arrived(num_blocks)

    def expect_sums(self, shape: tuple[int, int]) -> ReservedSums:
        with self.mover.lock:
            return ReservedSums(self.mover, shape)

    def read_sums(self, offset: int, expected: device_payload.ExpectedSums) -> StreamCopy:
        assert isinstance(expected, ReservedSums)
        with self.mover.lock:
            source, array = self._at(offset), expected.array
            self._in.hold(expected)
            self._in.stream.wait_for(expected.mark)
            return self._in.begin(source, address(array), expected.sums.shape, itemsize=8)

    def read(self, rows: SlotRows, offset: int) -> DeviceArray:
        """Begin to read rows. Shapes: result [T, H] float32."""
        self.settle()
        array = self.mover.device.empty(rows.shape, np.float32)
        shares = self._read_shares.device_address
        num_blocks = self.mover.kernels.move(
            self._at(offset), address(array), rows.shape, itemsize=4, shares=shares
        )
        self._reading = rows, num_blocks
        return array

    def settle(self) -> None:
        """Wait for the read under way, and set its digest."""
        if self._reading is not None:
            self.mover.device.synchronize(COPY_DEADLINE_S)
            self._settle()

    def close(self) -> None:
        with self.mover.lock:
            if self._base:
                self._base = 0
                device = self.mover.device
                with contextlib.suppress(DeviceUnavailable):  # nothing of it runs any more
                    self._out.settle()
                    self._in.settle()
                    device.synchronize(COPY_DEADLINE_S)
                self._places = None
                with contextlib.suppress(DeviceUnavailable):
                    self._undo.close()

    def _at(self, offset: int) -> int:
        """Raises: DeviceUnavailable if the window is closed."""
        if not self._base:
            raise DeviceUnavailable("the memory is not shared any more")
        return self._base + offset

    def _arrived(self, num_blocks: int) -> int:
        """Wait for all copies; returns the digest of the last one."""
        with self.mover.lock:
            self.mover.device.synchronize(COPY_DEADLINE_S)
            if self._reading is not None:
                self._settle()
            return int(self._shares.host[:num_blocks].sum())

    def _places_for(self, count: int) -> DeviceArray:
        """Memory used by the outgoing stream only. Shapes: result [count] int32."""
        if self._places is None or self._places.size < count:
            device = self.mover.device
            size = max(_FEWEST_PLACES, 1 << (count - 1).bit_length())
            self._out.hold(self._places)
            self._places = device.empty(size, np.int32)
            device.synchronize(COPY_DEADLINE_S)  # who had it before has done with it
        places: DeviceArray = self._places[:count]
        return places

    def _settle(self) -> None:
        assert self._reading is not None
        (rows, num_blocks), self._reading = self._reading, None
        rows.settle(int(self._read_shares.host[:num_blocks].sum()))
