"""Descriptions of models: frozen dataclasses for layers, their parts and the tensors they need.

A description has the names and shapes of its tensors, but no weights. It does not depend on the
architecture: `loading` checks it against the file and loads the weights, a backend computes it.
What only one architecture does is a small type of its own here, not a flag of a shared type.

Letters in shapes: T tokens, H hidden size, V vocabulary, E experts, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from dflash_adapters.rope import (
    AttentionTemperature,
    RopePairing,
    RopeTable,
    YarnScaling,
    rope_table,
)
from dflash_adapters.routing import RoutingRule
from dflash_adapters.spec import CAUSAL, KvLayer, Mask, RecurrentLayer
from dflash_protocol.ids import F32Array

# -- tensors --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor that the file must have. A plain Tensor is checked, but not loaded.

    Compared by identity: tensors are the keys under which loaded weights are looked up.
    """

    name: str
    shape: tuple[int, ...]


class VectorTensor(Tensor):
    """Loaded as float32."""

    __slots__ = ()


class MatrixTensor(Tensor):
    """Loaded in the file's format. Shape: [rows, columns], or [columns] for a single row."""

    __slots__ = ()


class F32Tensor(Tensor):
    """Must be stored as F32; not loaded."""

    __slots__ = ()


class ScaleTensor(F32Tensor):
    """A single number, loaded on the host."""

    __slots__ = ()


def parts_of(part: object) -> Iterator[object]:
    """Yield a description and everything inside it, depth first, in the order of its fields."""
    if isinstance(part, tuple):
        for each in part:
            yield from parts_of(each)
    elif dataclasses.is_dataclass(part):
        yield part
        if not isinstance(part, Tensor):
            for field in dataclasses.fields(part):
                yield from parts_of(getattr(part, field.name))


# -- matrices -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Linear:
    """``y = scale * (W x) + bias``."""

    weight: MatrixTensor
    bias: VectorTensor | None = None
    scale: ScaleTensor | None = None
    input_scale: F32Tensor | None = None
    """Scale for 4-bit activations, which are not used here."""


@dataclass(frozen=True, slots=True)
class Ffn:
    """``down (silu(gate x) * (up x))``: a dense FFN or a shared expert."""

    gate: Linear
    up: Linear
    down: Linear
    share: Linear | None = None
    """Gate of a shared expert: the result is multiplied by the sigmoid of its output. [1, H]."""


# -- attention ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of query heads and of key/value heads of an attention layer, and their size."""

    num: int
    num_kv: int
    dim: int

    @property
    def query_size(self) -> int:
        return self.num * self.dim

    @property
    def kv_size(self) -> int:
        return self.num_kv * self.dim


@dataclass(frozen=True, slots=True)
class Qkv:
    """Projections of queries, keys and values: three matrices, or one that stacks their rows."""

    linears: tuple[Linear, ...]
    sizes: tuple[int, int, int]
    """Rows of queries, keys and values."""
    biases: tuple[VectorTensor, ...] = ()
    """Three separate biases of one stacked matrix; otherwise biases are in `linears`."""


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """A rotary position embedding. `factors` [num_rotated / 2] divide the pairs' frequencies."""

    pairing: RopePairing
    num_rotated: int
    freq_base: float
    scaling: float | YarnScaling = 1.0
    factors: F32Tensor | None = None

    def table(self, factors: F32Array | None = None) -> RopeTable:
        """The table of cosines and sines; `factors` are the values of the tensor `self.factors`."""
        return rope_table(
            self.pairing, self.num_rotated, self.freq_base, scaling=self.scaling, factors=factors
        )


@dataclass(frozen=True, slots=True)
class Rotary:
    """RoPE on each head of q and k."""

    rope: Rope


@dataclass(frozen=True, slots=True)
class HeadNormRotary:
    """RMS norm of each head of q and k, then RoPE. Shape of the weights: [D]."""

    rope: Rope
    q_norm: VectorTensor
    k_norm: VectorTensor


@dataclass(frozen=True, slots=True)
class RowNormRotary:
    """RMS norm of q and k over their full width, before they are split into heads, then RoPE."""

    rope: Rope
    q_norm: VectorTensor
    k_norm: VectorTensor


@dataclass(frozen=True, slots=True)
class RotaryUnitNorm:
    """RoPE on each head of q and k, then an RMS norm of each head without weights."""

    rope: Rope


PositionKind: TypeAlias = (
    Rotary | HeadNormRotary | RowNormRotary | RotaryUnitNorm | AttentionTemperature
)
"""How q and k are transformed before scores are computed. A temperature scales q only."""


class Gate(StrEnum):
    """What is made of a gate's values before they are multiplied with."""

    SIGMOID = "sigmoid"
    """``1 / (1 + exp(-g))``."""
    SILU = "silu"
    """``g / (1 + exp(-g))``."""
    SOFTPLUS = "softplus"
    """``ln(1 + exp(g))``."""


@dataclass(frozen=True, slots=True)
class HeadOrElementGate:
    """Multiplies attention's output by softplus(linear x), one value per head or per element."""

    linear: Linear


@dataclass(frozen=True, slots=True)
class GateBesideQueries:
    """Multiplies attention's output by the sigmoid of a gate. `qkv` has 2 D rows of queries per
    head: the query and then the gate."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention."""

    heads: Heads
    qkv: Qkv
    output: Linear
    positions: PositionKind
    scale: float
    """Factor of the scores."""
    mask: Mask = CAUSAL
    gate: HeadOrElementGate | GateBesideQueries | None = None
    sinks: VectorTensor | None = None

    @property
    def kv_layer(self) -> KvLayer:
        return KvLayer(self.heads.num_kv, self.heads.dim, self.heads.dim, self.mask)


# -- the gated delta rule -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated DeltaNet: causal convolution, delta rule, a norm of each head, an output gate."""

    state: RecurrentLayer
    inputs: tuple[Linear, Linear, Linear, Linear]
    """Projections to the convolution's inputs, the output gate, and the logits alpha and beta."""
    conv: VectorTensor
    dt_bias: VectorTensor
    a: VectorTensor
    norm: VectorTensor
    output: Linear


# -- routed experts -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Dimensions of the experts of a layer."""

    num_experts: int
    num_experts_used: int
    hidden_size: int
    ffn_size: int


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One projection of all experts: one tensor [E, rows, columns], or E of [rows, columns]."""

    tensors: tuple[Tensor, ...]
    bias: F32Tensor | None = None
    """Shape: [E, rows]."""
    scale: F32Tensor | None = None
    """Shape: [E]."""
    input_scale: F32Tensor | None = None
    """Scale for 4-bit activations, which are not used here. Shape: [E]."""


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """``g * sigmoid(alpha * g) * (u + 1)`` of g = min(gate, limit) and u = clip(up, -limit, limit).

    Source: the gpt-oss model card.
    """

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a layer. Their owners load and compute them."""

    sizes: ExpertSizes
    projections: tuple[ExpertMatrices, ...]
    """Gate, up and down; or gate and up stacked in one, and down."""
    activation: ClampedSwiglu | None = None
    """None: SwiGLU."""


@dataclass(frozen=True, slots=True)
class RoutedFfn:
    """An FFN of experts that a router chooses for each token, and an optional shared expert."""

    router: Linear
    rule: RoutingRule
    experts: Experts
    bias: VectorTensor | None = None
    """Added to the scores for the choice, but not for the weights. Shape: [E]."""
    shared: Ffn | None = None


@dataclass(frozen=True, slots=True)
class InputScaledFfn:
    """One routed expert whose input is scaled by the sigmoid of its logit, and a shared expert."""

    router: Linear
    choice: RoutingRule
    input_scale: RoutingRule
    """The rule whose weight multiplies the input."""
    experts: Experts
    shared: Ffn


# -- a model --------------------------------------------------------------------------------------

Mixer: TypeAlias = Attention | DeltaNet
"""The sublayer that mixes tokens."""


@dataclass(frozen=True, slots=True)
class Layer:
    """``x += mixer(norm(x))``, then ``x += ffn(norm(x))``."""

    mixer_norm: VectorTensor
    ffn_norm: VectorTensor
    mixer: Mixer
    ffn: Ffn | RoutedFfn | InputScaledFfn


@dataclass(frozen=True, slots=True)
class Ends:
    """Embedding, final norm and head. Shapes: embedding and head [V, H]."""

    embedding: MatrixTensor
    norm: VectorTensor
    head: Linear


@dataclass(frozen=True, slots=True)
class Description:
    """A whole model, as an adapter reads it from metadata."""

    context_length: int
    rms_eps: float
    ends: Ends
    layers: tuple[Layer, ...]
    left_out: tuple[str, ...] = ()
    """Prefixes of the names of tensors that are deliberately not used."""
