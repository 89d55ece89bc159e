"""Rows of a chunk for owners that compute on the host, the sums that they give back, indices of
rows, and what a chunk's tokens chose, in mapped memory: the device writes and reads them there, and
only the rows that are used.

All calls are made with the mover's lock held.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import numpy as np

from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import F32Array, F64Array, I32Array, I64Array
from dflash_runtime.compute.gpu.device.device import (
    DeviceArray,
    KernelDevice,
    Mark,
    SideStream,
    address,
)
from dflash_runtime.compute.gpu.device.mapped_array import MappedBlock, first_rows
from dflash_runtime.compute.gpu.transfers.payload_kernels import COPY_DEADLINE_S, PayloadKernels

_NUM_SLOTS = 8
"""More indices than are in use at a time, so that usually none is waited for."""
_FEWEST_INDICES = 1024
_STREAM = "host rows"
_NO_WEIGHTS: F32Array = np.zeros((0, 0), np.float32)


def wait_for_mark(device: KernelDevice, mark: Mark | None) -> None:
    """Wait until all launches before the mark have ended; not for later ones.

    Raises: DeviceUnavailable.
    """
    if mark is not None:
        stream = device.side_stream(_STREAM)
        stream.wait_for(mark)
        stream.synchronize(COPY_DEADLINE_S)


class RowIndices:
    """Indices of rows for kernels of the main stream, which read them where the host has written
    them. A slot is written again when all launches that may read it have ended.

    Owns: mapped memory, until `close`.
    """

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._block: MappedBlock | None = None
        self._marks: list[Mark | None] = [None] * _NUM_SLOTS
        self._next = 0

    def put(self, indices: I32Array) -> DeviceArray:
        """Use the result before the next call. Shapes: both [T] int32."""
        block = self._block
        if block is None or block.host[0].size < indices.size:
            size = max(_FEWEST_INDICES, 1 << indices.size.bit_length())
            self.close()
            block = self._block = MappedBlock(self._device, [((size,), np.int32)] * _NUM_SLOTS)
        slot, before = self._next, self._next - 1
        self._marks[before] = self._device.mark()
        wait_for_mark(self._device, self._marks[slot])
        self._next = (slot + 1) % _NUM_SLOTS
        block.host[slot][: indices.size] = indices
        place: DeviceArray = first_rows(block.device[slot], indices.size)
        return place

    def close(self) -> None:
        """Wait for all launches and unmap it. It can be used again."""
        if self._block is not None:
            with suppress(DeviceUnavailable):  # a failed device writes nothing any more
                self._device.synchronize(COPY_DEADLINE_S)
            self._block.close()
            self._block = None


class PendingChoice:
    """What a chunk's tokens chose, on its way to the host."""

    __slots__ = ("__weakref__", "_counts", "_found", "_num_experts", "_place", "_shape")

    def __init__(self, place: _ChoicePlace, shape: tuple[int, ...], *, num_experts: int) -> None:
        self._place, self._shape, self._num_experts = place, shape, num_experts
        self._found: tuple[I32Array, F32Array] | None = None
        self._counts: I64Array | None = None
        place.user = weakref.ref(self)

    @property
    def num_tokens(self) -> int:
        return self._shape[0]

    def wait(self) -> tuple[I32Array, F32Array]:
        """The ids and weights, in memory of their own; no weights if they were not asked for.
        Shapes: both [T, K].

        Raises: DeviceUnavailable.
        """
        if self._found is None:
            place, shape = self._place, self._shape
            place.stream.synchronize(COPY_DEADLINE_S)
            host_ids, host_weights = place.block.host
            ids, weights = host_ids[: prod(shape)].reshape(shape).copy(), _NO_WEIGHTS
            if len(place.sources) > 1:
                weights = host_weights[: prod(shape)].reshape(shape).copy()
            self._found, place.user, place.sources = (ids, weights), None, ()
        return self._found

    def counts(self) -> I64Array:
        """Of how many tokens each of the layer's experts was chosen; waits as `wait`. Shapes: [E].

        Raises: DeviceUnavailable.
        """
        if self._counts is None:
            ids, _ = self.wait()
            self._counts = np.bincount(ids.reshape(-1), minlength=self._num_experts)
        return self._counts


@dataclass(slots=True, eq=False)
class _ChoicePlace:
    """Memory for one choice, and the stream that writes it."""

    block: MappedBlock
    stream: SideStream
    user: weakref.ref[PendingChoice] | None = None
    sources: tuple[DeviceArray, ...] = ()
    """What the stream may be reading, also for a choice that was dropped."""

    @property
    def is_free(self) -> bool:
        return self.user is None or self.user() is None


class HostChoices:
    """Brings what tokens of chunks chose to the host; waits for nothing that is launched meanwhile,
    but where a choice was dropped. A place is used again when its PendingChoice was awaited or
    dropped.

    Owns: mapped memory, until `close`.
    """

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._places: list[_ChoicePlace] = []

    def begin(
        self, ids: DeviceArray, weights: DeviceArray | None, *, num_experts: int
    ) -> PendingChoice:
        """Begin to bring them, complete after all launches so far. `weights`: None: they are not
        needed. `num_experts`: of the layer.

        Shapes: ids [T, K] int32; weights [T, K] float32.
        """
        place = self._free_place(ids.size)
        place.sources = (ids,) if weights is None else (ids, weights)
        place.stream.wait_for(self._device.mark())
        for array, source in zip(place.block.host, place.sources, strict=False):
            place.stream.read(array[: ids.size], source)
        return PendingChoice(place, ids.shape, num_experts=num_experts)

    def close(self) -> None:
        """Wait for what was begun and unmap the memory. It can be used again."""
        for place in self._places:
            self._unmap(place)
        self._places.clear()

    def _free_place(self, size: int) -> _ChoicePlace:
        """One with room, whose memory may be new."""
        for place in self._places:
            if place.is_free:
                if place.sources:  # of a choice that was dropped
                    place.stream.synchronize(COPY_DEADLINE_S)
                    place.sources = ()
                if place.block.host[0].size < size:
                    larger = self._mapped(size)
                    self._unmap(place)
                    place.block = larger
                return place
        stream = self._device.side_stream(f"choice {len(self._places)}")
        self._places.append(_ChoicePlace(self._mapped(size), stream))
        return self._places[-1]

    def _mapped(self, size: int) -> MappedBlock:
        return MappedBlock(self._device, [((size,), np.int32), ((size,), np.float32)])

    def _unmap(self, place: _ChoicePlace) -> None:
        with suppress(DeviceUnavailable):  # a failed device writes nothing any more
            place.stream.synchronize(COPY_DEADLINE_S)
        place.block.close()


@dataclass(frozen=True, slots=True, eq=False)
class LentRows:
    """Rows on the host, and zeros for their sums. Shapes: [T, H] float32; [T, H] float64."""

    hidden: F32Array
    sums: F64Array


class HostRows:
    """Brings rows of a chunk to the host, and sums back. Owns: mapped memory, until `close`."""

    def __init__(self, kernels: PayloadKernels, indices: RowIndices) -> None:
        self._kernels, self._device = kernels, kernels.device
        self._indices = indices
        self._block: MappedBlock | None = None
        self._read: Mark | None = None
        """Reached when the last sums have been read, and are zero again."""
        self._num_written = 0
        """Rows of sums that may not be zero, as they were not added."""

    def lend(self, array: DeviceArray, indices: I32Array | None, mark: Mark) -> LentRows:
        """Bring rows of an array, complete at `mark`, to the host: those of the indices, or all.
        They are there until the next call. It does not wait for what was launched after the mark.

        Shapes: array [N, H] float32; indices [T]. Raises: DeviceUnavailable.
        """
        whole, columns = array.shape
        num_rows = whole if indices is None else indices.size
        wait_for_mark(self._device, self._read)
        block = self._reserved(whole, columns)
        (rows, sums), stream = block.host, self._device.side_stream(_STREAM)
        try:
            stream.wait_for(mark)
            self._kernels.move(
                address(array),
                address(block.device[0]),
                (num_rows, columns),
                itemsize=4,
                rows=None if indices is None else self._indices.put(indices),
                side=stream,
            )
            sums[: self._num_written] = 0.0
            self._num_written = num_rows
            stream.synchronize(COPY_DEADLINE_S)
        except BaseException:
            with suppress(DeviceUnavailable):  # the array may be freed now
                stream.synchronize(COPY_DEADLINE_S)
            raise
        return LentRows(rows[:num_rows], sums[:num_rows])

    def add_sums(self, lent: LentRows, out: DeviceArray, rows: I32Array | None) -> None:
        """Add what the host has written to `lent.sums` to these rows of `out`, or to all, and clear
        it there. Nothing is waited for. Shapes: out [N, H] float64; rows [T], distinct."""
        assert self._block is not None
        sums = first_rows(self._block.device[1], lent.sums.shape[0])
        places = None if rows is None else self._indices.put(rows)
        self._kernels.add_to_rows(out, sums, places, clears=True)
        self._read, self._num_written = self._device.mark(), 0

    def close(self) -> None:
        """Wait for all launches and unmap it. It can be used again."""
        if self._block is not None:
            with suppress(DeviceUnavailable):  # a failed device writes nothing any more
                self._device.synchronize(COPY_DEADLINE_S)
            self._block.close()
            self._block = self._read = None

    def _reserved(self, num_rows: int, columns: int) -> MappedBlock:
        """Memory for the largest chunk yet."""
        block = self._block
        if block is None or block.host[0].shape[0] < num_rows or block.host[0].shape[1] != columns:
            self.close()
            shape = num_rows, columns
            block = self._block = MappedBlock(
                self._device, [(shape, np.float32), (shape, np.float64)]
            )
            self._num_written = 0
        return block
