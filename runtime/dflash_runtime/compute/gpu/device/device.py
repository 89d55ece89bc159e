"""What kernels run on, as the rest of the backend sees it: arrays, modules, launches, graphs.

Two things implement it: ``cupy_device.CupyDevice``, and the emulation of the tests, whose arrays
are numpy's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
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
    """One function of a module; launched by the device that made it."""

    @property
    def name(self) -> str: ...


class KernelModule(Protocol):
    """A compiled file with its defines."""

    def kernel(self, name: str, args: type[ctypes.Structure]) -> Kernel:
        """The function `name`, whose only argument is mirrored by `args`.

        Raises: SettingsError if there is none, or its argument has another size.
        """


class Graph(Protocol):
    """Launches that were captured once."""

    def replay(self) -> None:
        """Start all of them, in order; returns before they have run."""

    def close(self) -> None:
        """Give back what the driver keeps for it. Must not be replayed afterwards."""


class Queue(Protocol):
    """A stream beside the device's own, in whose order graphs run; for any one thread."""

    def replay(self, graph: Graph) -> None:
        """Start all of its launches; returns before they have run."""

    def synchronize(self) -> None:
        """Wait until everything here has ended. Raises what a kernel did wrong."""

    def close(self) -> None:
        """Nothing of it may still run. Twice does nothing."""


class PeerMemory(Protocol):
    """Memory of a device that kernels of another process's device see."""

    @property
    def device_address(self) -> int: ...

    @property
    def handle(self) -> bytes:
        """What another process opens it by."""

    def close(self) -> None:
        """Nothing that uses it may still run. Twice does nothing."""


class HostMapping(Protocol):
    """Memory of the host that kernels can read and write."""

    @property
    def device_address(self) -> int: ...

    def close(self) -> None:
        """Unmap it; nothing that uses it may still run."""


class Mark(Protocol):
    """A place in the order of a device's launches: when all before it has ended."""


class SideStream(Protocol):
    """Another order of launches on a device, beside that of all else: for copies.

    Memory that is used here must be kept by the caller until `synchronize` has returned: that of
    the device is otherwise given to whoever comes next in the device's own order.
    """

    def wait_for(self, mark: Mark) -> None:
        """What comes here from now on begins after that."""

    def write(self, destination: DeviceArray, source: AnyArray) -> None:
        """Copy from the host into a contiguous array of the same bytes; `source`, without gaps, is
        kept and left as it is until `synchronize` has returned."""

    def launch(self, kernel: Kernel, grid: Grid, block: int, args: ctypes.Structure) -> None:
        """Start a kernel after all that came here before it has ended."""

    def is_empty(self) -> bool:
        """Whether everything here has ended. Raises: what a kernel did wrong."""

    def synchronize(self, deadline_s: float) -> None:
        """Wait until everything here has ended.

        Raises: what a kernel did wrong; DeviceUnavailable if it takes longer.
        """


class CopyStream(Protocol):
    """Copies to the device beside all that is launched, in an order of their own. Used by one
    thread at a time, of which each has its own."""

    def write(self, destination: DeviceArray, source: AnyArray) -> None:
        """Begin to copy contiguous memory of the host, which must be mapped (`map_host`) and stay
        as it is until `wait`, into an array of the same bytes, which nobody may be using.

        Raises: DeviceUnavailable.
        """

    def wait(self) -> None:
        """Until everything has arrived: what is launched from now on reads it. Raises:
        DeviceUnavailable."""

    def close(self) -> None:
        """Give it back; nothing may be on its way. Twice does nothing."""


class KernelDevice(Protocol):
    """One device and the stream that everything of ours runs on, in order.

    Everything raises DeviceUnavailable with the driver's own words if the device fails.
    """

    @property
    def name(self) -> str:
        """As settings name it, ``cuda:0``."""

    @property
    def lanes(self) -> int:
        """Lanes of a logical warp, that is LANES of every module."""

    @property
    def num_multiprocessors(self) -> int: ...

    @property
    def max_shared_bytes(self) -> int:
        """Dynamic shared memory that one block can ask for."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def uuid(self) -> bytes:
        """16 bytes, the same for this very device in every process."""

    @property
    def ticks_per_ms(self) -> int:
        """Of the clock that kernels read by clock_ticks()."""

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """New memory, 256-byte aligned, with anything in it.

        Raises: DeviceOutOfMemory with the amounts.
        """

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """The same, zero in every byte."""

    def upload(self, array: AnyArray) -> DeviceArray:
        """A copy on the device; the source may change once this has returned."""

    def write(self, destination: DeviceArray, source: AnyArray) -> None:
        """Copy into a contiguous array of the same bytes, after everything that was launched."""

    def download(self, array: DeviceArray) -> AnyArray:
        """A copy on the host, after everything that was launched has ended."""

    def copy(self, destination: DeviceArray, source: DeviceArray) -> None:
        """From one contiguous array to another of the same bytes, after everything launched."""

    def module(self, file: str, defines: Defines) -> KernelModule:
        """A kernel file compiled for these defines (LANES is added): once, then kept.

        Raises: KernelCompileError with the compiler's first words.
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

        With `overlaps_previous` it may begin while the one before it ends, where the device can:
        it must call wait_for_previous(). Without, it begins when all before it has ended.
        """

    def capture(self, record: Callable[[], None]) -> Graph:
        """Record what `record` launches, without running it. Inside, nothing but launches goes."""

    def new_queue(self) -> Queue:
        """Raises: DeviceUnavailable."""

    def export_memory(self, num_bytes: int) -> PeerMemory:
        """New memory of ours, zero. Raises: DeviceUnavailable, also if that cannot be had."""

    def import_memory(self, handle: bytes, num_bytes: int) -> PeerMemory:
        """Another process's, of which so many bytes will be used.

        Raises: DeviceUnavailable if our kernels cannot see it, or it has fewer.
        """

    def map_host(self, array: AnyArray) -> HostMapping:
        """Have kernels see a contiguous array of the host, which must outlive the mapping."""

    def copy_stream(self) -> CopyStream:
        """A new one."""

    def trim(self) -> None:
        """Give memory that no array refers to any more back to the driver, for others to take."""

    def mark(self) -> Mark:
        """After all that was launched until now, but for what is in side streams."""

    def side_stream(self, name: str) -> SideStream:
        """The one of that name; it is the device's, and made when somebody asks first."""

    def synchronize(self, deadline_s: float | None = None) -> None:
        """Wait until everything has ended, but for what is in side streams.

        Raises: what a kernel did wrong; DeviceUnavailable if it takes longer than `deadline_s`.
        """


@dataclass(slots=True, eq=False)
class PreparedLaunch:
    """A kernel and all that it is launched with, again and again; `args`, which are copied by each
    launch, may be changed in between.

    To fill in and check a kernel's arguments takes longer than to start it, and the layers of a
    chunk are launched with the same ones, chunk after chunk, but for where their rows are.
    """

    kernel: Kernel
    grid: Grid
    block: int
    args: ctypes.Structure
    shared_bytes: int = 0

    def start(self, device: KernelDevice) -> None:
        device.launch(self.kernel, self.grid, self.block, self.args, shared_bytes=self.shared_bytes)


def address(array: DeviceArray, offset_bytes: int = 0) -> int:
    """Where a contiguous array begins on its device, `offset_bytes` further on.

    Raises: SettingsError if elements do not follow each other.
    """
    if isinstance(array, np.ndarray):
        contiguous, begin = array.flags.c_contiguous, array.ctypes.data
    else:
        given: Any = array
        contiguous, begin = bool(given.flags.c_contiguous), int(given.data.ptr)
    if not contiguous:
        raise SettingsError("a kernel cannot be given an array with gaps")
    return begin + offset_bytes


def optional_address(array: DeviceArray | None, offset_bytes: int = 0) -> int:
    """The same; 0 of None, as kernels want it."""
    return 0 if array is None else address(array, offset_bytes)


def check_args(name: str, num_bytes: int, args: type[ctypes.Structure]) -> None:
    """Raises: SettingsError if Python's mirror of a kernel's argument has another size."""
    if ctypes.sizeof(args) != num_bytes:
        raise SettingsError(
            f"kernel {name} takes {num_bytes} bytes, {args.__name__} has {ctypes.sizeof(args)}"
        )
