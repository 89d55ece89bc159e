"""Block formats of GGML tensors: their layout, and a reference dequantiser."""

from dflash_adapters.quant.layouts import BlockLayout, TensorType

__all__ = ["BlockLayout", "TensorType"]
