"""The reference backend: numpy, float32 on dequantised weights. Slow and right."""

from dflash_runtime.compute.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
