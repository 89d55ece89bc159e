"""The reference backend: numpy, float32, on dequantised weights. Slow; what others are checked
against."""

from dflash_runtime.compute.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
