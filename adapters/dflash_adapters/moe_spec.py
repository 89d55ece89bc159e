"""Frozen facts of one model, read from metadata alone: dimensions, caches, experts.

Knows nothing of weights' values: a spec is made without reading a single weight byte, so the
daemon and ``inspect`` can afford it on any file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from dflash_adapters.quant import TensorType
from dflash_protocol.fingerprint import digest


class Activation(StrEnum):
    """What stands between an expert's gate/up and down projections."""

    SWIGLU = "swiglu"
    """``silu(gate) * up``; Source: Shazeer 2020 (arXiv 2002.05202)."""


@dataclass(frozen=True, slots=True)
class ExpertProjection:
    """Where one projection of every expert of a layer lies in the file.

    Expert ``e`` occupies ``num_bytes`` bytes of shard ``shard_index`` from
    ``offset_bytes + e * stride_bytes``: ``rows`` rows of ``columns`` values.
    Merged gate/up stacks give two projections whose stride is the whole slab.
    """

    tensor_name: str
    tensor_type: TensorType
    rows: int
    columns: int
    shard_index: int
    offset_bytes: int
    stride_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.tensor_type.row_bytes(self.columns)

    @property
    def num_bytes(self) -> int:
        """Bytes of one expert's projection."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """One layer's experts: ``E`` of them, ``K`` used per token, ``H`` in and out, ``F`` wide."""

    layer_id: int
    num_experts: int
    num_experts_used: int
    hidden_size: int
    ffn_size: int
    activation: Activation
    gate: ExpertProjection
    up: ExpertProjection
    down: ExpertProjection

    @property
    def projections(self) -> tuple[ExpertProjection, ExpertProjection, ExpertProjection]:
        return self.gate, self.up, self.down

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert of this layer."""
        return sum(projection.num_bytes for projection in self.projections)


@dataclass(frozen=True)
class MoeSpec:
    """The layers of a model that have experts, in order."""

    layers: tuple[MoeLayer, ...]

    @cached_property
    def by_layer_id(self) -> dict[int, MoeLayer]:
        return {layer.layer_id: layer for layer in self.layers}

    @property
    def num_experts_total(self) -> int:
        return sum(layer.num_experts for layer in self.layers)

    @property
    def expert_bytes_total(self) -> int:
        return sum(layer.num_experts * layer.expert_bytes for layer in self.layers)

    @cached_property
    def digest(self) -> str:
        """Fingerprint of everything that decides what an expert computes, except its weights."""
        return digest("moe-spec-v1", (repr(layer).encode() for layer in self.layers))


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Key/value heads that one attention layer caches per position."""

    num_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the engine needs to know of a model besides its forward pass."""

    architecture: str
    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    kv_layers: tuple[KvLayer, ...]
    all_matrices_f32: bool
    moe: MoeSpec
