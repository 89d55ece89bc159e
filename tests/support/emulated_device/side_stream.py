"""Side streams of the emulated device."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.device import DeviceArray, Graph, Grid, address

if TYPE_CHECKING:
    from support.emulated_device.emulated_device import EmulatedDevice


_COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
)
_SYNCHRONIZE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_WAIT_FOR = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)

_MARKS: WeakValueDictionary[int, EmulatedMark] = WeakValueDictionary()
"""By handle, those that are referred to."""
_HANDLES = itertools.count(1)


class EmulatedMark:
    """A position in the order of launches, which have all run at once."""

    def __init__(self) -> None:
        self.handle = next(_HANDLES)
        _MARKS[self.handle] = self


class EmulatedSideStream:
    """Implements SideStream. Work runs as late as the rules allow, when it is waited for: this
    reveals a missing wait, and memory that is freed too early."""

    def __init__(self, device: EmulatedDevice, *, copies_mapped: bool = False) -> None:
        self._device, self._copies_mapped = device, copies_mapped
        self._copy_function = _COPY(self._copied)
        self._synchronize_function = _SYNCHRONIZE(self._synchronized)
        self._wait_for_function = _WAIT_FOR(self._waits_for)
        self._failure: Exception | None = None
        """What compiled code was told as a status."""
        self._is_closed = False
        self._waiting: list[Callable[[], object]] = []
        self._was_asked = False
        self.num_runs = 0
        """Number of copies and launches that have run."""

    def wait_for(self, mark: Any) -> None:
        """As SideStream.wait_for."""
        assert isinstance(mark, EmulatedMark)

    def write(self, destination: DeviceArray, source: AnyArray) -> None:
        """As SideStream.write."""
        assert not self._is_closed
        assert source.flags.c_contiguous
        assert destination.nbytes == source.nbytes
        self.copy(address(destination), int(source.ctypes.data), source.nbytes)

    def copy(self, place: int, origin: int, num_bytes: int) -> None:
        """The same by address: the caller must keep both alive."""
        assert not self._is_closed
        if self._copies_mapped:
            self._device.require_mapped(origin, num_bytes)
        self._waiting.append(lambda: self._device.write_at(place, origin, num_bytes))

    @property
    def functions(self) -> tuple[int, int, int, int]:
        """As SideStream.functions."""
        copy, synchronize, wait_for = (
            ctypes.cast(each, ctypes.c_void_p).value or 0
            for each in (
                self._copy_function, self._synchronize_function, self._wait_for_function
            )
        )  # fmt: skip
        return copy, synchronize, wait_for, 0

    def _copied(self, place: int, origin: int, num_bytes: int, stream: int | None) -> int:
        return self._status_of(lambda: self.copy(place, origin, num_bytes))

    def _synchronized(self, stream: int | None) -> int:
        return self._status_of(self.synchronize)

    def _waits_for(self, stream: int | None, mark: int | None, flags: int) -> int:
        return self._status_of(lambda: self.wait_for(_MARKS[mark or 0]))

    def _status_of(self, run: Callable[[], None]) -> int:
        """0, or 1 if it fails: `synchronize` then raises why."""
        try:
            run()
        except Exception as error:  # nothing can be raised through compiled code
            self._failure = error
            return 1
        return 0

    def read(self, destination: AnyArray, source: DeviceArray) -> None:
        """As SideStream.read, into mapped memory only; the source is the caller's to keep."""
        assert not self._is_closed
        assert destination.flags.c_contiguous
        assert destination.nbytes == source.nbytes
        place, begin, num_bytes = int(destination.ctypes.data), address(source), source.nbytes
        self._device.require_mapped(place, num_bytes)

        def copy() -> None:
            self._device.require_mapped(begin, num_bytes)
            ctypes.memmove(place, begin, num_bytes)

        self._waiting.append(copy)

    def launch(self, kernel: Any, grid: Grid, block: int, args: ctypes.Structure) -> None:
        """As SideStream.launch."""
        assert not self._is_closed
        run = self._device.prepared(kernel, grid, block, args, overlaps_previous=False)
        self._waiting.append(run)

    def replay(self, graph: Graph) -> None:
        """As SideStream.replay: the thread that replays a graph runs it."""
        assert not self._is_closed
        self.synchronize()
        graph.replay()

    def is_empty(self) -> bool:
        """As SideStream.is_empty: False on the first call, True on the second."""
        has_been_asked, self._was_asked = self._was_asked, True
        if self._waiting and has_been_asked:
            self.synchronize()
        return not self._waiting

    def synchronize(self, deadline_s: float | None = None) -> None:
        """As SideStream.synchronize. Raises: KernelFailure."""
        assert deadline_s is None or deadline_s > 0
        self._was_asked = False
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        waiting, self._waiting = self._waiting, []
        for run in waiting:
            run()
            self.num_runs += 1

    def close(self) -> None:
        """As SideStream.close."""
        with contextlib.suppress(DeviceUnavailable):  # a failed device releases nothing
            self.synchronize()
        self._is_closed = True
