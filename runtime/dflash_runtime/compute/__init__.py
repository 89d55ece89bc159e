"""Compute backends: Ops and expert FFNs on a device.

Knows nothing of placement, daemons or text.
"""

from __future__ import annotations

import logging
import os

from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.backend import BackendName, ComputeBackend, ExpertBank

_LOG = logging.getLogger(__name__)

__all__ = ["BackendName", "ComputeBackend", "ExpertBank", "make_backend", "usable_cores"]


def make_backend(name: BackendName, *, num_threads: int | None = None) -> ComputeBackend:
    """A backend by name; ``auto`` is ``cpu`` where its kernels run, else ``reference``.

    Its libraries are imported only now. `num_threads` defaults to the cores we may use.
    Raises: SettingsError if the backend that was asked for cannot work on this machine.
    """
    if name is not BackendName.REFERENCE:
        from dflash_runtime.compute.cpu import CpuBackend

        try:
            return CpuBackend(num_threads=num_threads or usable_cores())
        except SettingsError as error:
            if name is BackendName.CPU:
                raise
            _LOG.warning("%s; computing with the slow reference backend", error)
    from dflash_runtime.compute.reference import ReferenceBackend

    return ReferenceBackend()


def usable_cores() -> int:
    """Cores this process is allowed to run on."""
    return len(os.sched_getaffinity(0))
