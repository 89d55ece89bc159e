"""Compute backends: models and expert FFNs on one device.

Independent of placement, daemons and text.
"""

from __future__ import annotations

from dflash_runtime.compute.backend import (
    DAEMON_MEMORY_ADVICE,
    MEMORY_ADVICE,
    BackendName,
    ComputeBackend,
    ExpertBank,
)
from dflash_runtime.compute.devices import make_backend, open_backend

__all__ = [
    "DAEMON_MEMORY_ADVICE",
    "MEMORY_ADVICE",
    "BackendName",
    "ComputeBackend",
    "ExpertBank",
    "make_backend",
    "open_backend",
]
