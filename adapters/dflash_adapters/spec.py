"""ModelSpec: a model's dimensions, caches and experts, and where the experts are in the file.

It is derived from metadata alone, without reading weights, so it is cheap for any file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from dflash_adapters.quant import TensorType
from dflash_protocol.fingerprint import digest


class Activation(StrEnum):
    """The activation between an expert's gate/up and down projections.

    All are ``g / (1 + exp(-alpha g)) * (u + up_offset)`` of ``g = min(gate, limit)`` and
    ``u = clip(up, -limit, limit)``; `limit` and `alpha` are the layer's.
    """

    SWIGLU = "swiglu"
    """``silu(gate) * up``: no limit, alpha 1. Source: Shazeer 2020 (arXiv 2002.05202)."""
    SWIGLU_CLAMPED = "swiglu-clamped"
    """``silu(min(gate, limit)) * clip(up, -limit, limit)``: alpha 1.

    Source: llama.cpp's clamped SwiGLU, for DeepSeek-V4. (Others clamp after silu: not this.)
    """
    GPT_OSS = "gpt-oss"
    """``g * sigmoid(alpha g) * (u + 1)``. Source: the gpt-oss model card and its reference code."""

    @property
    def up_offset(self) -> float:
        """The constant added to the clamped up projection."""
        return 1.0 if self is Activation.GPT_OSS else 0.0


@dataclass(frozen=True, slots=True)
class ExpertVector:
    """File positions of a vector of every expert of a layer: a bias, or a scale of length 1.

    Expert ``e`` has ``length`` F32 values of shard ``shard_index`` from
    ``offset_bytes + e * stride_bytes``, which need not be aligned.
    """

    tensor_name: str
    shard_index: int
    offset_bytes: int
    stride_bytes: int
    length: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one expert's vector."""
        return 4 * self.length

    def place_of(self, global_expert_id: int) -> tuple[int, int]:
        """Shard and offset of one expert's vector."""
        return self.shard_index, self.offset_bytes + global_expert_id * self.stride_bytes


@dataclass(frozen=True, slots=True)
class ExpertProjection:
    """One projection of every expert of a layer: ``y = scale * (W x) + bias``.

    The matrix of expert ``e`` occupies ``num_bytes`` bytes of shard ``shard_index`` from
    ``offset_bytes + e * stride_bytes``: ``rows`` rows of ``columns`` values.
    A merged gate/up stack gives two projections whose stride is the whole slab. Experts that are
    separate tensors are at `places` instead; `tensor_name` is that of the first one.
    """

    tensor_name: str
    tensor_type: TensorType
    rows: int
    columns: int
    shard_index: int
    offset_bytes: int
    stride_bytes: int
    bias: ExpertVector | None = None
    """``rows`` values per expert."""
    scale: ExpertVector | None = None
    """One value per expert, in NVFP4 files."""
    places: tuple[tuple[int, int], ...] | None = None
    """Shard and offset of each expert."""

    def place_of(self, global_expert_id: int) -> tuple[int, int]:
        """Shard and offset of one expert's matrix."""
        if self.places is not None:
            return self.places[global_expert_id]
        return self.shard_index, self.offset_bytes + global_expert_id * self.stride_bytes

    @property
    def row_bytes(self) -> int:
        return self.tensor_type.row_bytes(self.columns)

    @property
    def num_bytes(self) -> int:
        """Bytes of one expert's matrix."""
        return self.rows * self.row_bytes

    @property
    def tensor_names(self) -> frozenset[str]:
        """Names of its matrix, bias and scale."""
        vectors = {vector.tensor_name for vector in (self.bias, self.scale) if vector is not None}
        return frozenset({self.tensor_name, *vectors})


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """One layer's experts: ``E`` of them, ``K`` per token, hidden size ``H``, FFN width ``F``."""

    layer_id: int
    num_experts: int
    num_experts_used: int
    hidden_size: int
    ffn_size: int
    activation: Activation
    gate: ExpertProjection
    up: ExpertProjection
    down: ExpertProjection
    activation_limit: float = math.inf
    """For activations that clamp."""
    activation_alpha: float = 1.0
    """For the gpt-oss activation."""

    def __post_init__(self) -> None:
        assert self.activation_limit > 0.0
        assert self.activation_limit == math.inf or self.activation is not Activation.SWIGLU
        assert self.activation_alpha == 1.0 or self.activation is Activation.GPT_OSS

    @property
    def projections(self) -> tuple[ExpertProjection, ExpertProjection, ExpertProjection]:
        return self.gate, self.up, self.down

    @property
    def parts(self) -> tuple[ExpertProjection | ExpertVector, ...]:
        """All distinct parts of an expert in the file: matrices, then vectors.

        A part's bytes of expert ``e`` are ``num_bytes`` from ``place_of(e)``.
        """
        vectors = (v for p in self.projections for v in (p.bias, p.scale) if v is not None)
        # Projections of a merged stack share their scale.
        return (*self.projections, *dict.fromkeys(vectors))

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert of this layer."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def kind(self) -> tuple[object, ...]:
        """What the time of an expert depends on: types and shapes."""
        return (
            self.num_experts_used,
            self.activation,
            *(
                (p.tensor_type, p.rows, p.columns, p.bias is None, p.scale is None)
                for p in self.projections
            ),
        )


@dataclass(frozen=True)
class MoeSpec:
    """The layers of a model that have experts, in order."""

    layers: tuple[MoeLayer, ...]

    @cached_property
    def by_layer_id(self) -> dict[int, MoeLayer]:
        return {layer.layer_id: layer for layer in self.layers}

    @cached_property
    def first_of_kind(self) -> dict[int, int]:
        """By layer id, the first layer of the same kind."""
        first: dict[tuple[object, ...], int] = {}
        return {
            layer.layer_id: first.setdefault(layer.kind, layer.layer_id) for layer in self.layers
        }

    @property
    def num_experts_total(self) -> int:
        return sum(layer.num_experts for layer in self.layers)

    @cached_property
    def num_used_total(self) -> int:
        """Experts that a token uses, all layers together."""
        return sum(layer.num_experts_used for layer in self.layers)

    @property
    def expert_bytes_total(self) -> int:
        return sum(layer.num_experts * layer.expert_bytes for layer in self.layers)

    @cached_property
    def digest(self) -> str:
        """Fingerprint of everything that determines what an expert computes, except its weights."""
        return digest("moe-spec-v2", (repr(layer).encode() for layer in self.layers))


@dataclass(frozen=True, slots=True)
class Mask:
    """The positions j <= i that a token at position i attends to; 0: no such limit."""

    window: int = 0
    """Sliding window: ``i - j < window``."""
    chunk: int = 0
    """Chunked attention: ``j >= floor(i / chunk) * chunk``."""

    def __post_init__(self) -> None:
        assert self.window >= 0
        assert self.chunk >= 0

    @property
    def span(self) -> int | None:
        """Maximum number of positions that a token attends to; None: all up to its own."""
        return min((each for each in (self.window, self.chunk) if each), default=None)

    def first_visible(self, position: int) -> int:
        """The first position that a token at `position` attends to."""
        in_window = position - self.window + 1 if self.window else 0
        in_chunk = position // self.chunk * self.chunk if self.chunk else 0
        return max(0, in_window, in_chunk)


CAUSAL = Mask()
"""Plain causal attention."""


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Key/value heads that one attention layer caches per position, and its mask."""

    num_heads: int
    key_dim: int
    value_dim: int
    mask: Mask = CAUSAL


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads of a gated delta rule. Several value heads share a key head; the number of value heads
    is a multiple of that of key heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    is_tiled: bool = True
    """Value head h uses key head ``h % num_key_heads``; else ``h // (value heads / key heads)``."""

    @property
    def num_channels(self) -> int:
        """Columns of a token's queries, keys and values together."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """A recurrent layer, whose state has a constant size: the last ``conv_kernel - 1`` inputs of a
    convolution, and a [key_dim, value_dim] matrix for each value head of the delta rule."""

    conv_kernel: int
    delta: DeltaShape

    @property
    def state_bytes(self) -> int:
        """In float32."""
        delta = self.delta
        matrices = delta.num_value_heads * delta.key_dim * delta.value_dim
        return 4 * (matrices + (self.conv_kernel - 1) * delta.num_channels)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Dimensions of a model, its caches and experts."""

    architecture: str
    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    kv_layers: tuple[KvLayer, ...]
    all_matrices_f32: bool
    moe: MoeSpec
    recurrent_layers: tuple[RecurrentLayer, ...] = ()

    @property
    def can_be_cut(self) -> bool:
        """Whether a sequence can be truncated at any position and continued from there.

        If not, only at positions whose state was saved, as sliding windows and recurrent states
        are overwritten.
        """
        return not self.recurrent_layers and all(kv.mask.span is None for kv in self.kv_layers)

    def first_layers(self, num_layers: int) -> ModelSpec:
        """The same with its first layers only. Caches stay those of all layers."""
        moe = tuple(layer for layer in self.moe.layers if layer.layer_id < num_layers)
        return replace(self, num_layers=num_layers, moe=MoeSpec(moe))
