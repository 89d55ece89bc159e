"""Opens the backend of a device, or says why it cannot be used.

The one place where a backend is registered; its libraries are imported only when it is opened.
"""

from __future__ import annotations

import importlib
import logging
import sys
from importlib.util import find_spec
from typing import Any

from dflash_protocol.device import CPU, Device, DeviceKind
from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import AUTO_TIER
from dflash_runtime.compute.backend import BackendName, ComputeBackend
from dflash_runtime.compute.slot_pins import NO_PINS, WarmPins

_LOG = logging.getLogger(__name__)

_GPU_MODULE = "dflash_runtime.compute.gpu.backend"
"""Has ``CupyBackend(device, cache_dir=…)``, for the vendor that CuPy was built for."""
_CUPY = {
    DeviceKind.CUDA: {"CUDA 12": "cupy-cuda12x>=13,<15", "CUDA 13": "cupy-cuda13x>=13.6,<15"},
    DeviceKind.HIP: {"ROCm 7": "cupy-rocm-7-0>=14,<15"},
}
"""Packages for pip, the same as in our extras. The extras themselves cannot be named: pip does not
find this project by name in a clone."""


def open_backend(
    device: Device | None,
    *,
    backend: BackendName = BackendName.AUTO,
    num_threads: int | None = None,
    cpu_tier: str = AUTO_TIER,
    cache_dir: str | None = None,
    max_chunk: int | None = None,
    cache_slots: int = 0,
    slot_pins: WarmPins = NO_PINS,
) -> ComputeBackend:
    """Open the backend of a device, by default the CPU; for the arguments see `make_backend`. Of a
    GPU: `max_chunk`, the most tokens of a prompt chunk; `cache_slots`, experts that steps may keep
    of a layer besides those that are loaded, where these are not all; `slot_pins`, which of those
    do not leave.

    Raises: SettingsError with advice if the device cannot be used.
    """
    device = device or CPU
    if device.kind is DeviceKind.CPU:
        return make_backend(
            backend, num_threads=num_threads, cpu_tier=cpu_tier, cache_dir=cache_dir
        )
    if backend is not BackendName.AUTO:
        raise SettingsError(
            f"backend {backend} does not compute on {device}; use backend auto, or device cpu"
        )
    reason = why_unusable(device.kind)
    if reason is not None:
        raise SettingsError(f"device {device}: {reason}, or use device cpu")
    options: dict[str, Any] = {} if max_chunk is None else {"max_chunk": max_chunk}
    if cache_slots:
        options |= {"cache_slots": cache_slots, "slot_pins": slot_pins}
    return _open_gpu(device, cache_dir, **options)


def why_unusable(kind: DeviceKind) -> str | None:
    """Why this interpreter cannot use devices of a kind, with advice; None if it can.

    Does not check that the machine has such a device.
    """
    if kind is DeviceKind.CPU:
        return None
    try:
        importlib.import_module("cupy")
    except ImportError as error:
        first_line, *_ = str(error).splitlines() or [""]
        choices = " or ".join(f"'{what}' ({version})" for version, what in _CUPY[kind].items())
        advice = f"{sys.executable} -m pip install {choices}"
        return f"{sys.executable} has no CuPy ({first_line}); install it with {advice}"
    if find_spec(_GPU_MODULE) is None:
        return "this version of dflash-moe has no kernels for it; install a newer one"
    return None


def make_backend(
    name: BackendName,
    *,
    num_threads: int | None = None,
    cpu_tier: str = AUTO_TIER,
    cache_dir: str | None = None,
) -> ComputeBackend:
    """Make a CPU backend by name; ``auto`` is ``cpu`` where its kernels run, else ``reference``.

    `num_threads` defaults to what suits the machine and the model (`CpuBackend.choose_threads`);
    `cpu_tier`, one of settings.CPU_TIERS, applies to all CPU backends of the process. Compiled
    kernels are kept in `cache_dir` (see `settings.cache_folder`).
    Raises: SettingsError if the named backend does not work on this machine.
    """
    if name is not BackendName.REFERENCE:
        try:
            import numba  # noqa: F401 - first, so that the error names what is to be installed

            from dflash_runtime.compute.cpu import CpuBackend
            from dflash_runtime.compute.cpu.compile.tiers import choose_tier
        except ImportError as error:
            first_line, *_ = str(error).splitlines() or [""]
            reason = f"{sys.executable} cannot run the cpu kernels ({first_line})"
            if name is BackendName.CPU:
                raise SettingsError(f"{reason}; install numba or use backend reference") from error
            return _reference(reason)
        choose_tier(cpu_tier, cache_dir)
        try:
            return CpuBackend(num_threads=num_threads, cache_dir=cache_dir)
        except SettingsError as error:
            if name is BackendName.CPU:
                raise
            return _reference(str(error))
    return _reference()


def _reference(reason: str = "") -> ComputeBackend:
    """The reference backend; `reason` says why a faster one was not used."""
    from dflash_runtime.compute.reference import ReferenceBackend

    if reason:
        # docs: the interpreter has no numba, or one that does not fit: `dflash-moe doctor`
        _LOG.warning("%s; computing with the slow reference backend", reason)
    return ReferenceBackend()


def _open_gpu(device: Device, cache_dir: str | None, **options: Any) -> ComputeBackend:
    module = importlib.import_module(_GPU_MODULE)
    backend: ComputeBackend = module.CupyBackend(device, cache_dir=cache_dir, **options)
    return backend
