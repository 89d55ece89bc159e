"""Interface of a device that runs kernels: arrays, modules, launches, graphs.

Implemented by ``cupy_device.CupyDevice``, and by the emulation of the tests, whose arrays are
numpy's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.capabilities import Capabilities
from dflash_runtime.compute.gpu.device.kernel_sources import Defines

Grid = tuple[int, int, int]

NANOSECONDS_PER_MS = 1_000_000


class DeviceArray(Protocol):
    """A ``cupy.ndarray`` or, emulated, a ``numpy.ndarray``. Slices are views."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def reshape(self) -> Callable[..., Any]: ...
    @property
    def view(self) -> Callable[..., Any]: ...
    def __getitem__(self, key: Any, /) -> Any: ...


class Kernel(Protocol):
    """A function of a module; launched by the device that loaded it."""

    @property
    def name(self) -> str: ...


class KernelModule(Protocol):
    """A compiled file with its defines."""

    def kernel(self, name: str, args: type[ctypes.Structure]) -> Kernel:
        """The function `name`, whose only argument is mirrored by `args`.

        Raises: SettingsError if there is none, or its argument has another size.
        """


class Graph(Protocol):
    """A captured CUDA or HIP graph."""

    def replay(self) -> None:
        """Start its launches, in order; returns before they have run."""

    @property
    def launcher(self) -> tuple[int, int, int]:
        """Address of a C function ``int(graph, stream)`` and its arguments, for code that starts
        the launches without Python on a thread whose current device this is; not 0: it failed."""

    def close(self) -> None:
        """Release the driver's memory for it. Must not be replayed afterwards. Idempotent."""


class PeerMemory(Protocol):
    """Device memory shared with another process's device."""

    @property
    def device_address(self) -> int: ...

    @property
    def handle(self) -> bytes:
        """Handle by which another process imports it."""

    def close(self) -> None:
        """Free or unmap it; no kernel that uses it may be running. Idempotent."""


class BlockArray(Protocol):
    """Memory in blocks, of which those at its end can be given back to the driver and taken anew,
    while addresses stay. It lives as long as its array, or a view of it."""

    @property
    def array(self) -> DeviceArray:
        """All of it, whether there is memory behind or not. Shapes: [num_bytes] uint8."""

    def held_for(self, num_bytes: int) -> int:
        """What so many bytes at its beginning take."""

    def keep(self, num_bytes: int) -> None:
        """Have memory behind so many bytes at the beginning, and behind the others none: what is
        taken anew is uninitialised. Nothing may be running.

        Raises: DeviceOutOfMemory, and then it is as before.
        """


class HostMapping(Protocol):
    """Host memory mapped for kernels to read and write."""

    @property
    def device_address(self) -> int: ...

    def close(self) -> None:
        """Unmap it; no kernel that uses it may be running."""


class Mark(Protocol):
    """An event in the main stream: reached when all launches before it have ended."""

    @property
    def handle(self) -> int:
        """The driver's, for compiled code; valid while this object lives."""


class SideStream(Protocol):
    """A stream beside the device's main one, for copies or graphs. Used by one thread at a time.

    The caller keeps memory used here until `synchronize` has returned: freed device memory is
    reused in the order of the main stream, which does not wait for this one.
    """

    def wait_for(self, mark: Mark) -> None:
        """Later work in this stream begins after the mark."""

    def write(self, destination: DeviceArray, source: AnyArray) -> None:
        """Copy contiguous host memory into a contiguous array of the same bytes; keep `source`
        unchanged until `synchronize` has returned. Beside the host's work if it is mapped
        (`map_host`)."""

    def read(self, destination: AnyArray, source: DeviceArray) -> None:
        """Copy a contiguous array into contiguous host memory of the same bytes; it is there when
        `synchronize` has returned. Beside the host's work if the memory is mapped."""

    def launch(self, kernel: Kernel, grid: Grid, block: int, args: ctypes.Structure) -> None:
        """Start a kernel when all earlier work in this stream has ended."""

    def replay(self, graph: Graph) -> None:
        """Start the graph's launches; returns before they have run."""

    @property
    def functions(self) -> tuple[int, int, int, int]:
        """For code that copies to the device without Python, on a thread whose current device this
        is: addresses of the C functions ``int copy(destination, source, num_bytes, stream)``,
        ``int synchronize(stream)`` and ``int wait_for(stream, mark, 0)``, and the stream; not 0: it
        failed. See `write`, `wait_for`."""

    def is_empty(self) -> bool:
        """Whether all work has ended. Raises: the error of a kernel that failed."""

    def synchronize(self, deadline_s: float | None = None) -> None:
        """Wait until all work has ended.

        Raises: the error of a kernel that failed; DeviceUnavailable after the deadline.
        """

    def close(self) -> None:
        """Wait for its work and destroy it. Idempotent."""


class KernelDevice(Protocol):
    """A device and its main stream, in whose order everything runs unless stated otherwise.

    All methods raise DeviceUnavailable with the driver's message if the device fails.
    """

    @property
    def name(self) -> str:
        """Its name in settings, ``cuda:0``."""

    @property
    def product_name(self) -> str:
        """What its maker calls it."""

    @property
    def lanes(self) -> int:
        """Lanes of a logical warp; LANES of every module."""

    @property
    def num_multiprocessors(self) -> int: ...

    @property
    def max_shared_bytes(self) -> int:
        """Most dynamic shared memory of a block."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def uuid(self) -> bytes:
        """16 bytes that identify the device in every process."""

    @property
    def ticks_per_ms(self) -> int:
        """Rate of the clock that kernels read by clock_ticks()."""

    def use(self) -> None:
        """Make it the calling thread's current device; all other methods do so too."""

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """New memory, 256-byte aligned, uninitialised.

        Raises: DeviceOutOfMemory with the amounts.
        """

    def in_blocks(self, num_bytes: int) -> BlockArray | None:
        """New memory, 256-byte aligned, uninitialised, whose end can be given back; None if this
        device has no such memory, or so few bytes are no more than a block.

        Raises: DeviceOutOfMemory.
        """

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """New memory, zeroed."""

    def upload(self, array: AnyArray) -> DeviceArray:
        """A copy on the device; the source may change once this has returned."""

    def write(self, destination: DeviceArray, source: AnyArray) -> None:
        """Copy into a contiguous array of the same bytes, after all earlier launches."""

    def download(self, array: DeviceArray) -> AnyArray:
        """A copy on the host; waits for all earlier launches."""

    def copy(self, destination: DeviceArray, source: DeviceArray) -> None:
        """Copy a contiguous array to another of the same bytes, after all earlier launches."""

    def module(self, file: str, defines: Defines) -> KernelModule:
        """A kernel file compiled with these defines (LANES is added); compiled once and cached.

        Raises: KernelCompileError with the compiler's first error.
        """

    def compile_ahead(
        self,
        what: str,
        launch: Callable[[KernelDevice], None],
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Compile, several at once, the modules that `launch` asks for of a device like this one
        that runs nothing; unless that was done before for the same `what`.

        `on_progress` is called with the number compiled, and of all. Raises: what both raise; a
        module that cannot be compiled fails when it is asked for here.
        """

    def launch(
        self,
        kernel: Kernel,
        grid: Grid,
        block: int,
        args: ctypes.Structure,
        *,
        shared_bytes: int = 0,
        overlaps_previous: bool = True,
    ) -> None:
        """Start a kernel with `block` threads a block and a copy of `args`.

        With `overlaps_previous` it may begin while the kernel before it ends, if the device can
        do that, and must call wait_for_previous(). Without, it begins when that one has ended.
        """

    def start(self, launches: Iterable[PreparedLaunch]) -> None:
        """Start kernels one after the other, each with a copy of its `args` as they are now."""

    def capture(self, launch: Callable[[], None]) -> Graph:
        """Capture what `launch` launches as a graph, without running it. `launch` may not allocate
        or wait."""

    def export_memory(self, num_bytes: int) -> PeerMemory:
        """New zeroed memory that other processes can import. Raises: DeviceUnavailable."""

    def import_memory(self, handle: bytes, num_bytes: int) -> PeerMemory:
        """Map another process's memory, of which `num_bytes` will be used.

        Raises: DeviceUnavailable if our device cannot map it, or it is smaller.
        """

    def map_host(self, array: AnyArray) -> HostMapping:
        """Map a contiguous array of the host, which must outlive the mapping."""

    def trim(self) -> None:
        """Return cached memory that no array uses to the driver."""

    def mark(self) -> Mark:
        """Record an event in the main stream."""

    def new_stream(self) -> SideStream:
        """A stream that the caller owns."""

    def side_stream(self, name: str) -> SideStream:
        """The stream of that name, created at its first use, whose blocks go before the main
        stream's. The device owns it."""

    def synchronize(self, deadline_s: float | None = None) -> None:
        """Wait until the main stream is empty.

        Raises: the error of a kernel that failed; DeviceUnavailable after `deadline_s`.
        """


FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
INT32, UINT32 = np.dtype(np.int32), np.dtype(np.uint32)
"""An array's type is compared with these in a fraction of the time that their classes take."""


@dataclass(slots=True, eq=False)
class PreparedLaunch:
    """A kernel with checked arguments, for `start` of one device. It may overlap the kernel before
    it.

    Filling in and checking arguments takes longer than a launch, and chunk after chunk a layer's
    arguments differ in the addresses of its rows only.
    """

    kernel: Kernel
    grid: Grid
    block: int
    args: ctypes.Structure
    """May be changed between launches."""
    shared_bytes: int = 0
    call: Callable[[], int] | None = field(default=None, init=False)
    """The driver's, with its status, once the device has made it."""


def address(array: DeviceArray, offset_bytes: int = 0) -> int:
    """Device address of a contiguous array, plus `offset_bytes`.

    Raises: SettingsError if the array is not contiguous.
    """
    if isinstance(array, np.ndarray):
        contiguous, begin = array.flags.c_contiguous, array.ctypes.data
    else:
        given: Any = array
        contiguous, begin = bool(given.flags.c_contiguous), int(given.data.ptr)
    if not contiguous:
        raise SettingsError("an argument of a kernel must be a contiguous array")
    return begin + offset_bytes


def optional_address(array: DeviceArray | None, offset_bytes: int = 0) -> int:
    """The same; 0, a kernel's null pointer, for None."""
    return 0 if array is None else address(array, offset_bytes)


def check_args(name: str, num_bytes: int, args: type[ctypes.Structure]) -> None:
    """Raises: SettingsError if Python's mirror of a kernel's argument has another size."""
    if ctypes.sizeof(args) != num_bytes:
        raise SettingsError(
            f"kernel {name} takes {num_bytes} bytes, {args.__name__} has {ctypes.sizeof(args)}"
        )
