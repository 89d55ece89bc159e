"""Block formats of GGML tensors: sizes in `layouts`, a slow dequantiser in `reference`."""

from dflash_adapters.quant.layouts import BlockLayout, TensorType

__all__ = ["BlockLayout", "TensorType"]
