"""Functions of the two vendors' drivers that we call, under one name each, with their types.

CuPy does the same for what it needs; here is what it cannot do on HIP or does not know: launches
that overlap, capture into graphs, memory of the host that kernels see.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from dflash_runtime.compute.gpu.device.capabilities import Vendor

_OUT = POINTER(c_void_p)
_OUT_INT = POINTER(c_int)
_OUT_SIZE = POINTER(c_size_t)

HANDLE_BYTES = 64
"""Bytes of a handle for memory that another process may import."""


class MemoryHandle(ctypes.Structure):
    """CUipcMemHandle, hipIpcMemHandle_t: passed by value."""

    _fields_ = (("reserved", c_ubyte * HANDLE_BYTES),)


class MemoryPlace(ctypes.Structure):
    """CUmemLocation: a device."""

    _fields_ = (("type", c_int), ("index", c_int))


class BlockProperties(ctypes.Structure):
    """CUmemAllocationProp, without what stays 0."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("place", MemoryPlace),
        ("rest", c_uint64 * 2),
    )


class BlockAccess(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("place", MemoryPlace), ("flags", c_int))


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute; of the union in it only the int is used."""

    _fields_ = (
        ("id", c_int),
        ("padding", c_int),
        ("value", c_int),
        ("rest_of_value", c_int * 15),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"grid_{axis}", c_uint) for axis in "xyz"),
        *((f"block_{axis}", c_uint) for axis in "xyz"),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(LaunchAttribute)),
        ("num_attributes", c_uint),
    )


@dataclass(frozen=True)
class DriverFunction:
    """One function. None = the vendor has none."""

    cuda: str | None
    hip: str | None
    types: tuple[Any, ...]
    is_optional: bool = False
    """Older drivers may lack it."""


_LAUNCH = (c_void_p, *(c_uint,) * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p))

FUNCTIONS = {
    "init": DriverFunction("cuInit", "hipInit", (c_uint,)),
    "version": DriverFunction("cuDriverGetVersion", "hipDriverGetVersion", (_OUT_INT,)),
    "device_count": DriverFunction("cuDeviceGetCount", "hipGetDeviceCount", (_OUT_INT,)),
    "device": DriverFunction("cuDeviceGet", "hipDeviceGet", (_OUT_INT, c_int)),
    "device_name": DriverFunction("cuDeviceGetName", "hipDeviceGetName", (c_char_p, c_int, c_int)),
    "device_uuid": DriverFunction("cuDeviceGetUuid_v2", "hipDeviceGetUuid", (c_char_p, c_int)),
    "pci_bus_id": DriverFunction(
        "cuDeviceGetPCIBusId", "hipDeviceGetPCIBusId", (c_char_p, c_int, c_int)
    ),
    # The first is that of ROCm 6 on; their structs differ.
    "device_properties": DriverFunction(
        None, "hipGetDevicePropertiesR0600", (c_char_p, c_int), is_optional=True
    ),
    "old_device_properties": DriverFunction(
        None, "hipGetDeviceProperties", (c_char_p, c_int), is_optional=True
    ),
    "device_attribute": DriverFunction(
        "cuDeviceGetAttribute", "hipDeviceGetAttribute", (_OUT_INT, c_int, c_int)
    ),
    # HIP has a current device, CUDA a current context.
    "retain_context": DriverFunction("cuDevicePrimaryCtxRetain", None, (_OUT, c_int)),
    "set_context": DriverFunction("cuCtxSetCurrent", None, (c_void_p,)),
    "set_device": DriverFunction(None, "hipSetDevice", (c_int,)),
    "memory_info": DriverFunction("cuMemGetInfo_v2", "hipMemGetInfo", (_OUT_SIZE, _OUT_SIZE)),
    "load_module": DriverFunction("cuModuleLoadData", "hipModuleLoadData", (_OUT, c_char_p)),
    "unload_module": DriverFunction("cuModuleUnload", "hipModuleUnload", (c_void_p,)),
    "module_function": DriverFunction(
        "cuModuleGetFunction", "hipModuleGetFunction", (_OUT, c_void_p, c_char_p)
    ),
    "load_function": DriverFunction("cuFuncLoad", None, (c_void_p,), is_optional=True),
    "parameter_info": DriverFunction(
        "cuFuncGetParamInfo",
        None,
        (c_void_p, c_size_t, _OUT_SIZE, _OUT_SIZE),
        is_optional=True,
    ),
    "function_attribute": DriverFunction(
        "cuFuncGetAttribute", "hipFuncGetAttribute", (_OUT_INT, c_int, c_void_p)
    ),
    # On HIP that takes functions of the runtime alone, and nothing has to be asked for.
    "set_function_attribute": DriverFunction("cuFuncSetAttribute", None, (c_void_p, c_int, c_int)),
    "launch": DriverFunction("cuLaunchKernel", "hipModuleLaunchKernel", _LAUNCH),
    "launch_with_attributes": DriverFunction(
        "cuLaunchKernelEx",
        None,
        (POINTER(LaunchConfig), c_void_p, POINTER(c_void_p), POINTER(c_void_p)),
        is_optional=True,
    ),
    "create_stream": DriverFunction("cuStreamCreate", "hipStreamCreateWithFlags", (_OUT, c_uint)),
    "destroy_stream": DriverFunction("cuStreamDestroy_v2", "hipStreamDestroy", (c_void_p,)),
    "synchronize_stream": DriverFunction(
        "cuStreamSynchronize", "hipStreamSynchronize", (c_void_p,)
    ),
    # Lower numbers go first; those beyond what a device knows are taken for the nearest.
    "create_stream_of_priority": DriverFunction(
        "cuStreamCreateWithPriority", "hipStreamCreateWithPriority", (_OUT, c_uint, c_int)
    ),
    "query_stream": DriverFunction("cuStreamQuery", "hipStreamQuery", (c_void_p,)),
    "create_event": DriverFunction("cuEventCreate", "hipEventCreateWithFlags", (_OUT, c_uint)),
    "destroy_event": DriverFunction("cuEventDestroy_v2", "hipEventDestroy", (c_void_p,)),
    "record_event": DriverFunction("cuEventRecord", "hipEventRecord", (c_void_p, c_void_p)),
    "wait_for_event": DriverFunction(
        "cuStreamWaitEvent", "hipStreamWaitEvent", (c_void_p, c_void_p, c_uint)
    ),
    "begin_capture": DriverFunction(
        "cuStreamBeginCapture_v2", "hipStreamBeginCapture", (c_void_p, c_int)
    ),
    "end_capture": DriverFunction("cuStreamEndCapture", "hipStreamEndCapture", (c_void_p, _OUT)),
    "instantiate_graph": DriverFunction(
        "cuGraphInstantiateWithFlags", "hipGraphInstantiateWithFlags", (_OUT, c_void_p, c_uint64)
    ),
    "launch_graph": DriverFunction("cuGraphLaunch", "hipGraphLaunch", (c_void_p, c_void_p)),
    "destroy_graph": DriverFunction("cuGraphDestroy", "hipGraphDestroy", (c_void_p,)),
    "destroy_executable": DriverFunction("cuGraphExecDestroy", "hipGraphExecDestroy", (c_void_p,)),
    "register_host": DriverFunction(
        "cuMemHostRegister_v2", "hipHostRegister", (c_void_p, c_size_t, c_uint)
    ),
    "unregister_host": DriverFunction("cuMemHostUnregister", "hipHostUnregister", (c_void_p,)),
    "host_pointer": DriverFunction(
        "cuMemHostGetDevicePointer_v2", "hipHostGetDevicePointer", (_OUT, c_void_p, c_uint)
    ),
    "allocate": DriverFunction("cuMemAlloc_v2", "hipMalloc", (_OUT, c_size_t)),
    "free": DriverFunction("cuMemFree_v2", "hipFree", (c_void_p,)),
    "export_memory": DriverFunction(
        "cuIpcGetMemHandle",
        "hipIpcGetMemHandle",
        (POINTER(MemoryHandle), c_void_p),
        is_optional=True,
    ),
    "import_memory": DriverFunction(
        "cuIpcOpenMemHandle_v2",
        "hipIpcOpenMemHandle",
        (_OUT, MemoryHandle, c_uint),
        is_optional=True,
    ),
    "close_memory": DriverFunction(
        "cuIpcCloseMemHandle", "hipIpcCloseMemHandle", (c_void_p,), is_optional=True
    ),
    "memory_range": DriverFunction(
        "cuMemGetAddressRange_v2",
        "hipMemGetAddressRange",
        (_OUT, _OUT_SIZE, c_void_p),
        is_optional=True,
    ),
    # Blocks of memory behind a range of addresses. HIP has the same, which nobody has tried.
    "block_granularity": DriverFunction(
        "cuMemGetAllocationGranularity",
        None,
        (_OUT_SIZE, POINTER(BlockProperties), c_int),
        is_optional=True,
    ),
    "reserve_addresses": DriverFunction(
        "cuMemAddressReserve",
        None,
        (_OUT, c_size_t, c_size_t, c_void_p, c_uint64),
        is_optional=True,
    ),
    "free_addresses": DriverFunction(
        "cuMemAddressFree", None, (c_void_p, c_size_t), is_optional=True
    ),
    "create_block": DriverFunction(
        "cuMemCreate", None, (_OUT, c_size_t, POINTER(BlockProperties), c_uint64), is_optional=True
    ),
    "release_block": DriverFunction("cuMemRelease", None, (c_void_p,), is_optional=True),
    "map_block": DriverFunction(
        "cuMemMap", None, (c_void_p, c_size_t, c_size_t, c_void_p, c_uint64), is_optional=True
    ),
    "unmap_block": DriverFunction("cuMemUnmap", None, (c_void_p, c_size_t), is_optional=True),
    "allow_block": DriverFunction(
        "cuMemSetAccess",
        None,
        (c_void_p, c_size_t, POINTER(BlockAccess), c_size_t),
        is_optional=True,
    ),
    # HIP's takes the kind of copy too, of which 4 = by the addresses.
    "copy": DriverFunction("cuMemcpyAsync", None, (c_void_p, c_void_p, c_size_t, c_void_p)),
    "copy_of_kind": DriverFunction(
        None, "hipMemcpyAsync", (c_void_p, c_void_p, c_size_t, c_int, c_void_p)
    ),
    # Of both vendors alike, for compiled code.
    "copy_to_device": DriverFunction(
        "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync", (c_void_p, c_void_p, c_size_t, c_void_p)
    ),
    "clear": DriverFunction(
        "cuMemsetD8Async", "hipMemsetD8Async", (c_void_p, c_ubyte, c_size_t, c_void_p)
    ),
}

LIBRARIES = {
    Vendor.CUDA: ("libcuda.so.1",),
    Vendor.HIP: ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"),
}


class DeviceAttribute(IntEnum):
    """Device attributes, numbered as in CUDA."""

    MULTIPROCESSORS = 16
    KERNEL_TIMEOUT = 17
    """Not 0: kernels are stopped after some time, as a display hangs on the device."""
    INTEGRATED = 18
    COMPUTE_CAPABILITY_MAJOR = 75
    COMPUTE_CAPABILITY_MINOR = 76
    MAX_SHARED_BYTES = 97
    MAPS_BLOCKS = 102
    """Not 0: blocks of memory can be mapped behind a range of addresses."""
    WALL_CLOCK_KHZ = -1
    """Attributes that only AMD has."""


HIP_ATTRIBUTES = {
    DeviceAttribute.MULTIPROCESSORS: 63,
    DeviceAttribute.INTEGRATED: 16,
    DeviceAttribute.KERNEL_TIMEOUT: 18,
    DeviceAttribute.COMPUTE_CAPABILITY_MAJOR: 23,
    DeviceAttribute.COMPUTE_CAPABILITY_MINOR: 61,
    DeviceAttribute.MAX_SHARED_BYTES: 74,
    DeviceAttribute.WALL_CLOCK_KHZ: 10017,
}
"""The attributes' numbers in HIP since ROCm 5."""


class FunctionAttribute(IntEnum):
    """Kernel attributes; CUDA and HIP number them alike."""

    STATIC_SHARED_BYTES = 1
    MAX_DYNAMIC_SHARED_BYTES = 8
    LARGE_CLUSTERS_ALLOWED = 14


OVERLAPS_PREVIOUS = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""
CAPTURE_OF_THIS_THREAD = 1
NON_BLOCKING_STREAM = 1
WITH_PEER_ACCESS = 1
EVENT_WITHOUT_TIME = 2
NOT_READY = 600
"""Status of a stream that is not empty; not an error."""
MAPPED_FOR_ALL_CONTEXTS, READ_ONLY = 3, 8
COPY_BY_ADDRESSES = 4
ON_DEVICE, READ_AND_WRITE = 1, 3
