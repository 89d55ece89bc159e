"""Copies bytes of mapped files to the device with several threads, while nothing else is computed.

Each thread fills one half of its own locked memory, while the device reads the other. NumPy's
copies and the driver's calls release the interpreter's lock, so that no compiled code is needed: a
start waits for none. Beside kernels that Python launches, `FileCopier` copies without that lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np

from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import U8Array
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice, Mark, SideStream
from dflash_runtime.compute.gpu.device.mapped_array import MappedBlock
from dflash_runtime.compute.gpu.transfers.locked_room import HALVES, PIECE_BYTES, default_threads
from dflash_runtime.interrupts import uninterrupted

_TIMEOUT_S = 120.0
"""Longest wait for a copy: its bytes may have to come from a slow disk."""


@dataclass(slots=True, eq=False)
class Copy:
    """Bytes on their way to the device."""

    num_bytes: int
    after: Mark
    """The device writes nothing before it is reached."""
    num_left: int
    """Pieces that have not arrived."""
    error: Exception | None = None
    """The first of a thread's; later pieces are dropped then."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    has_ended: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Wait until all of it is there, or no more will be.

        Raises: DeviceUnavailable, or whatever else a thread's copy has raised.
        """
        if not self.has_ended.wait(_TIMEOUT_S):
            raise DeviceUnavailable(
                f"{self.num_bytes} bytes of the model file have not come within {_TIMEOUT_S:.0f} s"
            )
        if self.error is not None:
            raise self.error

    def end_piece(self, error: Exception | None = None) -> None:
        """A piece has arrived, or never will."""
        with self.lock:
            self.error = self.error or error
            self.num_left -= 1
            if not self.num_left:
                self.has_ended.set()


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Bytes of host memory, one after the other, and where they go."""

    copy: Copy
    sources: Sequence[U8Array]
    destination: DeviceArray


class _Lane:
    """What one thread copies with; its methods raise nothing. Shapes: halves [2, piece_bytes]."""

    def __init__(self, stream: SideStream, halves: U8Array) -> None:
        self._stream, self._halves = stream, halves
        self._half = 0
        self._under_way: _Piece | None = None
        """What the device reads from the other half."""
        self._failure: Exception | None = None
        """Of the stream: the device may still read what it was to have read."""

    def copy(self, piece: _Piece) -> None:
        """Begin to copy a piece; the one before has arrived."""
        try:
            if piece.copy.error is not None:
                self.settle()
                piece.copy.end_piece()
                return
            if self._failure is not None:
                raise self._failure
            half: U8Array = self._halves[self._half]
            num_bytes = join(piece.sources, half)
            self.settle()
            if self._failure is not None:
                raise self._failure
            self._stream.wait_for(piece.copy.after)
            self._stream.write(piece.destination, half[:num_bytes])
        except Exception as error:  # it is raised by who waits
            piece.copy.end_piece(error)
            return
        self._under_way, self._half = piece, 1 - self._half

    def settle(self) -> None:
        """Wait until what is under way has arrived."""
        piece, error = self._under_way, None
        if piece is None:
            return
        try:
            self._stream.synchronize()
        except Exception as raised:
            self._failure = error = raised
        self._under_way = None
        piece.copy.end_piece(error)


class WeightCopier:
    """Runs copies in the order of `begin`. Used by one thread.

    Owns: threads, streams and locked memory, until it is closed.
    """

    def __init__(
        self,
        device: KernelDevice,
        *,
        num_threads: int | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """`num_threads`: None: see `default_threads`.

        Raises: DeviceUnavailable if memory cannot be locked.
        """
        if num_threads is None:
            num_threads = default_threads()
        self.num_bytes = 0
        """Of all copies so far."""
        self._piece_bytes = piece_bytes
        self._pieces: SimpleQueue[_Piece | None] = SimpleQueue()
        self._is_closed = False
        with contextlib.ExitStack() as undo:
            # One block for all threads: the driver may wait for the device with each that it frees.
            block = MappedBlock(device, [((num_threads, HALVES, piece_bytes), np.uint8)])
            undo.callback(block.close)
            lanes = []
            for halves in block.host[0]:
                stream = device.new_stream()
                undo.callback(stream.close)
                lanes.append(_Lane(stream, halves))
            self._threads = [
                threading.Thread(
                    target=self._run, args=(lane,), name=f"dflash-weights_{number}", daemon=True
                )
                for number, lane in enumerate(lanes)
            ]
            undo.callback(self._end)
            for thread in self._threads:
                thread.start()
            self._undo = undo.pop_all()

    def begin(self, sources: Sequence[U8Array], destination: DeviceArray, *, after: Mark) -> Copy:
        """Begin to copy these bytes, one array after the other. Sources must not change until the
        copy has ended.

        Shapes: sources each [bytes] uint8; destination [bytes of all] uint8.
        """
        num_bytes = sum(source.size for source in sources)
        num_pieces = -(-num_bytes // self._piece_bytes)
        copy = Copy(num_bytes, after, num_pieces)
        if not num_pieces:
            copy.has_ended.set()
        self.num_bytes += num_bytes
        first = 0
        for parts in cut(sources, self._piece_bytes):
            size = sum(part.size for part in parts)
            self._pieces.put(_Piece(copy, parts, destination[first : first + size]))
            first += size
        return copy

    def close(self) -> None:
        """End the threads, which drop what they have not begun; then nothing is being copied any
        more. Idempotent."""
        self._undo.close()

    def _run(self, lane: _Lane) -> None:
        """Copy pieces until the copier is closed."""
        while True:
            try:
                piece = self._pieces.get_nowait()
            except Empty:
                lane.settle()
                piece = self._pieces.get()
            if piece is None:
                lane.settle()
                return
            if self._is_closed:
                piece.copy.end_piece(DeviceUnavailable("copies of weights were given up"))
            else:
                lane.copy(piece)

    def _end(self) -> None:
        self._is_closed = True
        with uninterrupted():  # what they use is given back after this
            for _ in self._threads:
                self._pieces.put(None)
            for thread in self._threads:
                if thread.ident is not None:  # it was started
                    thread.join()


def join(sources: Iterable[U8Array], joined: U8Array) -> int:
    """Copy all sources, one after the other, without the interpreter's lock; their bytes."""
    end = 0
    for source in sources:
        np.copyto(joined[end : end + source.size], source)
        end += source.size
    return end


def cut(sources: Iterable[U8Array], size: int) -> Iterator[list[U8Array]]:
    """The bytes of all sources, in views of parts of `size`; the last one may be smaller."""
    parts: list[U8Array] = []
    num_free = size
    for source in sources:
        first = 0
        while first < source.size:
            part = source[first : first + num_free]
            parts.append(part)
            num_free -= part.size
            first += part.size
            if not num_free:
                yield parts
                parts, num_free = [], size
    if parts:
        yield parts
