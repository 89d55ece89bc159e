"""Compute backends: Ops and expert FFNs on a device.

Knows nothing of placement, daemons or text.
"""

from __future__ import annotations

import os

from dflash_runtime.compute.backend import BackendName, ComputeBackend, ExpertBank

__all__ = ["BackendName", "ComputeBackend", "ExpertBank", "make_backend", "usable_cores"]


def make_backend(name: BackendName, *, num_threads: int | None = None) -> ComputeBackend:
    """A backend by name; ``auto`` is ``cpu``. Its libraries are imported only now.

    `num_threads` defaults to the cores this process may use.
    """
    if name is BackendName.REFERENCE:
        from dflash_runtime.compute.reference import ReferenceBackend

        return ReferenceBackend()
    from dflash_runtime.compute.cpu import CpuBackend

    return CpuBackend(num_threads=num_threads or usable_cores())


def usable_cores() -> int:
    """Cores this process is allowed to run on."""
    return len(os.sched_getaffinity(0))
