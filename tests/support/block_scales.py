"""Offsets of the scales in the blocks of quantised types."""

from __future__ import annotations

from dflash_adapters.quant import TensorType

SCALE_OFFSETS = {
    TensorType.Q4_0: (0,),
    TensorType.Q4_1: (0, 2),
    TensorType.Q5_0: (0,),
    TensorType.Q5_1: (0, 2),
    TensorType.Q8_0: (0,),
    TensorType.IQ4_NL: (0,),
    TensorType.Q2_K: (80, 82),
    TensorType.Q3_K: (108,),
    TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2),
    TensorType.Q6_K: (208,),
    TensorType.IQ4_XS: (0,),
    TensorType.IQ2_XXS: (0,),
    TensorType.IQ2_XS: (0,),
    TensorType.IQ2_S: (0,),
    TensorType.IQ3_XXS: (0,),
    TensorType.IQ3_S: (0,),
    TensorType.IQ1_S: (0,),
    TensorType.TQ1_0: (52,),
    TensorType.TQ2_0: (64,),
}
"""Byte offsets of the float16 scales, which random blocks get plausible values for."""
