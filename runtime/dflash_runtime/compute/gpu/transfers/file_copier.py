"""Copies bytes of mapped files to the device, with several threads, beside kernels.

Each thread fills one half of its own locked memory while the device reads the other. Copying,
waiting and reading from the disk release the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field

import numpy as np

from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import U8Array
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice, SideStream
from dflash_runtime.compute.gpu.device.mapped_array import MappedBlock

_MOST_THREADS = 8
"""Enough to saturate PCIe 5; each costs 16 MiB of locked memory."""
PIECE_BYTES = 8 << 20
"""Bytes that a thread copies at once; with fewer the interpreter's lock, taken in between, is the
bottleneck."""
_HALVES = 2
_TIMEOUT_S = 120.0
"""Longest wait for a transfer: its bytes may have to come from a slow disk."""


def _default_threads() -> int:
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def locked_bytes() -> int:
    """Locked memory of a FileCopier with as many threads as it has by default."""
    return _default_threads() * _HALVES * PIECE_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class FilePiece:
    """Bytes of a file, and their destination. Shapes: both [bytes] uint8."""

    source: U8Array
    destination: DeviceArray


@dataclass(slots=True, eq=False)
class _Lane:
    """A thread's stream and locked memory."""

    stream: SideStream
    block: MappedBlock
    half: int = 0
    """The half to be filled next."""

    def copy(self, piece: FilePiece) -> None:
        """Begin to copy a piece; the copy before it has ended when this returns."""
        staged = self.block.host[self.half][: piece.source.size]
        np.copyto(staged, piece.source)
        self.stream.synchronize()  # of the other half, which is filled next
        self.stream.write(piece.destination, staged)
        self.half = 1 - self.half

    def close(self) -> None:
        self.stream.close()
        self.block.close()


@dataclass(slots=True, eq=False)
class Transfer:
    """Pieces being copied."""

    pieces: list[FilePiece]
    num_bytes: int
    counter: itertools.count[int] = field(default_factory=itertools.count)
    runs: list[Future[None]] = field(default_factory=list)
    is_cancelled: bool = False
    begun_s: float = float("inf")
    ended_s: float = 0.0

    def bytes_per_s(self, free_from_s: float = 0.0) -> float:
        """Rate, once it has ended: from its first byte, or from `free_from_s`, when earlier
        transfers that shared the threads had ended, to its last."""
        return self.num_bytes / max(self.ended_s - max(self.begun_s, free_from_s), 1e-7)

    def wait(self) -> None:
        """Wait until all pieces that were not cancelled have arrived. Raises: DeviceUnavailable."""
        runs = [run for run in self.runs if not run.cancelled()]
        _, left = wait_for(runs, timeout=_TIMEOUT_S)
        if left:
            self.cancel()
            raise DeviceUnavailable(
                f"{self.num_bytes} bytes of the model file have not come within {_TIMEOUT_S:.0f} s"
            )
        for run in runs:
            run.result()

    def cancel(self) -> None:
        """Drop pieces that are not begun; returns when none is being copied."""
        self.is_cancelled = True
        wait_for([run for run in self.runs if not run.cancel()])


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
            num_threads = _default_threads()
        self._piece_bytes = piece_bytes
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        self._num_threads = num_threads
        self._times = threading.Lock()
        with contextlib.ExitStack() as undo:
            for _ in range(num_threads):
                block = MappedBlock(device, [((piece_bytes,), np.uint8)] * _HALVES)
                undo.callback(block.close)
                stream = device.new_stream()
                undo.callback(stream.close)
                self._lanes.put(_Lane(stream, block))
            self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="dflash-copy")
            undo.callback(self._threads.shutdown)
            self._undo = undo.pop_all()

    def begin(self, runs: Iterable[FilePiece]) -> Transfer:
        """Begin to copy runs of any length; their arrays must exist until the transfer ends."""
        at_once = self._piece_bytes
        pieces = [
            FilePiece(
                each.source[first : first + at_once], each.destination[first : first + at_once]
            )
            for each in runs
            for first in range(0, each.source.size, at_once)
        ]
        transfer = Transfer(pieces, sum(each.source.size for each in pieces))
        for _ in range(min(self._num_threads, len(pieces))):
            transfer.runs.append(self._threads.submit(self._run, transfer))
        return transfer

    def close(self) -> None:
        """Wait for copies under way and end the threads. Idempotent."""
        self._undo.close()

    def _run(self, transfer: Transfer) -> None:
        """Run one thread of a transfer: it takes the next piece until none is left."""
        lane = self._lanes.get_nowait()  # there are as many as threads
        begun_s = time.perf_counter()
        try:
            for index in transfer.counter:
                if index >= len(transfer.pieces) or transfer.is_cancelled:
                    break
                lane.copy(transfer.pieces[index])
        finally:
            try:
                lane.stream.synchronize()
            finally:
                self._lanes.put(lane)
                ended_s = time.perf_counter()
                with self._times:
                    transfer.begun_s = min(transfer.begun_s, begun_s)
                    transfer.ended_s = max(transfer.ended_s, ended_s)
