"""Checks a description against the file's tensors, derives the ModelSpec, loads dense weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import (
    Attention,
    DeltaNet,
    Description,
    F32Tensor,
    Ffn,
    MatrixTensor,
    Rope,
    ScaleTensor,
    Tensor,
    VectorTensor,
    parts_of,
)
from dflash_adapters.quant import TensorType
from dflash_adapters.rope import RopeTable
from dflash_adapters.routed_experts import moe_layer
from dflash_adapters.spec import ModelSpec, MoeSpec
from dflash_protocol.errors import ModelFileError, UnsupportedModel, one_line
from dflash_protocol.ids import F32Array

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)

_NAME_LIMIT = 200
"""Most characters of a model's name that are kept; published names have fewer than 60."""


def check_tensors(file: GgufFile, description: Description) -> None:
    """Check that the file has the description's tensors and no others; reads no weights.

    Raises: ModelFileError for a missing tensor or a wrong shape; UnsupportedModel for a wrong type,
    or a tensor that the description does not use: ignoring it would give wrong results.
    """
    known = {name for name in file.tensors if name.startswith(description.left_out)}
    for tensor in parts_of(description):
        if isinstance(tensor, Tensor):
            _check_tensor(file, tensor)
            known.add(tensor.name)
    for name in file.tensors:
        if name not in known:
            reason = "a tensor that this architecture's adapter does not compute with"
            raise UnsupportedModel(reason, path=file.path, field=name)


def _check_tensor(file: GgufFile, tensor: Tensor) -> None:
    path, field, stored = file.path, tensor.name, file.tensor(tensor.name)
    found = stored.tensor_type
    if stored.shape != tensor.shape:
        reason = f"shape {stored.shape}, expected {tensor.shape}"
        raise ModelFileError(reason, path=path, field=field)
    if found.is_integer:
        raise UnsupportedModel(f"weights of type {found.name}", path=path, field=field)
    if isinstance(tensor, F32Tensor) and found is not TensorType.F32:
        raise UnsupportedModel(f"type {found.name}, only F32 is known", path=path, field=field)


def model_spec(file: GgufFile, description: Description) -> ModelSpec:
    """Derive the spec of a described model after `check_tensors`; reads no weights.

    Raises: as check_tensors; UnsupportedModel for experts of several types in a layer, or none in
    any.
    """
    check_tensors(file, description)
    layers = description.layers
    if all(isinstance(layer.ffn, Ffn) for layer in layers):
        raise UnsupportedModel(
            "no layer has experts", path=file.path, field=f"{file.architecture}.expert_count"
        )
    mixers = [layer.mixer for layer in layers]
    vocab_size, hidden_size = description.ends.embedding.shape
    return ModelSpec(
        architecture=file.architecture,
        name=one_line(file.get_str("general.name", file.path.stem), _NAME_LIMIT),
        num_layers=len(layers),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        context_length=description.context_length,
        kv_layers=tuple(each.kv_layer for each in mixers if isinstance(each, Attention)),
        all_matrices_f32=all(
            tensor.tensor_type is TensorType.F32
            for tensor in file.tensors.values()
            if len(tensor.shape) > 1
        ),
        moe=MoeSpec(
            tuple(
                moe_layer(file, layer_id, layer.ffn.experts)
                for layer_id, layer in enumerate(layers)
                if not isinstance(layer.ffn, Ffn)
            )
        ),
        recurrent_layers=tuple(each.state for each in mixers if isinstance(each, DeltaNet)),
    )


class Matrix(Protocol):
    """A weight [rows, columns] on the backend's device, as stored."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...


class Loader(Protocol[A_co]):
    """Brings dense weights to a device."""

    def load_vector(self, file: GgufFile, tensor_name: str) -> A_co:
        """A one-dimensional weight, converted to float32."""

    def load_matrix(self, file: GgufFile, tensor_name: str) -> Matrix:
        """A two-dimensional weight, or a vector as its only row, kept in the file's own format."""


@dataclass(frozen=True, slots=True)
class Weights(Generic[A]):
    """The dense weights of a description, loaded on a device."""

    vectors: dict[VectorTensor, A] = field(default_factory=dict)
    matrices: dict[MatrixTensor, Matrix] = field(default_factory=dict)
    scales: dict[ScaleTensor, float] = field(default_factory=dict)
    rope_tables: dict[Rope, RopeTable] = field(default_factory=dict)


def load_weights(file: GgufFile, loader: Loader[A], description: Description) -> Weights[A]:
    """Load the dense weights, after `check_tensors`; owners of experts load the experts.

    Raises: ModelFileError if RoPE's frequency factors are not positive numbers.
    """
    weights: Weights[A] = Weights()
    parts = list(parts_of(description.ends))
    for layer in description.layers:
        # Vectors first, so that those of a layer are adjacent in memory: decode is 1 % faster.
        parts += sorted(parts_of(layer), key=lambda part: isinstance(part, MatrixTensor))
    for part in parts:
        match part:
            case VectorTensor():
                weights.vectors[part] = loader.load_vector(file, part.name)
            case MatrixTensor():
                weights.matrices[part] = loader.load_matrix(file, part.name)
            case ScaleTensor():
                weights.scales[part] = float(file.tensor_bytes(part.name).view("<f4")[0])
            case Rope() if part not in weights.rope_tables:
                weights.rope_tables[part] = part.table(_rope_factors(file, part.factors))
    return weights


def _rope_factors(file: GgufFile, tensor: F32Tensor | None) -> F32Array | None:
    """Raises: ModelFileError if they are not positive numbers."""
    if tensor is None:
        return None
    factors = file.tensor_bytes(tensor.name).view("<f4").astype(np.float32)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelFileError(
            f"not {factors.size} positive numbers", path=file.path, field=tensor.name
        )
    return factors
