"""A real device: CuPy manages its memory; everything else calls the driver.

Imports CuPy when a device is opened, not before.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dflash_protocol.device import Device
from dflash_protocol.errors import DeviceOutOfMemory, DeviceUnavailable, SettingsError, one_line
from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.binary_cache import BinaryCache
from dflash_runtime.compute.gpu.device.block_memory import BlockPool, CudaBlocks
from dflash_runtime.compute.gpu.device.capabilities import Capabilities, Vendor
from dflash_runtime.compute.gpu.device.device import (
    NANOSECONDS_PER_MS,
    DeviceArray,
    Grid,
    KernelDevice,
    PreparedLaunch,
    address,
    check_args,
)
from dflash_runtime.compute.gpu.device.devices import (
    OUTLIVED_POOLS,
    VENDORS,
    DeviceMemory,
    capabilities_of,
    empty_outlived_pools,
    memory_of,
)
from dflash_runtime.compute.gpu.device.driver import Driver, open_driver
from dflash_runtime.compute.gpu.device.driver_table import DeviceAttribute, FunctionAttribute
from dflash_runtime.compute.gpu.device.kernel_sources import Defines, define_options
from dflash_runtime.compute.gpu.device.noting_device import NotingDevice
from dflash_runtime.compute.gpu.device.rtc import DeviceCompiler, runtime_compiler
from dflash_runtime.compute.gpu.device.side_stream import (
    CupyGraph,
    CupyMark,
    CupySideStream,
    Events,
)

_BEFORE_OTHERS = -1
"""Priority: its few blocks, which wait for remote memory, go before a product's thousands."""


class CupyMemory:
    """A pool of one device's memory; call its methods while the device is current.

    The pool reuses a block as soon as nothing refers to it. That is safe because everything that
    uses the pool runs in the order of the main stream.
    """

    def __init__(self, cupy: Any, driver: Driver, device: Device) -> None:
        """`cupy`: what `import_cupy` has given."""
        self._cupy, self._driver = cupy, driver
        self._name, self._index = str(device), device.index
        self._pool = cupy.cuda.MemoryPool()
        self._blocks = BlockPool(driver, device.index)
        empty_outlived_pools()

    def available(self) -> DeviceMemory:
        """Free and total memory. Raises: DeviceUnavailable."""
        return memory_of(self._driver, self._index)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """Raises: DeviceOutOfMemory with the amounts."""
        sizes = (shape,) if isinstance(shape, int) else shape
        num_bytes = prod(sizes) * np.dtype(dtype).itemsize
        try:
            with self._cupy.cuda.Device(self._index):
                memory = self._pool.malloc(num_bytes)
                array: DeviceArray = self._cupy.ndarray(shape, dtype, memptr=memory)
                return array
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            found = self.available()
            raise DeviceOutOfMemory(
                self._name,
                num_bytes=num_bytes,
                free_bytes=found.free_bytes,
                total_bytes=found.total_bytes,
            ) from error

    def in_blocks(self, num_bytes: int) -> CudaBlocks | None:
        """See KernelDevice.in_blocks."""
        found = self._blocks.new(num_bytes)
        if found is None:
            return None
        of, owner = found
        with self._cupy.cuda.Device(self._index):
            memory = self._cupy.cuda.UnownedMemory(of.address, num_bytes, owner, self._index)
            pointer = self._cupy.cuda.MemoryPointer(memory, 0)
            return CudaBlocks(of, self._cupy.ndarray((num_bytes,), np.uint8, memptr=pointer))

    @property
    def has_dropped_blocks(self) -> bool:
        """Whether `trim` will give back blocks."""
        return self._blocks.has_dropped

    def download(self, array: DeviceArray) -> AnyArray:
        """A copy on the host of what the device has written."""
        given: Any = array
        with self._cupy.cuda.Device(self._index):
            copy: AnyArray = given.get()
        return copy

    def trim(self) -> None:
        """Return what no array uses to the driver; nothing may be running if there are blocks."""
        self._blocks.trim()
        with self._cupy.cuda.Device(self._index):
            self._pool.free_all_blocks()

    def close(self) -> None:
        """Return to the driver all memory that no array refers to any more."""
        OUTLIVED_POOLS.append(partial(_emptied, self._cupy, self._index, self._pool))
        OUTLIVED_POOLS.append(self._blocks.trim)
        empty_outlived_pools()


def _emptied(cupy: Any, index: int, pool: Any) -> bool:
    """Return to the driver what arrays have left in a pool; whether it is empty then."""
    with suppress(RuntimeError), cupy.cuda.Device(index):  # CuPy's, of a device that has failed
        pool.free_all_blocks()
    return not pool.total_bytes()


def import_cupy(device: Device) -> Any:
    """Raises: DeviceUnavailable if there is none, or one for another vendor; SettingsError if the
    device is no GPU."""
    if device.kind not in VENDORS:
        raise SettingsError(f"{device} is not a GPU")
    try:
        cupy = importlib.import_module("cupy")
        is_hip = bool(cupy.cuda.runtime.is_hip)
    except Exception as error:  # libraries that it loads may raise anything
        raise DeviceUnavailable(f"{device}: CuPy cannot be used: {one_line(str(error))}") from error
    if is_hip != (VENDORS[device.kind] is Vendor.HIP):
        raise DeviceUnavailable(f"{device}: the installed CuPy is for another vendor")
    return cupy


@dataclass(frozen=True)
class CupyKernel:
    """A function on the device."""

    name: str
    handle: int
    args: type[ctypes.Structure]


class CupyModule:
    """Machine code on the device."""

    def __init__(self, device: CupyDevice, handle: int) -> None:
        self._device = device
        self.handle = handle

    def kernel(self, name: str, args: type[ctypes.Structure]) -> CupyKernel:
        return self._device.kernel_of(self.handle, name, args)


class CupyPeerMemory:
    """Implements device.PeerMemory for exported and imported memory."""

    def __init__(self, driver: Driver, index: int, *, num_bytes: int, handle: bytes = b"") -> None:
        """Export new memory, or import that of `handle`, which must have so many bytes."""
        self._driver, self._index = driver, index
        self._is_ours = not handle
        driver.use(index)
        if self._is_ours:
            self.device_address, self.handle = driver.export_memory(num_bytes)
        else:
            self.device_address, self.handle = driver.import_memory(handle, num_bytes), handle

    def close(self) -> None:
        if self.device_address:
            with suppress(DeviceUnavailable):  # a failed device releases nothing
                self._driver.use(self._index)
                give_back = self._driver.free if self._is_ours else self._driver.close_memory
                give_back(self.device_address)
            self.device_address = 0


class CupyHostMapping:
    """Locked memory of the host."""

    def __init__(self, driver: Driver, index: int, array: AnyArray) -> None:
        self._driver = driver
        self._index = index
        self._array: AnyArray | None = array  # must outlive the mapping
        self.device_address = driver.register_host(
            address(array), array.nbytes, is_read_only=not array.flags.writeable
        )

    def close(self) -> None:
        """Idempotent."""
        if self._array is not None:
            with suppress(DeviceUnavailable):  # a failed device releases nothing
                self._driver.use(self._index)
                self._driver.unregister_host(address(self._array))
            self._array = None


@dataclass(frozen=True)
class _Facts:
    """What does not change of a device; see KernelDevice."""

    capabilities: Capabilities
    lanes: int
    num_multiprocessors: int
    max_shared_bytes: int
    uuid: bytes
    ticks_per_ms: int


def _facts_of(driver: Driver, index: int, lanes: int | None) -> _Facts:
    """`lanes`: other than the architecture's, or None."""

    def attribute(which: DeviceAttribute) -> int:
        return driver.device_attribute(index, which)

    capabilities = capabilities_of(driver, index)
    # NVIDIA's kernels read nanoseconds, AMD's a clock of so many kHz, that is ticks a ms.
    is_hip = driver.vendor is Vendor.HIP
    return _Facts(
        capabilities=capabilities,
        lanes=capabilities.lanes if lanes is None else lanes,
        num_multiprocessors=attribute(DeviceAttribute.MULTIPROCESSORS),
        max_shared_bytes=attribute(DeviceAttribute.MAX_SHARED_BYTES),
        uuid=bytes.fromhex(driver.device_uuid(index)),
        ticks_per_ms=attribute(DeviceAttribute.WALL_CLOCK_KHZ) if is_hip else NANOSECONDS_PER_MS,
    )


class CupyDevice:
    """Implements KernelDevice."""

    def __init__(
        self, device: Device, *, lanes: int | None = None, cache: BinaryCache | None = None
    ) -> None:
        """`lanes` may be 64 where warps have 32, for tests of kernels.

        Raises: DeviceUnavailable if there is no such device, driver, compiler or CuPy;
        SettingsError if our kernels cannot run on it.
        """
        self.name = str(device)
        cupy = import_cupy(device)
        self._index = device.index
        self._driver = driver = open_driver(VENDORS[device.kind])
        count = driver.device_count()
        if device.index >= count:
            raise DeviceUnavailable(f"{device}: the driver sees {count} devices of this kind")
        self._facts = facts = _facts_of(driver, device.index, lanes)
        newest = driver.version() // 1000 if driver.vendor is Vendor.CUDA else None
        self._compiler = DeviceCompiler(
            runtime_compiler(driver.vendor, newest),
            facts.capabilities,
            lanes=facts.lanes,
            cache=cache,
        )
        self._modules: dict[tuple[str, tuple[str, ...]], CupyModule] = {}
        self._is_capturing = False
        self._is_closed = False
        driver.use(device.index)
        self.stream = driver.create_stream()
        """The driver's handle of the main stream."""
        self._sides: dict[str, CupySideStream] = {}
        self._events = Events(driver)
        self._memory = CupyMemory(cupy, driver, device)
        facts.capabilities.log(f"{device} ({driver.device_name(device.index)})")

    @property
    def product_name(self) -> str:
        return self._driver.device_name(self._index)

    @property
    def lanes(self) -> int:
        return self._facts.lanes

    @property
    def num_multiprocessors(self) -> int:
        return self._facts.num_multiprocessors

    @property
    def max_shared_bytes(self) -> int:
        return self._facts.max_shared_bytes

    @property
    def capabilities(self) -> Capabilities:
        return self._facts.capabilities

    @property
    def uuid(self) -> bytes:
        return self._facts.uuid

    @property
    def ticks_per_ms(self) -> int:
        return self._facts.ticks_per_ms

    def memory(self) -> DeviceMemory:
        """Free and total memory. Raises: DeviceUnavailable."""
        return self._memory.available()

    def use(self) -> None:
        self._driver.use(self._index)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        if self._is_capturing:  # composing the message takes longer than allocating
            sizes = [shape] if isinstance(shape, int) else [*shape]
            self._begin(f"allocate {np.dtype(dtype)} {sizes}")
        self._driver.use(self._index)
        return self._memory.empty(shape, dtype)

    def in_blocks(self, num_bytes: int) -> CudaBlocks | None:
        self._begin("allocate blocks")
        return self._memory.in_blocks(num_bytes)

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        array = self.empty(shape, dtype)
        if array.nbytes:
            self._driver.clear(address(array), array.nbytes, self.stream)
        return array

    def upload(self, array: AnyArray) -> DeviceArray:
        copy = self.empty(array.shape, array.dtype)
        self.write(copy, array)
        return copy

    def write(self, destination: DeviceArray, source: AnyArray) -> None:
        self._begin("write")
        source = np.ascontiguousarray(source)
        if source.nbytes != destination.nbytes:
            raise SettingsError(f"{source.nbytes} bytes do not fill {destination.nbytes}")
        if source.nbytes:
            self._driver.copy(
                address(destination), address(source), source.nbytes, stream=self.stream
            )
            # Some drivers return before they have read the source.
            self._driver.synchronize_stream(self.stream)

    def download(self, array: DeviceArray) -> AnyArray:
        self._begin("download")
        self._driver.synchronize_stream(self.stream)
        return self._memory.download(array)

    def copy(self, destination: DeviceArray, source: DeviceArray) -> None:
        self._begin("copy")
        if source.nbytes != destination.nbytes:
            raise SettingsError(f"{source.nbytes} bytes do not fill {destination.nbytes}")
        if source.nbytes:
            self._driver.copy(
                address(destination), address(source), source.nbytes, stream=self.stream
            )

    def module(self, file: str, defines: Defines) -> CupyModule:
        self._begin(f"load {file}")
        key = file, define_options(defines)
        if key not in self._modules:
            binary = self._compiler.binary(file, defines)
            self._modules[key] = CupyModule(self, self._driver.load_module(binary))
        return self._modules[key]

    def compile_ahead(
        self,
        what: str,
        launch: Callable[[KernelDevice], None],
        on_progress: Callable[[int, int], None],
    ) -> None:
        def note(on_module: Callable[[str, Defines], None]) -> None:
            facts = self._facts
            device = NotingDevice(
                facts.capabilities,
                lanes=facts.lanes,
                num_multiprocessors=facts.num_multiprocessors,
                max_shared_bytes=facts.max_shared_bytes,
                on_module=on_module,
            )
            launch(device)

        self._compiler.compile_ahead(what, note, on_progress)

    def kernel_of(self, module: int, name: str, args: type[ctypes.Structure]) -> CupyKernel:
        """A function of a module, which may use all of a block's shared memory."""
        self._begin("load a kernel")
        driver = self._driver
        handle = driver.module_function(module, name)
        num_bytes = driver.parameter_bytes(handle)
        if num_bytes is not None:
            check_args(name, num_bytes, args)
        static = driver.function_attribute(handle, FunctionAttribute.STATIC_SHARED_BYTES)
        driver.set_function_attribute(
            handle, FunctionAttribute.MAX_DYNAMIC_SHARED_BYTES, self.max_shared_bytes - static
        )
        if self.capabilities.large_clusters:
            driver.set_function_attribute(handle, FunctionAttribute.LARGE_CLUSTERS_ALLOWED, 1)
        return CupyKernel(name, handle, args)

    def launch(
        self,
        kernel: Any,
        grid: Grid,
        block: int,
        args: ctypes.Structure,
        *,
        shared_bytes: int = 0,
        overlaps_previous: bool = True,
        stream: int | None = None,
    ) -> None:
        """In the main stream, or in `stream`."""
        self._driver.use(self._index)
        status = self._call_of(
            kernel,
            grid,
            block,
            args=args,
            shared_bytes=shared_bytes,
            stream=self.stream if stream is None else stream,
            overlaps_previous=overlaps_previous,
        )()
        if status:
            self._driver.check_launch(status)

    def start(self, launches: Iterable[PreparedLaunch]) -> None:
        self._driver.use(self._index)
        for each in launches:
            call = each.call
            if call is None:
                call = each.call = self._call_of(
                    each.kernel,
                    each.grid,
                    each.block,
                    args=each.args,
                    shared_bytes=each.shared_bytes,
                    stream=self.stream,
                )
            status = call()
            if status:
                self._driver.check_launch(status)

    def _call_of(
        self,
        kernel: Any,
        grid: Grid,
        block: int,
        *,
        args: ctypes.Structure,
        shared_bytes: int,
        stream: int,
        overlaps_previous: bool = True,
    ) -> Callable[[], int]:
        """The driver's call that launches a kernel, see `Driver.launch_call`."""
        assert isinstance(kernel, CupyKernel)
        if not isinstance(args, kernel.args):
            raise SettingsError(f"{kernel.name} takes {kernel.args.__name__}")
        facts = self._facts
        if block % facts.lanes:  # a partial logical warp would wait for its missing lanes for ever
            raise SettingsError(f"{kernel.name}: {block} threads are not whole logical warps")
        return self._driver.launch_call(
            kernel.handle,
            grid,
            block,
            args=args,
            shared_bytes=shared_bytes,
            stream=stream,
            overlaps_previous=overlaps_previous and facts.capabilities.dependent_launch,
        )

    def capture(self, launch: Callable[[], None]) -> CupyGraph:
        self._begin("capture")
        self._is_capturing = True
        try:
            executable = self._driver.capture(self.stream, launch)
        finally:
            self._is_capturing = False
        return CupyGraph(self._driver, index=self._index, stream=self.stream, executable=executable)

    def export_memory(self, num_bytes: int) -> CupyPeerMemory:
        self._begin("export memory")
        return CupyPeerMemory(self._driver, self._index, num_bytes=num_bytes)

    def import_memory(self, handle: bytes, num_bytes: int) -> CupyPeerMemory:
        self._begin("import memory")
        return CupyPeerMemory(self._driver, self._index, num_bytes=num_bytes, handle=handle)

    def map_host(self, array: AnyArray) -> CupyHostMapping:
        self._begin("map memory")
        return CupyHostMapping(self._driver, self._index, array)

    def trim(self) -> None:
        self._begin("free memory")
        if self._memory.has_dropped_blocks:  # kernels that were launched before may use them
            self._driver.synchronize_stream(self.stream)
        self._memory.trim()

    def mark(self) -> CupyMark:
        self._begin("mark")
        return self._events.record(self.stream)

    def new_stream(self, *, priority: int = 0) -> CupySideStream:
        self._begin("make a stream")
        return CupySideStream(
            self._driver, self._index, name=self.name, launch=self.launch, priority=priority
        )

    def side_stream(self, name: str) -> CupySideStream:
        side = self._sides.get(name)
        if side is None:
            side = self._sides[name] = self.new_stream(priority=_BEFORE_OTHERS)
        return side

    def synchronize(self, deadline_s: float | None = None) -> None:
        self._begin("synchronise")
        self._driver.synchronize_stream(self.stream, deadline_s)

    def close(self) -> None:
        """Release everything, and all memory that no array refers to any more. Idempotent.

        Graphs and mappings are closed by who has made them, before.
        """
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(DeviceUnavailable):  # a failed device releases nothing
            self._driver.use(self._index)
            for side in self._sides.values():
                side.close()
            self._driver.synchronize_stream(self.stream)
            self._events.close()
            for module in self._modules.values():
                self._driver.unload_module(module.handle)
            self._memory.close()
            self._driver.destroy_stream(self.stream)
        self._modules.clear()

    def _begin(self, what: str) -> None:
        if self._is_capturing:
            raise DeviceUnavailable(f"cannot {what} during a capture")
        self._driver.use(self._index)
