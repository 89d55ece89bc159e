"""Checks of a file's tensors, and the positions of experts' matrices inside them."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace

from dflash_adapters.gguf.file import GgufFile, TensorInfo
from dflash_adapters.quant import TensorType
from dflash_adapters.spec import ExpertProjection, ExpertVector
from dflash_protocol.errors import ModelFileError, UnsupportedModel


def expect_tensor(file: GgufFile, name: str, shape: tuple[int, ...]) -> TensorInfo:
    """Return the tensor of that name after checking its row-major shape and its type.

    Raises: ModelFileError if it is missing or has another shape; UnsupportedModel if it holds
    integers.
    """
    tensor = file.tensor(name)
    if tensor.shape != shape:
        raise ModelFileError(f"shape {tensor.shape}, expected {shape}", path=file.path, field=name)
    if tensor.tensor_type.is_integer:
        raise UnsupportedModel(
            f"weights of type {tensor.tensor_type.name}", path=file.path, field=name
        )
    return tensor


def stacked_experts(
    file: GgufFile,
    name: str,
    *,
    num_experts: int,
    rows: int,
    columns: int,
    bias: str | None = None,
    scale: str | None = None,
) -> ExpertProjection:
    """One projection of all experts of a layer, stored as one tensor [E, rows, columns].

    `bias` [E, rows] and `scale` [E] name the F32 tensors that go with it.
    Raises: ModelFileError, UnsupportedModel as `expect_tensor`; UnsupportedModel if a bias or
    scale is not F32.
    """
    tensor = expect_tensor(file, name, (num_experts, rows, columns))
    return ExpertProjection(
        tensor_name=name,
        tensor_type=tensor.tensor_type,
        rows=rows,
        columns=columns,
        shard_index=tensor.shard_index,
        offset_bytes=tensor.offset_bytes,
        stride_bytes=tensor.num_bytes // num_experts,
        bias=None if bias is None else _expert_vector(file, bias, (num_experts, rows)),
        scale=None if scale is None else _expert_vector(file, scale, (num_experts,)),
    )


def separate_experts(
    file: GgufFile, names: Sequence[str], *, rows: int, columns: int
) -> ExpertProjection:
    """One projection of all experts of a layer, stored as one tensor [rows, columns] per expert.

    Raises: ModelFileError, UnsupportedModel as `expect_tensor`; UnsupportedModel if their types
    differ.
    """
    experts = [expect_tensor(file, name, (rows, columns)) for name in names]
    first = experts[0]
    for each in experts:
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
        stride_bytes=0,
        places=tuple((each.shard_index, each.offset_bytes) for each in experts),
    )


def halves(stack: ExpertProjection) -> tuple[ExpertProjection, ExpertProjection]:
    """Split a stacked projection into the first and the second half of every expert's rows."""
    rows = stack.rows // 2
    return _rows_of(stack, 0, rows), _rows_of(stack, rows, rows)


def _rows_of(stack: ExpertProjection, first_row: int, rows: int) -> ExpertProjection:
    """`rows` rows of every expert from `first_row`, as a projection of its own."""
    bias = stack.bias
    if bias is not None:
        bias = replace(bias, offset_bytes=bias.offset_bytes + 4 * first_row, length=rows)
    return replace(
        stack,
        rows=rows,
        offset_bytes=stack.offset_bytes + first_row * stack.row_bytes,
        bias=bias,
    )


def _expert_vector(file: GgufFile, name: str, shape: tuple[int, ...]) -> ExpertVector:
    """A vector of all experts of a layer, stored as one tensor [E, length], or [E] of length 1.

    Raises: UnsupportedModel if it is not F32.
    """
    tensor = expect_tensor(file, name, shape)
    require_f32(file, name)
    length = math.prod(shape[1:])
    return ExpertVector(
        tensor_name=name,
        shard_index=tensor.shard_index,
        offset_bytes=tensor.offset_bytes,
        stride_bytes=4 * length,
        length=length,
    )


def require_f32(file: GgufFile, name: str) -> None:
    """Raises: UnsupportedModel if a tensor is not F32."""
    tensor_type = file.tensor(name).tensor_type
    if tensor_type is not TensorType.F32:
        raise UnsupportedModel(
            f"type {tensor_type.name}, only F32 is known", path=file.path, field=name
        )


def refuse_other_tensors(file: GgufFile, known: Set[str]) -> None:
    """Refuse a file with tensors outside `known`: ignoring one would give wrong results.

    Raises: UnsupportedModel, which names the first such tensor.
    """
    for name in file.tensors:
        if name not in known:
            raise UnsupportedModel(
                "a tensor that this architecture's adapter does not compute with",
                path=file.path,
                field=name,
            )


def all_matrices_f32(file: GgufFile) -> bool:
    """Whether every tensor with two or more dimensions is stored as F32."""
    return all(
        tensor.tensor_type is TensorType.F32
        for tensor in file.tensors.values()
        if len(tensor.shape) > 1
    )
