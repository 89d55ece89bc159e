"""Positions of a layer's routed experts in the file: stacked, gate and up merged, or separate."""

from __future__ import annotations

import math

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import ExpertMatrices, Experts
from dflash_adapters.spec import Activation, ExpertProjection, MoeLayer
from dflash_adapters.tensors import halves, separate_experts, stacked_experts


def moe_layer(file: GgufFile, layer_id: int, experts: Experts) -> MoeLayer:
    """The experts of one layer and their positions in the file.

    Raises: as tensors.expect_tensor; UnsupportedModel for experts of several types.
    """
    sizes = experts.sizes
    first, *rest = (_projection(file, each) for each in experts.projections)
    # Two projections: gate and up merged in one stack, and down.
    gate, up, down = (*halves(first), *rest) if len(rest) == 1 else (first, *rest)
    clamped = experts.activation
    return MoeLayer(
        layer_id=layer_id,
        num_experts=sizes.num_experts,
        num_experts_used=sizes.num_experts_used,
        hidden_size=sizes.hidden_size,
        ffn_size=sizes.ffn_size,
        activation=Activation.SWIGLU if clamped is None else Activation.GPT_OSS,
        gate=gate,
        up=up,
        down=down,
        activation_limit=math.inf if clamped is None else clamped.limit,
        activation_alpha=1.0 if clamped is None else clamped.alpha,
    )


def _projection(file: GgufFile, matrices: ExpertMatrices) -> ExpertProjection:
    first, bias, scale = matrices.tensors[0], matrices.bias, matrices.scale
    *stacked, rows, columns = first.shape
    if not stacked:
        names = [tensor.name for tensor in matrices.tensors]
        return separate_experts(file, names, rows=rows, columns=columns)
    return stacked_experts(
        file,
        first.name,
        num_experts=stacked[0],
        rows=rows,
        columns=columns,
        bias=None if bias is None else bias.name,
        scale=None if scale is None else scale.name,
    )
