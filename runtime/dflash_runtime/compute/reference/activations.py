"""What stands between gate/up and down, in plain numpy: the formula every kernel is held to.

Knows nothing of matrices.
"""

from __future__ import annotations

import numpy as np

from dflash_adapters.moe_spec import MoeLayer
from dflash_protocol.ids import F32Array


def activate(layer: MoeLayer, gate: F32Array, up: F32Array) -> F32Array:
    """The input of an expert's down projection, by the layer's activation and its parameters.

    Shapes: gate, up and result [F] float32.
    Source: see moe_spec.Activation, whose forms are this one with other numbers.
    """
    limit, alpha = np.float32(layer.activation_limit), np.float32(layer.activation_alpha)
    gate = np.minimum(gate, limit)
    up = np.clip(up, -limit, limit)
    with np.errstate(over="ignore"):  # exp overflows to inf for very negative gates: silu is 0
        swish = gate / (np.float32(1) + np.exp(-alpha * gate))
    result: F32Array = swish * (up + np.float32(layer.activation.up_offset))
    return result
