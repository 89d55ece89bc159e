"""What models are made of, as data: layers, their parts, and the tensors that those need.

A description names its tensors and their shapes and holds no weight. `loading` checks them against
a file and loads them, `forward` computes with them, both without knowing any architecture.
What only one architecture does is a type of its own here, never a switch of another one.

Letters in shapes: T tokens, H hidden size, V vocabulary, E experts, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from dflash_adapters.ops import RoutingRule
from dflash_adapters.rope import (
    AttentionTemperature,
    RopePairing,
    RopeTable,
    YarnScaling,
    rope_table,
)
from dflash_adapters.spec import CAUSAL, KvLayer, Mask, RecurrentLayer
from dflash_protocol.ids import F32Array

# -- tensors --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor that the file must have; this type alone is checked but not loaded.

    Compared by identity, so that loaded weights can be looked up by it.
    """

    name: str
    shape: tuple[int, ...]


class VectorTensor(Tensor):
    """Loaded as float32."""

    __slots__ = ()


class MatrixTensor(Tensor):
    """Loaded in the file's own format. Shape: [rows, columns], or [columns] of a single row."""

    __slots__ = ()


class F32Tensor(Tensor):
    """Must be stored as F32; not loaded."""

    __slots__ = ()


class ScaleTensor(F32Tensor):
    """A single number, loaded on the host."""

    __slots__ = ()


def parts_of(part: object) -> Iterator[object]:
    """A description and everything in it, in the order of its fields."""
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
    """For activations of 4 bits: not computed with."""


@dataclass(frozen=True, slots=True)
class Ffn:
    """``down (silu(gate x) * (up x))``: a dense FFN, or an expert that every token uses."""

    gate: Linear
    up: Linear
    down: Linear
    share: Linear | None = None
    """Gives a logit; the result is multiplied by its sigmoid. Shape: [1, H]."""


# -- attention ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads of an attention layer, and the key/value heads that they share."""

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
    """Queries, keys and values: one matrix with the rows of all three in this order, or three."""

    linears: tuple[Linear, ...]
    sizes: tuple[int, int, int]
    """Rows of each."""
    biases: tuple[VectorTensor, ...] = ()
    """Three biases that go with one matrix; else biases belong to `linears`."""


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """A rotary embedding. `factors` [num_rotated / 2] divide the angles of each pair."""

    pairing: RopePairing
    num_rotated: int
    freq_base: float
    linear_factor: float = 1.0
    yarn: YarnScaling | None = None
    factors: F32Tensor | None = None

    def table(self, factors: F32Array | None = None) -> RopeTable:
        """`factors` are the values of the tensor of that name."""
        return rope_table(
            self.pairing,
            self.num_rotated,
            self.freq_base,
            linear_factor=self.linear_factor,
            yarn=self.yarn,
            factors=factors,
        )


@dataclass(frozen=True, slots=True)
class Rotary:
    """Heads of q and k are rotated."""

    rope: Rope


@dataclass(frozen=True, slots=True)
class HeadNormRotary:
    """Each head of q and k is normed, then rotated. Shapes: weights [D]."""

    rope: Rope
    q_norm: VectorTensor
    k_norm: VectorTensor


@dataclass(frozen=True, slots=True)
class RowNormRotary:
    """Rows of q and k are normed over their full width before they are split and rotated."""

    rope: Rope
    q_norm: VectorTensor
    k_norm: VectorTensor


@dataclass(frozen=True, slots=True)
class RotaryUnitNorm:
    """Heads are rotated, then divided by their root mean square."""

    rope: Rope


PositionKind: TypeAlias = (
    Rotary | HeadNormRotary | RowNormRotary | RotaryUnitNorm | AttentionTemperature
)
"""What happens to q and k before they are multiplied; temperature scales q alone."""


@dataclass(frozen=True, slots=True)
class HeadOrElementGate:
    """The result of attention times softplus of a projection of x, for each head or element."""

    linear: Linear


@dataclass(frozen=True, slots=True)
class GateBesideQueries:
    """The result of attention times the sigmoid of a gate; `qkv` gives 2 D values for each query
    head, its query and then its gate."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention."""

    heads: Heads
    qkv: Qkv
    output: Linear
    positions: PositionKind
    scale: float
    """Scores are multiplied by it."""
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
    """Of the convolution, of the output gate, and the logits alpha and beta."""
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
    """For activations of 4 bits: not computed with. Shape: [E]."""


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """``g * sigmoid(alpha * g) * (u + 1)`` of g = min(gate, limit) and u = clip(up, -limit, limit).

    Source: the gpt-oss model card.
    """

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a layer, computed by whoever owns them."""

    sizes: ExpertSizes
    projections: tuple[ExpertMatrices, ...]
    """Of gate, up and down; or one of gate and up, merged, and one of down."""
    activation: ClampedSwiglu | None = None
    """None: SwiGLU."""


@dataclass(frozen=True, slots=True)
class RoutedFfn:
    """Experts that a router chooses for each token, and a shared expert if there is one."""

    router: Linear
    rule: RoutingRule
    experts: Experts
    bias: VectorTensor | None = None
    """Added to scores for the choice alone. Shape: [E]."""
    shared: Ffn | None = None


@dataclass(frozen=True, slots=True)
class InputScaledFfn:
    """One expert, whose input is multiplied by the sigmoid of its logit, and a shared expert."""

    router: Linear
    choice: RoutingRule
    input_scale: RoutingRule
    """Its weight is what the input is multiplied by."""
    experts: Experts
    shared: Ffn


# -- a model --------------------------------------------------------------------------------------

Mixer: TypeAlias = Attention | DeltaNet
"""What mixes tokens."""


@dataclass(frozen=True, slots=True)
class Layer:
    """``x += mixer(norm(x))``, then ``x += ffn(norm(x))``."""

    mixer_norm: VectorTensor
    ffn_norm: VectorTensor
    mixer: Mixer
    ffn: Ffn | RoutedFfn | InputScaledFfn


@dataclass(frozen=True, slots=True)
class Ends:
    """What comes before the first layer and after the last. Shapes: embedding, head [V, H]."""

    embedding: MatrixTensor
    norm: VectorTensor
    head: Linear


@dataclass(frozen=True, slots=True)
class Description:
    """A model, as its adapter reads it from metadata."""

    context_length: int
    rms_eps: float
    ends: Ends
    layers: tuple[Layer, ...]
    left_out: tuple[str, ...] = ()
    """Tensors whose names begin so are not computed with, on purpose."""
