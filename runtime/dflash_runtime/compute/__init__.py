"""Compute backends: Ops and expert FFNs on a device.

Knows nothing of placement, daemons or text.
"""

from __future__ import annotations

import logging
import sys

from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import AUTO_TIER
from dflash_runtime.compute.backend import BackendName, ComputeBackend, ExpertBank
from dflash_runtime.compute.cores import usable_cores

_LOG = logging.getLogger(__name__)

__all__ = ["BackendName", "ComputeBackend", "ExpertBank", "make_backend"]


def make_backend(
    name: BackendName, *, num_threads: int | None = None, cpu_tier: str = AUTO_TIER
) -> ComputeBackend:
    """A backend by name; ``auto`` is ``cpu`` where its kernels run, else ``reference``.

    Its libraries are imported only now. `num_threads` defaults to the physical cores we may use;
    `cpu_tier`, one of settings.CPU_TIERS, holds for all CPU backends of the process.
    Raises: SettingsError if the backend that was asked for cannot work on this machine.
    """
    if name is not BackendName.REFERENCE:
        try:
            import numba  # noqa: F401 - first, for it is what people install

            from dflash_runtime.compute.cpu import CpuBackend
            from dflash_runtime.compute.cpu.tiers import choose_tier
        except ImportError as error:
            first_line, *_ = str(error).splitlines() or [""]
            reason = f"{sys.executable} cannot run the cpu kernels ({first_line})"
            if name is BackendName.CPU:
                raise SettingsError(f"{reason}; install numba or use backend reference") from error
            return _reference(reason)
        choose_tier(cpu_tier)
        try:
            return CpuBackend(num_threads=num_threads or len(usable_cores()))
        except SettingsError as error:
            if name is BackendName.CPU:
                raise
            return _reference(str(error))
    return _reference()


def _reference(reason: str = "") -> ComputeBackend:
    """The reference backend; `reason` says why it is not a faster one."""
    from dflash_runtime.compute.reference import ReferenceBackend

    if reason:
        _LOG.warning("%s; computing with the slow reference backend", reason)
    return ReferenceBackend()
