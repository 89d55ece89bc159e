"""The ``cpu`` backend: kernels compiled for this CPU by numba."""

from dflash_runtime.compute.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
