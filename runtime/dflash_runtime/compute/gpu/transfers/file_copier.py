"""Copies bytes of mapped files to the device, with several threads, beside kernels.

Each thread fills one half of its own locked memory, with as many runs as there is room for, while
the device reads the other. Compiled code does all of it, without the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import I64Array, U8Array
from dflash_runtime.compute.cpu.kernels import copy_runs as k
from dflash_runtime.compute.gpu.device.device import (
    DeviceArray,
    KernelDevice,
    Mark,
    SideStream,
    address,
)
from dflash_runtime.compute.gpu.device.mapped_array import MappedBlock
from dflash_runtime.compute.gpu.transfers.locked_room import HALVES, PIECE_BYTES, default_threads

_MOST_OF_TRANSFER = 4
"""Threads of one transfer: two in flight keep a bus busy, and each thread that begins or ends a
transfer takes the interpreter's lock, for which launches then wait."""
_TIMEOUT_S = 120.0
"""Longest wait for a transfer: its bytes may have to come from a slow disk."""


@dataclass(frozen=True, slots=True, eq=False)
class FileRuns:
    """Runs of mapped files, of any length, and where each is to be copied.

    Shapes: table [N, 3], columns of copy_runs. Neighbours on the device should follow each other.
    """

    table: I64Array
    held: object
    """What keeps the memory at both ends."""

    @classmethod
    def of(cls, runs: Iterable[tuple[U8Array, DeviceArray]]) -> FileRuns:
        """Sources and destinations. Shapes: both of a run [bytes] uint8."""
        runs = [(source, destination) for source, destination in runs if source.size]
        rows = [(each.ctypes.data, address(destination), each.size) for each, destination in runs]
        return cls(np.array(rows, np.int64).reshape(-1, 3), runs)

    def chosen(self, runs: npt.NDArray[np.bool_]) -> FileRuns:
        """Some of them. Shapes: runs [N]."""
        return FileRuns(self.table[runs], self.held)


@dataclass(slots=True, eq=False)
class _Lane:
    """A thread's stream and locked memory."""

    stream: SideStream
    block: MappedBlock

    def copy(self, transfer: Transfer) -> None:
        """Copy pieces of a transfer until none is left, to their end. Raises: DeviceUnavailable."""
        staged: U8Array = self.block.host[0]
        if transfer.after is not None:
            self.stream.wait_for(transfer.after)
        lane = *self.stream.functions, staged.ctypes.data, staged.size // HALVES
        table, words = transfer.runs.table, transfer.words
        status = k.copy_runs()(table, words.ctypes.data, np.array(lane, np.int64))
        if status:
            self.stream.synchronize()  # raises the driver's error, if it is not of this call alone
            raise DeviceUnavailable(f"a copy to the device has failed (error {status})")

    def close(self) -> None:
        self.stream.close()
        self.block.close()


@dataclass(slots=True, eq=False)
class Transfer:
    """Runs being copied."""

    runs: FileRuns
    words: I64Array
    """See copy_runs."""
    after: Mark | None = None
    threads: list[Future[None]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return int(self.words[k.TOTAL_BYTES])

    @property
    def has_ended(self) -> bool:
        """Whether nothing is being copied any more."""
        return all(each.done() for each in self.threads)

    def wait(self) -> None:
        """Wait until all pieces that were not cancelled have arrived. Raises: DeviceUnavailable."""
        threads = [each for each in self.threads if not each.cancelled()]
        _, left = wait_for(threads, timeout=_TIMEOUT_S)
        if left:
            self.cancel()
            raise DeviceUnavailable(
                f"{self.num_bytes} bytes of the model file have not come within {_TIMEOUT_S:.0f} s"
            )
        for each in threads:
            each.result()

    def cancel(self) -> None:
        """Drop pieces that are not begun; returns when none is being copied."""
        self.words[k.NEXT] = k.NO_MORE
        wait_for([each for each in self.threads if not each.cancel()])


class FileCopier:
    """Runs transfers in the order of `begin`. Used by one thread.

    Owns: threads, streams and locked memory, until it is closed.
    """

    def __init__(
        self,
        device: KernelDevice,
        *,
        num_threads: int | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """`num_threads`: None: as many as the cores that this process may use, up to eight.

        Raises: DeviceUnavailable if memory cannot be locked.
        """
        if num_threads is None:
            num_threads = default_threads()
        k.copy_runs()  # compiled now rather than by a thread
        self._piece_bytes = piece_bytes
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        self._num_threads = num_threads
        with contextlib.ExitStack() as undo:
            for _ in range(num_threads):
                block = MappedBlock(device, [((HALVES * piece_bytes,), np.uint8)])
                undo.callback(block.close)
                stream = device.new_stream()
                undo.callback(stream.close)
                self._lanes.put(_Lane(stream, block))
            self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="dflash-copy")
            undo.callback(self._threads.shutdown)
            self._undo = undo.pop_all()

    def begin(self, runs: FileRuns, *, after: Mark | None = None) -> Transfer:
        """Begin to copy; the device writes nothing before the mark."""
        num_bytes = int(runs.table[:, k.SIZE].sum())
        transfer = Transfer(runs, np.array((0, num_bytes), np.int64), after)
        num_threads = min(_MOST_OF_TRANSFER, self._num_threads)
        for _ in range(min(num_threads, -(-num_bytes // self._piece_bytes))):
            transfer.threads.append(self._threads.submit(self._run, transfer))
        return transfer

    def close(self) -> None:
        """Wait for copies under way and end the threads. Idempotent."""
        self._undo.close()

    def _run(self, transfer: Transfer) -> None:
        """Run one thread of a transfer."""
        lane = self._lanes.get_nowait()  # there are as many as threads
        try:
            lane.copy(transfer)
        finally:
            self._lanes.put(lane)
