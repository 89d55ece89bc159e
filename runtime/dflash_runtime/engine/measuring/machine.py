"""The devices of this machine, opened to be measured, and their box: kept, or measured now."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.device import CPU, Device, DeviceKind
from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.settings import Settings
from dflash_runtime.compute import BackendName, ComputeBackend, open_backend
from dflash_runtime.compute.devices import why_unusable
from dflash_runtime.compute.gpu.device.devices import VENDORS, GpuDescription, describe_gpus
from dflash_runtime.compute.gpu.device.driver import open_driver
from dflash_runtime.compute.kv_cache import KvType, chosen_kv_type
from dflash_runtime.compute.topology import read_topology
from dflash_runtime.engine.kernels_ahead import compile_kernels
from dflash_runtime.engine.measuring.kept import box_key, keep_box, kept_box
from dflash_runtime.engine.measuring.measure import (
    LIMIT_S,
    START_LIMIT_S,
    MeasuredDevice,
    OnProgress,
    chunk_to_measure,
    lacking,
    log_left_out,
    measure_box,
)
from dflash_runtime.engine.measuring.pcie import pcie_link
from dflash_runtime.placement.box import Box

_LOG = logging.getLogger(__name__)


def gpus_of_machine() -> list[GpuDescription]:
    """All GPUs that a driver names, usable or not."""
    return [gpu for kind in (DeviceKind.CUDA, DeviceKind.HIP) for gpu in describe_gpus(kind)[0]]


def devices_to_measure(settings: Settings, gpus: Sequence[GpuDescription]) -> tuple[Device, ...]:
    """The processor, and the settings' device; without one, every GPU that this Python can use."""
    if settings.device is not None:
        return tuple(dict.fromkeys((CPU, settings.device)))
    usable = [
        gpu.device for gpu in gpus if gpu.why_not is None and why_unusable(gpu.device.kind) is None
    ]
    return CPU, *usable


def box_of_machine(
    file: GgufFile,
    settings: Settings,
    *,
    measures_all: bool = False,
    devices: Sequence[Device] | None = None,
    on_progress: OnProgress = lambda what, num_done, num_total: None,
) -> Box:
    """The box of these devices, by default as `devices_to_measure`, and a model.

    What is kept from before is used, unless `measures_all`. Devices that are lacking there are
    measured, what plans need of them, within START_LIMIT_S once they are open and their kernels
    compiled, and that is logged.
    Raises: as measure_box; SettingsError for a device that cannot be used.
    """
    gpus, kv_type = gpus_of_machine(), chosen_kv_type(settings.kv_type, read_spec(file))
    if devices is None:
        devices = devices_to_measure(settings, gpus)
    key = key_of_machine(file, settings, gpus)
    known = None if measures_all else kept_box(key, settings.cache_dir)
    missing = lacking(known, [str(each) for each in devices])
    if known is not None and not missing:
        return known
    if not measures_all:
        names, limit_s = ", ".join(missing), START_LIMIT_S
        # docs: no measurement of this device with such a model is kept; it is made now, and kept
        # for the next start
        _LOG.warning("measuring %s, which takes up to %.0f s beside compiling", names, limit_s)
    began_s = time.monotonic()
    with _opened(file, settings, devices, gpus, kv_type, on_progress) as opened:
        box = measure_box(
            file,
            opened,
            key=key,
            kv_type=kv_type,
            known=known,
            limit_s=LIMIT_S if measures_all else START_LIMIT_S,
            for_plan=not measures_all,
            leaves_out=settings.device is None,
            on_progress=on_progress,
        )
    if not measures_all:
        # docs: opening devices, and compiling kernels for them, included
        _LOG.info("measured in %.1f s", time.monotonic() - began_s)
    keep_box(box, settings.cache_dir)
    return box


def key_of_machine(file: GgufFile, settings: Settings, gpus: Sequence[GpuDescription]) -> str:
    """The key of this machine's box for a model; `gpus`: all there are. Nothing is measured."""
    with contextlib.closing(_backend_of(CPU, settings)) as host:  # devices take longer to open
        return box_key(
            file,
            device_ids=[_identity(gpu) for gpu in gpus],
            classes=[host.numeric_class, f"threads {settings.threads}", _gpu_kernels()],
            topology=read_topology(),
            kv_type=chosen_kv_type(settings.kv_type, read_spec(file)),
        )


@contextlib.contextmanager
def _opened(
    file: GgufFile,
    settings: Settings,
    devices: Sequence[Device],
    gpus: Sequence[GpuDescription],
    kv_type: KvType,
    on_progress: OnProgress,
) -> Iterator[list[MeasuredDevice]]:
    """Backends of the devices, warmed up; the processor's first."""
    types = {tensor.tensor_type for tensor in file.tensors.values()}
    spec = read_spec(file)
    with contextlib.ExitStack() as undo:
        opened = []
        for device in sorted(devices, key=lambda each: each.kind is not DeviceKind.CPU):
            free_bytes = next((gpu.memory.room_bytes for gpu in gpus if gpu.device == device), None)
            chunk = None
            if free_bytes is not None:
                chunk = chunk_to_measure(file, kv_type=kv_type, free_bytes=free_bytes)
            compiled = partial(on_progress, f"{device}: compile")
            try:
                backend = _backend_of(device, settings, max_chunk=chunk)
                undo.callback(backend.close)
                backend.warm_up(
                    (each for each in types if not each.is_integer),
                    kv_type=kv_type,
                    is_recurrent=bool(spec.recurrent_layers),
                    beside_device=len(devices) > 1,
                    on_progress=compiled,
                )
                compile_kernels(
                    backend, file, kv_type=kv_type, asks_host=True, on_progress=compiled
                )
            except DeviceUnavailable as error:
                if device == CPU or settings.device is not None:
                    raise
                log_left_out(str(device), error)
                continue
            opened.append(MeasuredDevice(str(device), backend, _link_of(device, gpus)))
        yield opened


def _backend_of(device: Device, settings: Settings, max_chunk: int | None = None) -> ComputeBackend:
    """Raises: SettingsError, DeviceUnavailable."""
    is_host = device.kind is DeviceKind.CPU
    return open_backend(
        device,
        backend=BackendName(settings.backend) if is_host else BackendName.AUTO,
        num_threads=settings.threads or None,
        cpu_tier=settings.cpu_tier,
        cache_dir=settings.cache_dir,
        max_chunk=max_chunk,
    )


def _link_of(device: Device, gpus: Sequence[GpuDescription]) -> Callable[[], str]:
    bus_ids = [gpu.pci_bus_id for gpu in gpus if gpu.device == device]
    return lambda: pcie_link(bus_ids[0]) if bus_ids else ""


def _identity(gpu: GpuDescription) -> str:
    """Of a GPU with its driver."""
    version = 0
    with contextlib.suppress(DeviceUnavailable):
        version = open_driver(VENDORS[gpu.device.kind]).version()
    return f"{gpu.uuid} {gpu.pci_bus_id} {version}"


def _gpu_kernels() -> str:
    from dflash_runtime.compute.gpu.backend import KERNEL_VERSION

    return f"cupy-{KERNEL_VERSION}"
