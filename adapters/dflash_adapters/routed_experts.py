"""Positions of a layer's routed experts in the file: stacked, gate and up merged, or separate.

Derived after `loading.check_tensors`, so that names, shapes and types of vectors are known to fit.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import ExpertMatrices, Experts, F32Tensor
from dflash_adapters.spec import Activation, ExpertProjection, ExpertVector, MoeLayer
from dflash_protocol.errors import UnsupportedModel


def moe_layer(file: GgufFile, layer_id: int, experts: Experts) -> MoeLayer:
    """The experts of one layer and their positions in the file.

    Raises: UnsupportedModel for experts of several types.
    """
    sizes, clamped = experts.sizes, experts.activation
    first, *rest = (_projection(file, each) for each in experts.projections)
    # Two projections: gate and up merged in one stack, and down.
    gate, up, down = (*_halves(first), *rest) if len(rest) == 1 else (first, *rest)
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
    """One projection of all experts, in one tensor [E, rows, columns] or E of [rows, columns].

    Raises: UnsupportedModel if their types differ.
    """
    *stacked, rows, columns = matrices.tensors[0].shape
    stored = [file.tensor(each.name) for each in matrices.tensors]
    first = stored[0]
    for each in stored:
        if each.tensor_type is not first.tensor_type:
            raise UnsupportedModel(
                f"type {each.tensor_type.name}, but {first.tensor_type.name} of {first.name}: "
                "experts of a layer must have one type",
                path=file.path,
                field=each.name,
            )
    return ExpertProjection(
        tensor_name=first.name,
        tensor_type=first.tensor_type,
        rows=rows,
        columns=columns,
        shard_index=first.shard_index,
        offset_bytes=first.offset_bytes,
        stride_bytes=first.num_bytes // stacked[0] if stacked else 0,
        bias=_vector(file, matrices.bias),
        scale=_vector(file, matrices.scale),
        places=None if stacked else tuple((each.shard_index, each.offset_bytes) for each in stored),
    )


def _vector(file: GgufFile, tensor: F32Tensor | None) -> ExpertVector | None:
    """A vector of all experts of a layer, in one tensor [E, length], or [E] of length 1."""
    if tensor is None:
        return None
    stored, length = file.tensor(tensor.name), math.prod(tensor.shape[1:])
    return ExpertVector(tensor.name, stored.shard_index, stored.offset_bytes, 4 * length, length)


def _halves(stack: ExpertProjection) -> tuple[ExpertProjection, ExpertProjection]:
    """Split a stacked projection into the first and the second half of every expert's rows."""
    rows = stack.rows // 2
    return _rows_of(stack, 0, rows), _rows_of(stack, rows, rows)


def _rows_of(stack: ExpertProjection, first_row: int, rows: int) -> ExpertProjection:
    """`rows` rows of every expert from `first_row`, as a projection of its own."""
    bias = stack.bias
    if bias is not None:
        bias = replace(bias, offset_bytes=bias.offset_bytes + 4 * first_row, length=rows)
    offset = stack.offset_bytes + first_row * stack.row_bytes
    return replace(stack, rows=rows, offset_bytes=offset, bias=bias)
