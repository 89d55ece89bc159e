"""One vendor's driver, by ctypes: every call checked, every error in the driver's own words.

Handles are ints. What takes no device's index concerns the calling thread's current device, which
`use` selects.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable
from ctypes import byref
from functools import cache, partial
from typing import Any

from dflash_protocol.errors import DeviceOutOfMemory, DeviceUnavailable, one_line
from dflash_runtime.compute.gpu.device.capabilities import Vendor
from dflash_runtime.compute.gpu.device.driver_table import (
    CAPTURE_OF_THIS_THREAD,
    COPY_BY_ADDRESSES,
    EVENT_WITHOUT_TIME,
    FUNCTIONS,
    HIP_ATTRIBUTES,
    LIBRARIES,
    MAPPED_FOR_ALL_CONTEXTS,
    NON_BLOCKING_STREAM,
    NOT_READY,
    ON_DEVICE,
    OVERLAPS_PREVIOUS,
    READ_AND_WRITE,
    READ_ONLY,
    WITH_PEER_ACCESS,
    BlockAccess,
    BlockProperties,
    DeviceAttribute,
    FunctionAttribute,
    LaunchAttribute,
    LaunchConfig,
    MemoryHandle,
    MemoryPlace,
)

_NAME_BYTES = 256
_UUID_BYTES = 16
_PROPERTIES_BYTES = 8192
"""More than hipDeviceProp_t has in any version."""
_ARCHITECTURE = re.compile(rb"(gfx[0-9a-f]+(?::[a-z]+[+-])*)\0")
_OUT_OF_MEMORY = 2  # of both
_SPIN_S, _PAUSE_S = 0.05, 1e-4
"""A wait with a deadline spins for so long, then polls with pauses."""


class Driver:
    """The functions of `driver_table`, found in one library."""

    def __init__(self, vendor: Vendor, library: ctypes.CDLL) -> None:
        """Raises: DeviceUnavailable if a function is missing, or the driver cannot start."""
        self.vendor = vendor
        self._library = library
        self._functions: dict[str, Any] = {}
        for name, described in FUNCTIONS.items():
            symbol = described.cuda if vendor is Vendor.CUDA else described.hip
            if symbol is None:
                continue
            try:
                function = library[symbol]
            except AttributeError:
                if described.is_optional:
                    continue
                raise DeviceUnavailable(
                    f"the {vendor} driver {library._name} is too old: it has no {symbol}"
                ) from None
            function.argtypes = described.types
            function.restype = ctypes.c_int
            self._functions[name] = function
        self._contexts: dict[int, int] = {}
        # Shared by all launches, and never changed.
        overlaps = LaunchAttribute(id=OVERLAPS_PREVIOUS, value=1)
        self._overlaps_previous = ctypes.pointer(overlaps)
        self._call("init", 0)

    def has(self, name: str) -> bool:
        """Whether a function of the table that may be missing is there."""
        return name in self._functions

    # Devices

    def version(self) -> int:
        """1000 * major + 10 * minor of the supported version; AMD numbers it differently."""
        return self._int("version")

    def device_count(self) -> int:
        """How many devices this process can see."""
        return self._int("device_count")

    def device_name(self, index: int) -> str:
        """The vendor's name for it."""
        text = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("device_name", text, _NAME_BYTES, self._device(index))
        return one_line(text.value.decode(errors="replace").strip())

    def device_uuid(self, index: int) -> str:
        """Identifies the device in every process; 32 hexadecimal digits."""
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        self._call("device_uuid", uuid, self._device(index))
        return uuid.raw.hex()

    def pci_bus_id(self, index: int) -> str:
        """``0000:65:00.0``: its name below /sys/bus/pci/devices, but for upper case."""
        text = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("pci_bus_id", text, _NAME_BYTES, self._device(index))
        return one_line(text.value.decode(errors="replace").strip())

    def hip_architecture(self, index: int) -> str:
        """An AMD device's, ``gfx90a:sramecc+:xnack-``. Raises: DeviceUnavailable if it is not told.

        Where it lies in the properties differs from version to version, but nothing else there
        looks like it, behind the device's own name with which they begin.
        """
        for name in ("device_properties", "old_device_properties"):
            if self.has(name):
                properties = ctypes.create_string_buffer(_PROPERTIES_BYTES)
                self._call(name, properties, index)
                found = _ARCHITECTURE.search(properties.raw, _NAME_BYTES)
                if found is not None:
                    return found[1].decode()
        raise DeviceUnavailable(f"the hip driver does not tell the architecture of hip:{index}")

    def device_attribute(self, index: int, attribute: DeviceAttribute) -> int:
        """One property of a device."""
        number = HIP_ATTRIBUTES[attribute] if self.vendor is Vendor.HIP else int(attribute)
        return self._int("device_attribute", number, self._device(index))

    def use(self, index: int) -> None:
        """Make a device the calling thread's current one."""
        if self.vendor is Vendor.HIP:
            self._call("set_device", index)
            return
        context = self._contexts.get(index)
        if context is None:
            # The context that CuPy uses too; kept for the life of the process, as CuPy does.
            context = self._contexts[index] = self._handle("retain_context", self._device(index))
        status = self._functions["set_context"](context)
        if status:
            self._check("set_context", status)

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the current device, as the driver reports them."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("memory_info", byref(free), byref(total))
        return free.value, total.value

    # Kernels

    def load_module(self, binary: bytes) -> int:
        """Load machine code on the current device."""
        return self._handle("load_module", binary)

    def unload_module(self, module: int) -> None:
        """Unload it; its functions must not be running."""
        self._call("unload_module", module)

    def module_function(self, module: int, name: str) -> int:
        """A kernel, ready to be launched: nothing of it is loaded later, within a capture."""
        function = self._handle("module_function", module, name.encode())
        if self.has("load_function"):
            self._call("load_function", function)
        return function

    def parameter_bytes(self, function: int) -> int | None:
        """Size of a kernel's only parameter; None if the driver cannot say."""
        if not self.has("parameter_info"):
            return None
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("parameter_info", function, 0, byref(offset), byref(size))
        return size.value

    def function_attribute(self, function: int, attribute: FunctionAttribute) -> int:
        """One property of a kernel."""
        return self._int("function_attribute", int(attribute), function)

    def set_function_attribute(
        self, function: int, attribute: FunctionAttribute, value: int
    ) -> None:
        """Request the shared memory that a kernel needs; HIP needs no request."""
        if self.vendor is Vendor.CUDA:
            self._call("set_function_attribute", function, int(attribute), value)

    def launch_call(
        self,
        function: int,
        grid: tuple[int, int, int],
        block: int,
        *,
        args: ctypes.Structure,
        shared_bytes: int,
        stream: int,
        overlaps_previous: bool,
    ) -> Callable[[], int]:
        """What starts a kernel whose only parameter is a copy of `args`, which must outlive it, on
        the current device. Its result is a status for `check_launch`, if it is not 0.

        `overlaps_previous` is for devices that can, where the driver knows of it.
        """
        # Made or called for every kernel, so that all that can be is prepared or left out.
        parameters = byref(ctypes.c_void_p(ctypes.addressof(args)))
        launch = self._functions.get("launch_with_attributes") if overlaps_previous else None
        if launch is None:
            launch, size = self._functions["launch"], (*grid, block, 1, 1, shared_bytes)
            return partial(launch, function, *size, stream, parameters, None)
        config = LaunchConfig(*grid, block, 1, 1, shared_bytes, stream, self._overlaps_previous, 1)
        return partial(launch, byref(config), function, parameters, None)

    def check_launch(self, status: int) -> None:
        """Raises: DeviceUnavailable, DeviceOutOfMemory among them."""
        self._check("launch", status)

    # Streams and graphs

    def create_stream(self, *, priority: int = 0) -> int:
        """A non-blocking stream. With a priority below 0 its blocks are scheduled first."""
        if priority:
            return self._handle("create_stream_of_priority", NON_BLOCKING_STREAM, priority)
        return self._handle("create_stream", NON_BLOCKING_STREAM)

    def destroy_stream(self, stream: int) -> None:
        """Work in it is still completed."""
        self._call("destroy_stream", stream)

    def synchronize_stream(self, stream: int, deadline_s: float | None = None) -> None:
        """Wait until it is empty. Raises the error of a kernel that failed; DeviceUnavailable after
        `deadline_s`."""
        if deadline_s is None:
            self._call("synchronize_stream", stream)
            return
        started_s = time.monotonic()
        while not self.is_empty(stream):
            waited_s = time.monotonic() - started_s
            if waited_s > deadline_s:
                raise DeviceUnavailable(f"a copy has not ended within {deadline_s:g} s")
            if waited_s > _SPIN_S:
                time.sleep(_PAUSE_S)

    def is_empty(self, stream: int) -> bool:
        """Whether all work in a stream has ended. Raises the error of a kernel that failed."""
        status = self._functions["query_stream"](stream)
        if status != NOT_READY:
            self._check("query_stream", status)
        return bool(status != NOT_READY)

    def create_event(self) -> int:
        """A new event, not recorded yet."""
        return self._handle("create_event", EVENT_WITHOUT_TIME)

    def destroy_event(self, event: int) -> None:
        """Streams that wait for it still do."""
        self._call("destroy_event", event)

    def record_event(self, event: int, stream: int) -> None:
        """Record it: it completes when all work that is now in the stream has ended."""
        self._call("record_event", event, stream)

    def wait_for_event(self, stream: int, event: int) -> None:
        """Later work in the stream begins after the event's last record."""
        self._call("wait_for_event", stream, event, 0)

    def capture(self, stream: int, launch: Callable[[], None]) -> int:
        """Capture what `launch` puts into the stream as an executable graph.

        If `launch` raises, the capture ends and the stream is usable again.
        """
        self._call("begin_capture", stream, CAPTURE_OF_THIS_THREAD)
        graph = ctypes.c_void_p()
        try:
            launch()
        except BaseException:
            self._functions["end_capture"](stream, byref(graph))
            if graph.value:
                self._functions["destroy_graph"](graph)
            raise
        self._call("end_capture", stream, byref(graph))
        try:
            return self._handle("instantiate_graph", graph, 0)
        finally:
            self._call("destroy_graph", graph)

    def launch_graph(self, executable: int, stream: int) -> None:
        """Launch an executable graph."""
        self._call("launch_graph", executable, stream)

    def address_of(self, name: str) -> int:
        """Address of a function of the table, for compiled code."""
        return ctypes.cast(self._functions[name], ctypes.c_void_p).value or 0

    def destroy_graph(self, executable: int) -> None:
        """Destroy an executable graph."""
        self._call("destroy_executable", executable)

    # Memory

    def register_host(self, address: int, num_bytes: int, *, is_read_only: bool = False) -> int:
        """Lock host memory and map it; returns its device address. `is_read_only`: the process
        cannot write it, as pages of a file."""
        flags = MAPPED_FOR_ALL_CONTEXTS | (READ_ONLY if is_read_only else 0)
        self._call("register_host", address, num_bytes, flags)
        try:
            return self._handle("host_pointer", address, 0)
        except DeviceUnavailable:
            self.unregister_host(address)
            raise

    def unregister_host(self, address: int) -> None:
        """Unmap and unlock it."""
        self._call("unregister_host", address)

    def export_memory(self, num_bytes: int) -> tuple[int, bytes]:
        """New zeroed memory of the current device, and its handle for other processes."""
        address = self._handle("allocate", num_bytes)
        try:
            handle = MemoryHandle()
            self._call("export_memory", byref(handle), address)
            self._call("clear", address, 0, num_bytes, None)
            self._call("synchronize_stream", None)
        except BaseException:
            self.free(address)
            raise
        return address, bytes(handle.reserved)

    def free(self, address: int) -> None:
        """Free memory from `export_memory`; it must not be in use."""
        self._call("free", address)

    def import_memory(self, handle: bytes, num_bytes: int) -> int:
        """Another process's memory, as kernels of the device in use see it.

        Raises: DeviceUnavailable if that cannot be had, or has not so many bytes.
        """
        given = MemoryHandle.from_buffer_copy(handle)
        address = self._handle("import_memory", given, WITH_PEER_ACCESS)
        try:
            begin, size = ctypes.c_void_p(), ctypes.c_size_t()
            self._call("memory_range", byref(begin), byref(size), address)
            # The mapped allocation may be larger than the exported part, and begin before it.
            num_there = (begin.value or 0) + size.value - address
            if num_there < num_bytes:
                raise DeviceUnavailable(f"{num_there} bytes are exported, not {num_bytes}")
        except BaseException:
            self.close_memory(address)
            raise
        return address

    def close_memory(self, address: int) -> None:
        """Unmap memory from `import_memory`."""
        self._call("close_memory", address)

    def block_bytes(self, index: int) -> int:
        """Blocks behind a range of addresses have a multiple of so many bytes; 0: there are none,
        by this driver or on this device."""
        if not self.has("block_granularity"):
            return 0
        if not self.device_attribute(index, DeviceAttribute.MAPS_BLOCKS):
            return 0
        size = ctypes.c_size_t()
        self._call("block_granularity", byref(size), byref(_block_of(index)), 0)
        return size.value

    def reserve_addresses(self, num_bytes: int) -> int:
        """A range of addresses with no memory behind it."""
        return self._handle("reserve_addresses", num_bytes, 0, None, 0)

    def free_addresses(self, address: int, num_bytes: int) -> None:
        """Free a range; no block may be mapped there."""
        self._call("free_addresses", address, num_bytes)

    def map_block(self, index: int, address: int, num_bytes: int) -> None:
        """Put new memory of a device, uninitialised, behind a part of a range.

        Raises: DeviceOutOfMemory.
        """
        block = self._handle("create_block", num_bytes, byref(_block_of(index)), 0)
        try:
            self._call("map_block", address, num_bytes, 0, block, 0)
        finally:
            self._call("release_block", block)  # is kept until it is unmapped
        try:
            access = BlockAccess(MemoryPlace(ON_DEVICE, index), READ_AND_WRITE)
            self._call("allow_block", address, num_bytes, byref(access), 1)
        except BaseException:
            self.unmap_block(address, num_bytes)
            raise

    def unmap_block(self, address: int, num_bytes: int) -> None:
        """Give a block back; no kernel that may access it may be running."""
        self._call("unmap_block", address, num_bytes)

    def copy(self, destination: int, source: int, num_bytes: int, *, stream: int) -> None:
        """Copy between host and devices, in the order of the stream."""
        if self.vendor is Vendor.CUDA:
            self._call("copy", destination, source, num_bytes, stream)
        else:
            self._call("copy_of_kind", destination, source, num_bytes, COPY_BY_ADDRESSES, stream)

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        """Write zeros, in the order of the stream."""
        self._call("clear", address, 0, num_bytes, stream)

    # Calls

    def _device(self, index: int) -> int:
        return self._int("device", index)

    def _int(self, name: str, *args: Any) -> int:
        value = ctypes.c_int()
        self._call(name, byref(value), *args)
        return value.value

    def _handle(self, name: str, *args: Any) -> int:
        handle = ctypes.c_void_p()
        self._call(name, byref(handle), *args)
        return handle.value or 0

    def _call(self, name: str, *args: Any) -> None:
        function = self._functions.get(name)
        if function is None:
            raise DeviceUnavailable(f"the {self.vendor} driver has no {self._symbol(name)}")
        status = function(*args)
        if status:
            self._check(name, status)

    def _check(self, name: str, status: int) -> None:
        if status == _OUT_OF_MEMORY and name != "memory_info":
            free_bytes, total_bytes = self.memory_info()
            raise DeviceOutOfMemory(
                f"the {self.vendor} device",
                num_bytes=None,
                free_bytes=free_bytes,
                total_bytes=total_bytes,
                what=self._symbol(name),
            )
        if status:
            raise DeviceUnavailable(f"{self._symbol(name)}: {self._words_of(status)}")

    def _symbol(self, name: str) -> str:
        described = FUNCTIONS[name]
        return str(described.cuda if self.vendor is Vendor.CUDA else described.hip)

    def _words_of(self, status: int) -> str:
        if self.vendor is Vendor.CUDA:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(status), byref(text))
            words = text.value
        else:
            describe = self._library.hipGetErrorString
            describe.restype = ctypes.c_char_p
            words = describe(ctypes.c_int(status))
        known = words.decode(errors="replace") if words else "an error it does not know"
        return one_line(f"{known.strip()} (error {status})")


def _block_of(index: int) -> BlockProperties:
    """Memory of a device, which does not move."""
    return BlockProperties(type=1, place=MemoryPlace(ON_DEVICE, index))


@cache
def open_driver(vendor: Vendor) -> Driver:
    """The vendor's driver, once a process.

    Raises: DeviceUnavailable with the loader's or the driver's words.
    """
    reasons = []
    for name in LIBRARIES[vendor]:
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            reasons.append(one_line(str(error)))
            continue
        return Driver(vendor, library)
    raise DeviceUnavailable(f"no {vendor} driver: {reasons[0]}")
