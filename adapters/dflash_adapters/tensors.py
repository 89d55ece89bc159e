"""Checked access to a model's tensors, shared by all adapters.

Knows nothing of any architecture: it compares what the file says with what an adapter expects.
"""

from __future__ import annotations

from collections.abc import Set

from dflash_adapters.gguf_file import GgufFile, TensorInfo
from dflash_adapters.moe_spec import ExpertProjection
from dflash_adapters.quant import TensorType
from dflash_protocol.errors import ModelFileError, UnsupportedModel


def expect_tensor(file: GgufFile, name: str, shape: tuple[int, ...]) -> TensorInfo:
    """The tensor of that name, if it has the expected row-major shape and holds numbers.

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
    file: GgufFile, name: str, *, num_experts: int, rows: int, columns: int
) -> ExpertProjection:
    """One projection of all experts of a layer, stored as one tensor [E, rows, columns]."""
    tensor = expect_tensor(file, name, (num_experts, rows, columns))
    return ExpertProjection(
        tensor_name=name,
        tensor_type=tensor.tensor_type,
        rows=rows,
        columns=columns,
        shard_index=tensor.shard_index,
        offset_bytes=tensor.offset_bytes,
        stride_bytes=tensor.num_bytes // num_experts,
    )


def refuse_other_tensors(file: GgufFile, known: Set[str]) -> None:
    """A tensor that an adapter does not use is one whose effect it would leave out.

    Raises: UnsupportedModel naming the first that is not among `known`.
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
