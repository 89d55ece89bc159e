"""GPUs of this machine: their names, capabilities and free memory.

Asks the drivers themselves, so that what can be said without CuPy is said.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

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

_LOG = logging.getLogger(__name__)

VENDORS = {DeviceKind.CUDA: Vendor.CUDA, DeviceKind.HIP: Vendor.HIP}


@dataclass(frozen=True)
class DeviceMemory:
    """In bytes, at one moment."""

    free_bytes: int
    total_bytes: int
    is_shared_with_host: bool
    """Processor and GPU share this memory."""
    note: str = ""
    """How the driver's figures were corrected; empty: they were not."""


@dataclass(frozen=True)
class GpuDescription:
    """One GPU, usable or not."""

    device: Device
    name: str
    uuid: str
    pci_bus_id: str
    memory: DeviceMemory
    capabilities: Capabilities | None
    """None if `why_not` says why it cannot be used."""
    why_not: str | None


def memory_of(driver: Driver, index: int) -> DeviceMemory:
    """Memory of a device, which becomes the calling thread's current one.

    Drivers of memory that is shared with the host report more free than there is in all: free
    pages of the system, beside the part that was set aside for the GPU. It is counted as all of it.
    Raises: DeviceUnavailable.
    """
    driver.use(index)
    free_bytes, total_bytes = driver.memory_info()
    is_shared = bool(driver.device_attribute(index, DeviceAttribute.INTEGRATED))
    if free_bytes <= total_bytes:
        return DeviceMemory(free_bytes, total_bytes, is_shared)
    note = (
        f"the driver reports {free_bytes:,} of {total_bytes:,} bytes free; "
        f"counted as {total_bytes:,}"
    )
    # docs: the driver reports more free memory than there is, as for memory shared with the host;
    # counted as all of it
    _LOG.warning("memory of %s:%d: %s", driver.vendor, index, note)
    return DeviceMemory(total_bytes, total_bytes, is_shared, note)


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


def describe_gpus(kind: DeviceKind) -> tuple[list[GpuDescription], str | None]:
    """All GPUs of a kind; if there are none, the reason. One that fails does not hide the rest."""
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
        memory=memory_of(driver, device.index),
        capabilities=capabilities,
        why_not=why_not,
    )
