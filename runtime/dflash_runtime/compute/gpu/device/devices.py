"""GPUs of this machine: their names, capabilities and free memory.

Asks the drivers themselves, so that what can be said without CuPy is said.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from dflash_protocol.device import Device, DeviceKind
from dflash_protocol.errors import DeviceUnavailable, DflashError
from dflash_runtime.compute.gpu.device.capabilities import (
    Capabilities,
    Vendor,
    cuda_capabilities,
    hip_capabilities,
)
from dflash_runtime.compute.gpu.device.driver import Driver, open_driver
from dflash_runtime.compute.gpu.device.driver_table import DeviceAttribute
from dflash_runtime.compute.memory import host_memory
from dflash_runtime.compute.system_files import text_of

_LOG = logging.getLogger(__name__)

VENDORS = {DeviceKind.CUDA: Vendor.CUDA, DeviceKind.HIP: Vendor.HIP}


_LARGE_BYTES = 1 << 20
_BLOCK_BYTES = 2 << 20
"""The driver gives more than `_LARGE_BYTES` in whole blocks, and cuts pieces up to that size from
blocks."""
_PIECE_BYTES = 512
"""CuPy's pool rounds to it."""

_STAYS_FREE, _STAYS_FREE_WITH_DISPLAY = 256 << 20, 768 << 20
_MOST_OUTPUTS = 64

CONTEXT_BYTES = 560 << 20
"""What the driver takes at most for a process that uses a device, before anything is allocated."""


def allocated(num_bytes: int) -> int:
    """Memory that an array of so many bytes takes from the driver."""
    unit = _BLOCK_BYTES if num_bytes > _LARGE_BYTES else _PIECE_BYTES
    return -(-num_bytes // unit) * unit


@dataclass(frozen=True)
class DeviceMemory:
    """In bytes, at one moment."""

    free_bytes: int
    total_bytes: int
    is_shared_with_host: bool
    """Processor and GPU share this memory: what one takes, the other lacks."""
    note: str = ""
    """How the driver's figures were corrected; empty: they were not."""
    stays_free_bytes: int = 0
    """What is to be left to others: the desktop, or the driver itself."""

    @property
    def room_bytes(self) -> int:
        """Free, without what stays free."""
        return max(0, self.free_bytes - self.stays_free_bytes)


@dataclass(frozen=True)
class GpuDescription:
    """One GPU, usable or not."""

    device: Device
    name: str
    uuid: str
    pci_bus_id: str
    memory: DeviceMemory
    """As before this process took anything there: plans count what the driver takes for it."""
    capabilities: Capabilities | None
    """None if `why_not` says why it cannot be used."""
    why_not: str | None


def memory_of(driver: Driver, index: int) -> DeviceMemory:
    """Memory of a device, which becomes the calling thread's current one.

    Raises: DeviceUnavailable.
    """
    driver.use(index)
    free_bytes, total_bytes = driver.memory_info()
    is_shared = bool(driver.device_attribute(index, DeviceAttribute.INTEGRATED))
    memory = corrected_memory(
        free_bytes, total_bytes, host_free_bytes=host_memory().free_bytes if is_shared else None
    )
    if memory.note:
        # docs: the driver reports more free memory than there is, as for memory shared with the
        # host; counted as all of it
        _LOG.warning("memory of %s:%d: %s", driver.vendor, index, memory.note)
    return replace(memory, stays_free_bytes=_stays_free_bytes(driver, index))


def _before_context(memory: DeviceMemory) -> DeviceMemory:
    """Asking a device how much is free took a context there. What the driver shares with the host
    is left as it is: the host's free memory is all that there is."""
    if memory.is_shared_with_host:
        return memory
    free_bytes = min(memory.free_bytes + CONTEXT_BYTES, memory.total_bytes)
    return replace(memory, free_bytes=free_bytes)


def corrected_memory(
    free_bytes: int, total_bytes: int, *, host_free_bytes: int | None = None
) -> DeviceMemory:
    """What a driver reports, clamped to what there can be.

    Drivers of memory that is shared with the host report more free than there is in all: free
    pages of the system, beside the part that was set aside for the GPU. It is counted as all of it.
    `host_free_bytes`: of memory that is shared, what the host has free; None: it is not shared. No
    more than that can be had, as it is one pool.
    """
    note = ""
    if free_bytes > total_bytes:
        note = (
            f"the driver reports {free_bytes:,} of {total_bytes:,} bytes free; "
            f"counted as {total_bytes:,}"
        )
    free_bytes = min(free_bytes, total_bytes)
    if host_free_bytes is not None:
        free_bytes = min(free_bytes, host_free_bytes)
    return DeviceMemory(free_bytes, total_bytes, host_free_bytes is not None, note)


def _stays_free_bytes(driver: Driver, index: int) -> int:
    """More where a display hangs on the device: the driver stops long kernels for its sake, or the
    system says that one is connected."""
    has_display = driver.device_attribute(index, DeviceAttribute.KERNEL_TIMEOUT) > 0
    has_display = has_display or is_display_connected(driver.pci_bus_id(index))
    return _STAYS_FREE_WITH_DISPLAY if has_display else _STAYS_FREE


def is_display_connected(pci_bus_id: str, root: Path = Path("/")) -> bool:
    """Whether the system says that a display is connected to a GPU. Drivers without kernel mode
    setting do not tell."""
    outputs = root.joinpath("sys/bus/pci/devices", pci_bus_id.lower(), "drm")
    try:
        found = islice(outputs.glob("card*/card*-*/status"), _MOST_OUTPUTS)
        return any(text_of(path) == "connected" for path in found)
    except (OSError, ValueError):
        return False


def capabilities_of(driver: Driver, index: int) -> Capabilities:
    """Capabilities of a device.

    Raises: SettingsError if our kernels cannot run on it, DeviceUnavailable.
    """
    if driver.vendor is Vendor.HIP:
        return hip_capabilities(driver.hip_architecture(index))
    return cuda_capabilities(
        driver.device_attribute(index, DeviceAttribute.COMPUTE_CAPABILITY_MAJOR),
        driver.device_attribute(index, DeviceAttribute.COMPUTE_CAPABILITY_MINOR),
    )


OUTLIVED_POOLS: deque[Callable[[], bool]] = deque()
"""Of closed devices that still had arrays, as an engine has that was closed a moment ago, or an
error's traceback: each returns to the driver what arrays have left in a pool of memory since, which
CuPy does not do by itself, and says whether the pool is empty then."""


def empty_outlived_pools() -> None:
    """Return to the drivers what arrays of closed devices have left in their pools."""
    for _ in range(len(OUTLIVED_POOLS)):
        pool = OUTLIVED_POOLS.popleft()
        if not pool():
            OUTLIVED_POOLS.append(pool)


def describe_gpus(kind: DeviceKind) -> tuple[list[GpuDescription], str | None]:
    """All GPUs of a kind; if there are none, the reason. One that fails does not hide the rest."""
    empty_outlived_pools()
    try:
        driver = open_driver(VENDORS[kind])
        count = driver.device_count()
    except DeviceUnavailable as error:
        return [], str(error)
    found = []
    for index in range(count):
        try:
            found.append(_describe(driver, Device(kind, index)))
        except DeviceUnavailable as error:
            # docs: a GPU does not answer its driver; the others are used
            _LOG.warning("%s does not answer: %s", Device(kind, index), error)
    return found, None if found else f"the {kind} driver sees no device"


def _describe(driver: Driver, device: Device) -> GpuDescription:
    capabilities, why_not = None, None
    try:
        capabilities = capabilities_of(driver, device.index)
    except DflashError as error:
        why_not = str(error)
    return GpuDescription(
        device=device,
        name=driver.device_name(device.index),
        uuid=driver.device_uuid(device.index),
        pci_bus_id=driver.pci_bus_id(device.index),
        memory=_before_context(memory_of(driver, device.index)),
        capabilities=capabilities,
        why_not=why_not,
    )
