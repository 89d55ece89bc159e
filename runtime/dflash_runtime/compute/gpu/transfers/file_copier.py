"""Copies bytes of mapped files to the device, with several threads, beside kernels.

Each thread fills one half of its own locked memory, with as many runs as there is room for, while
the device reads the other, from transfer to transfer. Compiled code does all of it, without the
interpreter's lock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import I64Array, U8Array
from dflash_runtime.compute.cpu.kernels import copy_runs as k
from dflash_runtime.compute.cpu.run_reader import RunReader
from dflash_runtime.compute.expert_arena import ExpertArena
from dflash_runtime.compute.gpu.device.device import (
    DeviceArray,
    KernelDevice,
    Mark,
    SideStream,
    address,
)
from dflash_runtime.compute.gpu.device.mapped_array import MappedBlock
from dflash_runtime.compute.gpu.transfers.locked_room import HALVES, PIECE_BYTES, default_threads
from dflash_runtime.interrupts import uninterrupted

_TIMEOUT_S = 120.0
"""Longest wait for a transfer: its bytes may have to come from a slow disk."""
_SLICE_S = 0.02
"""Of a wait, after which the interpreter can be interrupted."""


@dataclass(frozen=True, slots=True, eq=False)
class FileRuns:
    """Runs of mapped files, of any length, and where each is to be copied.

    Shapes: table [N, COLUMNS], columns of copy_runs. Neighbours on the device should follow each
    other.
    """

    table: I64Array
    held: object
    """What keeps the memory at both ends."""

    @classmethod
    def of(cls, runs: Iterable[tuple[U8Array, DeviceArray]]) -> FileRuns:
        """Sources and destinations. Shapes: both of a run [bytes] uint8."""
        return cls.lent((source, destination, (0, 0)) for source, destination in runs)

    @classmethod
    def lent(
        cls, runs: Iterable[tuple[U8Array, DeviceArray, tuple[int, int]]], held: object = None
    ) -> FileRuns:
        """The same, each with words and number of a matrix that comes from an arena (lent_runs), or
        zeros. `held`: what keeps these words."""
        runs = [each for each in runs if each[0].size]
        rows = [
            (source.ctypes.data, address(destination), source.size, *matrix)
            for source, destination, matrix in runs
        ]
        return cls(np.array(rows, np.int64).reshape(-1, k.COLUMNS), (runs, held))

    def chosen(self, runs: npt.NDArray[np.bool_]) -> FileRuns:
        """Some of each M in turns. Shapes: runs [M], where M divides N."""
        columns = self.table.shape[1]
        some = self.table.reshape(-1, runs.size, columns)[:, runs]
        return FileRuns(some.reshape(-1, columns), self.held)


@dataclass(slots=True, eq=False)
class Transfer:
    """Runs being copied; one that was not begun has ended."""

    runs: FileRuns
    words: I64Array
    """See copy_runs."""
    after: Mark | None = None
    errors: list[DeviceUnavailable] = field(default_factory=list)
    """Of threads."""

    @property
    def num_bytes(self) -> int:
        return int(self.words[k.TOTAL_BYTES])

    @property
    def has_ended(self) -> bool:
        """Whether nothing is being copied any more."""
        return self._has_ended(0.0)

    def wait(self) -> None:
        """Wait until all pieces that were not cancelled have arrived. Raises: DeviceUnavailable."""
        if not self._has_ended(_TIMEOUT_S):
            self.cancel()
            raise self._late()
        if self.errors:
            raise self.errors[0]

    def cancel(self) -> None:
        """Drop pieces that are not begun; returns when none is being copied.

        Raises: DeviceUnavailable if some do not end: their memory must not be used again.
        """
        self.words[k.NEXT] = k.NO_MORE
        if not self._has_ended(_TIMEOUT_S):
            raise self._late()

    def _late(self) -> DeviceUnavailable:
        return DeviceUnavailable(
            f"{self.num_bytes} bytes of the model file have not come within {_TIMEOUT_S:.0f} s"
        )

    def _has_ended(self, limit_s: float) -> bool:
        end_s = time.monotonic() + limit_s
        while True:
            slice_s = min(_SLICE_S, max(0.0, end_s - time.monotonic()))
            if k.has_ended()(self.words.ctypes.data, int(1e9 * slice_s)):
                return True
            if time.monotonic() >= end_s:
                return False


class FileCopier:
    """Runs transfers in the order of `begin`. Used by one thread.

    Experts that an arena lends come from its memory, or past the page cache; it must be closed
    before the arena is.
    Owns: threads, streams, locked memory and readers, until it is closed.
    """

    def __init__(
        self,
        device: KernelDevice,
        *,
        num_threads: int | None = None,
        piece_bytes: int = PIECE_BYTES,
        arena: ExpertArena | None = None,
    ) -> None:
        """`num_threads`: None: see `default_threads`.

        Raises: DeviceUnavailable if memory cannot be locked.
        """
        if num_threads is None:
            num_threads = default_threads()
        k.compile_all()
        self.num_bytes = 0
        """Of all transfers so far."""
        self.arena = arena
        """Whose experts it can copy."""
        self._piece_bytes = piece_bytes
        self._queue = np.zeros(k.FIRST + k.MOST_POSTED, np.int64)
        self._posted: list[Transfer | None] = [None] * k.MOST_POSTED
        """The transfers that threads may still look at."""
        self._lanes = np.zeros((num_threads, k.LANE_WORDS), np.int64)
        self._addresses = self._queue.ctypes.data, self._lanes.ctypes.data
        self._streams: Sequence[SideStream] = []
        with contextlib.ExitStack() as undo:
            self._streams = [self._opened(device, lane, undo) for lane in self._lanes]
            self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="dflash-copy")
            undo.callback(self._end)
            self._undo = undo.pop_all()

    def begin(
        self,
        runs: FileRuns,
        *,
        after: Mark | None = None,
        into: list[Transfer] | None = None,
    ) -> Transfer:
        """Begin to copy; the device writes nothing before the mark. The transfer is appended to
        `into` first, which so has every transfer that was begun, whatever interrupts this.

        Raises: DeviceUnavailable if earlier transfers do not end.
        """
        words = np.zeros(k.TRANSFER_WORDS, np.int64)
        words[k.RUNS], words[k.PIECE_BYTES] = runs.table.ctypes.data, self._piece_bytes
        words[k.TOTAL_BYTES] = runs.table[:, k.SIZE].sum()
        words[k.EVENT] = 0 if after is None else after.handle
        words[k.NEXT] = k.NO_MORE
        transfer = Transfer(runs, words, after)
        if into is not None:
            into.append(transfer)
        try:
            self._post(transfer)
        except BaseException:  # threads that should copy it may be asleep
            words[k.NEXT] = k.NO_MORE
            raise
        return transfer

    def _post(self, transfer: Transfer) -> None:
        self.num_bytes += transfer.num_bytes
        (queue, lanes), num_lanes = self._addresses, len(self._lanes)
        self._posted[self._next_place()] = transfer
        asleep = k.post()(queue, transfer.words.ctypes.data, lanes, num_lanes)
        if asleep:  # rarely: threads wait in compiled code for a while
            with uninterrupted():  # a thread that is awake is started
                started = k.start()(queue, lanes, asleep)
                for index in range(num_lanes):
                    if started >> index & 1:
                        self._threads.submit(self._run, index)

    def close(self) -> None:
        """Wait for copies under way and end the threads. Idempotent."""
        self._undo.close()
        self._posted[:] = [None] * k.MOST_POSTED  # they hold what was copied to

    def _opened(
        self, device: KernelDevice, lane: I64Array, undo: contextlib.ExitStack
    ) -> SideStream:
        """The stream of a thread, whose words are filled in."""
        block = MappedBlock(device, [((HALVES * self._piece_bytes,), np.uint8)])
        undo.callback(block.close)
        stream = device.new_stream()
        undo.callback(stream.close)
        lane[[k.COPY, k.SYNCHRONIZE, k.WAIT_FOR, k.STREAM]] = stream.functions
        staged: U8Array = block.host[0]
        lane[k.STAGED] = staged.ctypes.data
        if self.arena is not None:
            reader = RunReader(self.arena)
            undo.callback(reader.close)
            lane[k.READER] = reader.words.ctypes.data
        return stream

    def _next_place(self) -> int:
        """The next transfer's place among the posted ones. Waits until no thread that is awake is
        so far behind that it could look for the one that was there."""
        (_, lanes), head = self._addresses, int(self._queue[k.HEAD])
        end_s = time.monotonic() + _TIMEOUT_S
        while k.is_behind()(lanes, len(self._lanes), head - k.MOST_POSTED):
            if time.monotonic() > end_s:
                raise DeviceUnavailable(f"copies have not ended within {_TIMEOUT_S:.0f} s")
            time.sleep(1e-3)
        return head % k.MOST_POSTED

    def _run(self, index: int) -> None:
        """Run one thread until it sleeps."""
        stream = self._streams[index]
        lane: I64Array = self._lanes[index]
        _ = stream.functions  # makes the device this thread's
        addresses = self._queue.ctypes.data, lane.ctypes.data
        while status := k.serve()(*addresses):
            failure = DeviceUnavailable(f"a copy to the device has failed (error {status})")
            try:
                stream.synchronize()  # raises the driver's error, if it is not of this call alone
            except DeviceUnavailable as error:
                failure = error
            except Exception as error:  # or all transfers from here on would never end
                failure.__cause__ = error
            at = set(lane[[k.CURRENT, k.PENDING]].tolist())
            for transfer in self._posted:
                if transfer is not None and transfer.words.ctypes.data in at:
                    transfer.errors.append(failure)
            k.fail()(lane.ctypes.data)

    def _end(self) -> None:
        self._queue[k.IS_CLOSED] = 1
        self._threads.shutdown()
