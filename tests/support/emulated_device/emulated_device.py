"""A KernelDevice without a GPU: kernels compiled by g++, threads as fibers, numpy arrays.

It checks results, not speed, and is stricter than a GPU: guard bytes after each array are checked
after each launch, reads through load_* must lie inside one array, memory is poisoned, and a barrier
that not all threads reach is an error. `runs_backward` runs the last threads and blocks first,
which reveals missing barriers.
"""

from __future__ import annotations

import ctypes
import mmap
import operator
import secrets
import threading
import weakref
from array import array
from collections.abc import Callable, Iterable
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dflash_protocol.errors import DeviceOutOfMemory, DeviceUnavailable, SettingsError
from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.capabilities import Capabilities, Vendor
from dflash_runtime.compute.gpu.device.device import (
    DeviceArray,
    Grid,
    PreparedLaunch,
    address,
    check_args,
)
from dflash_runtime.compute.gpu.device.kernel_sources import Defines, define_options
from support.emulated_device.kernel_library import kernel_library
from support.emulated_device.peer_memory import EmulatedPeerMemory
from support.emulated_device.side_stream import EmulatedMark, EmulatedSideStream

_GUARD_BYTES = 256
_MAX_THREADS = 1024
_STACK_BYTES = 256 * 1024
"""As in scheduler.h."""
_POISON = 0xFF
_REFERRED: Callable[[Any], Any] = operator.call
_IS_THERE = partial(operator.is_not, None)
"""Both for each array at each launch."""


def host_capabilities(*, lanes: int) -> Capabilities:
    """Capabilities of the emulation: the portable ones, and those that mma.cuh emulates."""
    return Capabilities(
        vendor=Vendor.HOST,
        architecture="host",
        lanes=lanes,
        mma=lanes == 32,
    )


class _Range(ctypes.Structure):
    """emulated::Range."""

    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("guard_bytes", ctypes.c_uint64),
    )


class _Launch(ctypes.Structure):
    """emulated::Launch."""

    _fields_ = (
        ("args", ctypes.c_void_p),
        ("grid_x", ctypes.c_int32),
        ("grid_y", ctypes.c_int32),
        ("grid_z", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_uint64),
        ("max_shared_bytes", ctypes.c_uint64),
        ("stacks", ctypes.c_uint64),
        ("ranges", ctypes.POINTER(_Range)),
        ("num_ranges", ctypes.c_uint64),
        ("runs_backward", ctypes.c_int32),
        ("overlaps_previous", ctypes.c_int32),
    )


class _Stacks(threading.local):
    """Stacks of the fibers of a block, per host thread. They are kept, as mapping pages again takes
    longer than many kernels."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(
            -1, _MAX_THREADS * _STACK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self.address = int(np.frombuffer(self._memory, np.uint8).ctypes.data)


_STACKS = _Stacks()


class KernelFailure(AssertionError):
    """A kernel broke a rule; the message names the thread, what it did and where."""


class EmulatedKernel:
    """One function of an emulated module."""

    def __init__(
        self, name: str, launch: Any, args: type[ctypes.Structure], *, lock: threading.Lock
    ) -> None:
        self.name = name
        self.args = args
        self._launch = launch
        self._lock = lock

    def run(self, launch: _Launch) -> None:
        """Raises: KernelFailure."""
        with self._lock:  # a module runs one block at a time, on all devices together
            error = self._launch(ctypes.byref(launch))
        if error is not None:
            raise KernelFailure(error.decode(errors="replace"))


class EmulatedModule:
    """A kernel file that g++ has compiled."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def kernel(self, name: str, args: type[ctypes.Structure]) -> EmulatedKernel:
        """As KernelModule.kernel."""
        try:
            size, launch = self._library[f"{name}_args_bytes"], self._library[f"{name}_launch"]
        except AttributeError:
            raise SettingsError(f"there is no kernel {name}") from None
        size.restype = ctypes.c_uint64
        launch.restype = ctypes.c_char_p
        check_args(name, size(), args)
        return EmulatedKernel(name, launch, args, lock=_lock_of(self._library._name))


_LAUNCHER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class EmulatedGraph:
    """A captured list of launches."""

    def __init__(self, launches: list[Callable[[], None]]) -> None:
        self._launches = launches
        self._function = _LAUNCHER(self._replayed)

    def replay(self) -> None:
        """Run the launches; returns when they have ended."""
        for launch in self._launches:
            launch()

    @property
    def launcher(self) -> tuple[int, int, int]:
        """As Graph.launcher."""
        return ctypes.cast(self._function, ctypes.c_void_p).value or 0, 0, 0

    def _replayed(self, graph: int, stream: int) -> int:
        try:
            self.replay()
        except Exception:  # the caller replays it once more, which raises
            return 1
        return 0

    def close(self) -> None:
        """From now on replaying fails."""
        self._launches = [_fail_closed]


def _fail_closed() -> None:
    raise AssertionError("a graph that was closed is replayed")


class EmulatedHostMapping:
    """A mapping of host memory, which the emulated device can access anyway."""

    def __init__(self, device: EmulatedDevice, array: AnyArray) -> None:
        self._device = device
        self.device_address = address(array)
        device.add_range(self.device_address, array.nbytes)

    def close(self) -> None:
        """From now on kernels that access the memory fail."""
        self._device.drop_range(self.device_address)


class EmulatedBlocks:
    """Implements BlockArray: kernels cannot access what was given back, and it is poisoned."""

    def __init__(self, device: EmulatedDevice, array: AnyArray) -> None:
        # As for a device's: a view that is kept elsewhere keeps the memory.
        self._device, self.array, self._held_bytes = device, array, array.nbytes

    def held_for(self, num_bytes: int) -> int:
        """As BlockArray.held_for."""
        unit = self._device.block_bytes
        return min(-(-num_bytes // unit) * unit, self.array.nbytes)

    def keep(self, num_bytes: int) -> None:
        """As BlockArray.keep."""
        held_bytes = self.held_for(num_bytes)
        more_bytes = held_bytes - self._held_bytes
        if more_bytes > self._device.free_block_bytes:
            raise DeviceOutOfMemory(
                self._device.name,
                num_bytes=more_bytes,
                free_bytes=self._device.free_block_bytes,
                total_bytes=1 << 40,
            )
        self._device.free_block_bytes -= more_bytes
        self._held_bytes = held_bytes
        self.array[held_bytes:] = _POISON
        self._device.resize_range(self.array.ctypes.data, held_bytes)


class EmulatedDevice:
    """Implements KernelDevice."""

    block_bytes = 0
    """Size of blocks; 0: memory does not come in blocks."""
    free_block_bytes = 1 << 40
    """For blocks that are taken anew."""

    def __init__(
        self,
        *,
        lanes: int = 32,
        num_multiprocessors: int = 4,
        runs_backward: bool = False,
        max_shared_bytes: int = 96 * 1024,
    ) -> None:
        self.name = self.product_name = "host:0"
        self.uuid = secrets.token_bytes(16)
        self.ticks_per_ms = 1_000_000
        self.lanes = lanes
        self.num_multiprocessors = num_multiprocessors
        self.max_shared_bytes = max_shared_bytes
        self.capabilities: Capabilities = host_capabilities(lanes=lanes)
        self.num_launches = 0
        """Number of kernels that have run, including those of graphs."""
        self._runs_backward = runs_backward
        self._modules: dict[tuple[str, tuple[str, ...]], EmulatedModule] = {}
        self._buffers: dict[int, weakref.ref[AnyArray]] = {}
        self._range_bytes: dict[int, int] = {}
        self._state = object()
        """Another one whenever a range comes or goes."""
        self._ranges: tuple[object, ctypes.Array[_Range]] = object(), _as_ranges([], set())
        """As of a state."""
        self._captured: list[Callable[[], None]] | None = None
        self._sides: dict[str, EmulatedSideStream] = {}

    def use(self) -> None:
        """As KernelDevice.use."""

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        """As KernelDevice.empty; every byte is 0xFF, a NaN in most types."""
        self._must_not_capture("allocate")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        num_bytes = prod(shape) * np.dtype(dtype).itemsize
        buffer = np.full(num_bytes + 3 * _GUARD_BYTES, _POISON, np.uint8)
        begin = _GUARD_BYTES + -buffer.ctypes.data % _GUARD_BYTES
        payload_address = buffer.ctypes.data + begin
        self._buffers[payload_address] = weakref.ref(buffer, self._forget(payload_address))
        self.add_range(payload_address, num_bytes)
        # The view keeps the buffer alive, and its own views too.
        return buffer[begin : begin + num_bytes].view(dtype).reshape(shape)

    def in_blocks(self, num_bytes: int) -> EmulatedBlocks | None:
        """As KernelDevice.in_blocks, in blocks of `block_bytes`."""
        if num_bytes <= self.block_bytes or not self.block_bytes:
            return None
        return EmulatedBlocks(self, self.empty(num_bytes, np.uint8))

    def resize_range(self, begin: int, num_bytes: int) -> None:
        """Let kernels access so much of an array; what follows is guarded."""
        self._range_bytes[begin] = num_bytes
        self._state = object()

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        """As KernelDevice.zeros."""
        array = self.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = 0
        return array

    def upload(self, array: AnyArray) -> AnyArray:
        """As KernelDevice.upload."""
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def write(self, destination: DeviceArray, source: AnyArray) -> None:
        """As KernelDevice.write."""
        self._must_not_capture("write")
        assert isinstance(destination, np.ndarray)
        assert destination.flags.c_contiguous
        assert destination.nbytes == source.nbytes
        flat = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        destination.reshape(-1).view(np.uint8)[:] = flat

    def download(self, array: DeviceArray) -> AnyArray:
        """As KernelDevice.download."""
        self._must_not_capture("download")
        assert isinstance(array, np.ndarray)
        return array.copy()

    def copy(self, destination: DeviceArray, source: DeviceArray) -> None:
        """As KernelDevice.copy."""
        self._must_not_capture("copy")
        assert isinstance(destination, np.ndarray)
        assert isinstance(source, np.ndarray)
        destination.reshape(-1).view(np.uint8)[:] = source.reshape(-1).view(np.uint8)

    def module(self, file: str | Path, defines: Defines) -> EmulatedModule:
        """As KernelDevice.module; `file` may also be the path of a test's own."""
        self._must_not_capture("compile")
        options = define_options({"LANES": self.lanes, **defines})
        key = str(file), options
        if key not in self._modules:
            self._modules[key] = EmulatedModule(kernel_library(str(file), options))
        return self._modules[key]

    def compile_ahead(self, *_: object) -> None:
        """Modules are compiled when they are asked for."""

    def launch(
        self,
        kernel: Any,
        grid: Grid,
        block: int,
        args: ctypes.Structure,
        *,
        shared_bytes: int = 0,
        overlaps_previous: bool = True,
    ) -> None:
        """As KernelDevice.launch. Raises: KernelFailure."""
        run = self.prepared(
            kernel,
            grid,
            block,
            args,
            shared_bytes=shared_bytes,
            overlaps_previous=overlaps_previous,
        )
        if self._captured is not None:
            self._captured.append(run)
        else:
            run()

    def start(self, launches: Iterable[PreparedLaunch]) -> None:
        for each in launches:
            self.launch(
                each.kernel, each.grid, each.block, each.args, shared_bytes=each.shared_bytes
            )

    def prepared(
        self,
        kernel: Any,
        grid: Grid,
        block: int,
        args: ctypes.Structure,
        *,
        shared_bytes: int = 0,
        overlaps_previous: bool,
    ) -> Callable[[], None]:
        """A launch that is still to be run, with a copy of `args`."""
        assert isinstance(kernel, EmulatedKernel)
        assert isinstance(args, kernel.args), f"{kernel.name} takes {kernel.args.__name__}"
        copy = type(args).from_buffer_copy(args)

        def run() -> None:
            ranges, _alive = self._current_ranges()
            launch = _Launch(
                args=ctypes.addressof(copy),
                grid_x=grid[0],
                grid_y=grid[1],
                grid_z=grid[2],
                num_threads=block,
                shared_bytes=shared_bytes,
                max_shared_bytes=self.max_shared_bytes,
                stacks=_STACKS.address,
                ranges=ranges,
                num_ranges=len(ranges),
                runs_backward=self._runs_backward,
                overlaps_previous=overlaps_previous,
            )
            kernel.run(launch)
            self.num_launches += 1

        return run

    def write_at(self, place: int, origin: int, num_bytes: int) -> None:
        """Copy to an array, which must still exist, and does meanwhile."""
        ranges = self._copied_ranges().items()
        begin = next((begin for begin, size in ranges if begin <= place < begin + size), 0)
        reference = self._buffers.get(begin)  # none: memory of the host or a peer
        alive = None if reference is None else reference()
        if not begin or (reference is not None and alive is None):
            raise KernelFailure("something is written into an array that is not there any more")
        ctypes.memmove(place, origin, num_bytes)

    def capture(self, launch: Callable[[], None]) -> EmulatedGraph:
        """As KernelDevice.capture."""
        self._must_not_capture("capture")
        captured: list[Callable[[], None]] = []
        self._captured = captured
        try:
            launch()
        finally:
            self._captured = None
        return EmulatedGraph(captured)

    def export_memory(self, num_bytes: int) -> EmulatedPeerMemory:
        """As KernelDevice.export_memory."""
        return EmulatedPeerMemory(self, num_bytes=num_bytes)

    def import_memory(self, handle: bytes, num_bytes: int) -> EmulatedPeerMemory:
        """As KernelDevice.import_memory."""
        return EmulatedPeerMemory(self, num_bytes=num_bytes, handle=handle)

    def map_host(self, array: AnyArray) -> EmulatedHostMapping:
        """As KernelDevice.map_host."""
        self._must_not_capture("map memory")
        return EmulatedHostMapping(self, array)

    def require_mapped(self, begin: int, num_bytes: int) -> None:
        """Fail if the memory is not mapped, as an asynchronous copy needs it to be."""
        end = begin + num_bytes
        mapped = self._copied_ranges()
        assert any(first <= begin and end <= first + size for first, size in mapped.items())

    def trim(self) -> None:
        """As KernelDevice.trim; numpy keeps nothing."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(self._range_bytes.get(begin, 0) for begin in list(self._buffers))

    @property
    def num_ranges(self) -> int:
        """Memory ranges that kernels may access: arrays, host mappings, peer memory."""
        return len(self._range_bytes)

    def mark(self) -> EmulatedMark:
        """As KernelDevice.mark."""
        self._must_not_capture("mark")
        return EmulatedMark()

    def new_stream(self) -> EmulatedSideStream:
        """As KernelDevice.new_stream, for copies of mapped memory only."""
        self._must_not_capture("make a stream")
        return EmulatedSideStream(self, copies_mapped=True)

    def side_stream(self, name: str) -> EmulatedSideStream:
        """As KernelDevice.side_stream."""
        return self._sides.setdefault(name, EmulatedSideStream(self))

    def synchronize(self, deadline_s: float | None = None) -> None:
        """As KernelDevice.synchronize; everything has ended already."""
        self._must_not_capture("synchronise")

    def add_range(self, begin: int, num_bytes: int) -> None:
        """Let kernels access this range."""
        self._range_bytes[begin] = num_bytes
        self._state = object()

    def drop_range(self, begin: int) -> None:
        """Revoke access to a range."""
        self._range_bytes.pop(begin, None)
        self._state = object()

    def _current_ranges(self) -> tuple[ctypes.Array[_Range], list[AnyArray | None]]:
        """The ranges that kernels may access, and references that keep them alive."""
        while True:
            state, (state_of_ranges, ranges) = self._state, self._ranges
            if state_of_ranges is not state:
                guarded = set(self._buffers)
                ranges = _as_ranges(sorted(self._copied_ranges().items()), guarded)
                self._ranges = state, ranges
            alive = [*map(_REFERRED, list(self._buffers.values()))]
            # Unchanged since before they were read, and no other thread is about to free one.
            if self._state is state and all(map(_IS_THERE, alive)):
                return ranges, alive

    def _copied_ranges(self) -> dict[int, int]:
        """At once: while tuples of a dictionary are made, garbage may be collected, and arrays of
        any thread leave it."""
        return self._range_bytes.copy()

    def _forget(self, payload_address: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            self.drop_range(payload_address)
            self._buffers.pop(payload_address, None)  # last: see `_current_ranges`

        return forget

    def _must_not_capture(self, what: str) -> None:
        if self._captured is not None:
            raise DeviceUnavailable(f"cannot {what} while launches are captured")


def _as_ranges(places: list[tuple[int, int]], guarded: set[int]) -> ctypes.Array[_Range]:
    words = [
        word
        for begin, num_bytes in places
        for word in (begin, begin + num_bytes, _GUARD_BYTES if begin in guarded else 0)
    ]
    return (_Range * len(places)).from_buffer(array("Q", words))


@cache
def _lock_of(library_name: str) -> threading.Lock:
    return threading.Lock()
