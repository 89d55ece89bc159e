"""Opening the backend of a device: which module serves which kind, and why one cannot be used.

The one place to plug a backend in; its libraries are imported only when it is asked for. Knows
nothing of models.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec

from dflash_protocol.device import CPU, Device, DeviceKind
from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import AUTO_TIER
from dflash_runtime.compute.backend import BackendName, ComputeBackend
from dflash_runtime.compute.cores import usable_cores

_LOG = logging.getLogger(__name__)

_GPU_MODULE = "dflash_runtime.compute.gpu.backend"
"""Has ``CupyBackend(device, cache_dir=…)``, for the vendor that CuPy was built for."""
_CUPY = {
    DeviceKind.CUDA: {"CUDA 12": "cupy-cuda12x>=13,<15", "CUDA 13": "cupy-cuda13x>=13.6,<15"},
    DeviceKind.HIP: {"ROCm 7": "cupy-rocm-7-0>=14,<15"},
}
"""What pip installs for each, as our extras do. By this name it can be had wherever we came from:
an extra of ours can be named only where pip finds us, which is not so in a clone."""


def choose_device(device: Device | None) -> Device:
    """The device that is asked for; of None, which asks for none, the CPU."""
    return CPU if device is None else device


def open_backend(
    device: Device | None,
    *,
    backend: BackendName = BackendName.AUTO,
    num_threads: int | None = None,
    cpu_tier: str = AUTO_TIER,
    cache_dir: str | None = None,
) -> ComputeBackend:
    """The backend of a device, None = `choose_device`'s; the arguments are `make_backend`'s.

    Raises: SettingsError that says what to do if the device cannot be used.
    """
    device = choose_device(device)
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
    return _LOADERS[device.kind](device, cache_dir)


def why_unusable(kind: DeviceKind) -> str | None:
    """Why this interpreter can use no device of a kind, and what to do; None if it may.

    Whether there is such a device is not asked.
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
    """A backend of the CPU by name; ``auto`` is ``cpu`` where its kernels run, else ``reference``.

    `num_threads` defaults to the physical cores we may use; `cpu_tier`, one of settings.CPU_TIERS,
    holds for all CPU backends of the process. What is compiled for the backend is kept in
    `cache_dir`, as `settings.cache_folder` has it.
    Raises: SettingsError if the backend that was asked for cannot work on this machine.
    """
    if name is not BackendName.REFERENCE:
        try:
            import numba  # noqa: F401 - first, for it is what people install

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
            return CpuBackend(num_threads=num_threads or len(usable_cores()), cache_dir=cache_dir)
        except SettingsError as error:
            if name is BackendName.CPU:
                raise
            return _reference(str(error))
    return _reference()


def _reference(reason: str = "") -> ComputeBackend:
    """The reference backend; `reason` says why it is not a faster one."""
    from dflash_runtime.compute.reference import ReferenceBackend

    if reason:
        # docs: the interpreter has no numba, or one that does not fit: `dflash-moe doctor`
        _LOG.warning("%s; computing with the slow reference backend", reason)
    return ReferenceBackend()


def _open_gpu(device: Device, cache_dir: str | None) -> ComputeBackend:
    module = importlib.import_module(_GPU_MODULE)
    backend: ComputeBackend = module.CupyBackend(device, cache_dir=cache_dir)
    return backend


_LOADERS: dict[DeviceKind, Callable[[Device, str | None], ComputeBackend]] = {
    DeviceKind.CUDA: _open_gpu,
    DeviceKind.HIP: _open_gpu,
}
