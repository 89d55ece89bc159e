"""The Ops protocol: the operations that the forward pass is written in.

`forward` says *what* (norm, project, rotate, attend, route); a compute backend says *how*.
``A`` is the backend's array type. Every op takes an optional output buffer, never synchronises a
device by itself, and has fixed shapes for a fixed T; positions are explicit per token.
Routed experts are no op: the forward pass is handed a callable that computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias, TypeVar

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.rope import AttentionTemperature, RopeTable
from dflash_adapters.spec import DeltaShape, KvLayer, ModelSpec, RecurrentLayer
from dflash_protocol.ids import I32Array, Phase

A = TypeVar("A")


class KvType(StrEnum):
    """Element type of the key/value cache."""

    F32 = "f32"
    F16 = "f16"
    Q8_0 = "q8_0"
    """Blocks of 32 along a row: a half as scale, and signed bytes."""


class Gating(StrEnum):
    """How router logits become scores."""

    SOFTMAX = "softmax"
    """Over all experts."""
    SIGMOID = "sigmoid"
    SOFTMAX_WEIGHT = "softmax-weight"
    """Scores are the logits; weights are the softmax of those that are chosen."""
    SQRT_SOFTPLUS = "sqrt-softplus"
    """``sqrt(ln(1 + exp(logit)))``."""


class Gate(StrEnum):
    """What is made of a gate's values before they are multiplied with."""

    SIGMOID = "sigmoid"
    """``1 / (1 + exp(-g))``."""
    SILU = "silu"
    """``g / (1 + exp(-g))``."""
    SOFTPLUS = "softplus"
    """``ln(1 + exp(g))``."""


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How K experts and their weights follow from a token's router logits.

    Scores follow from logits by `gating`. Experts are chosen by score + bias, or with
    `selects_by_logits` by logit + bias: the K highest, of equal ones those of lower ids. With
    `num_groups` > 1 they are chosen from the best groups of neighbours: a group's worth is the sum
    of its two highest. Weights are the scores of the chosen, divided by
    ``max(sum, smallest normal half)`` if `normalise`, times `scale`.

    Source: reference table of routed MoE blocks; DeepSeek-V3 (arXiv 2412.19437) for bias and
    groups.
    """

    num_experts_used: int
    gating: Gating
    normalise: bool
    scale: float = 1.0
    selects_by_logits: bool = False
    num_groups: int = 1
    num_groups_used: int = 1

    def check(self, num_experts: int) -> None:
        """Raises: ValueError if there are no such groups, or too few experts to choose from."""
        per_group, rest = divmod(num_experts, self.num_groups)
        has_groups = not rest and self.num_groups_used <= self.num_groups
        if not has_groups or not 0 < self.num_experts_used <= per_group * self.num_groups_used:
            raise ValueError(
                f"{self.num_experts_used} experts used of {num_experts} in {self.num_groups} "
                f"groups, {self.num_groups_used} of them used"
            )


class Matrix(Protocol):
    """A weight [rows, columns] on the backend's device, as stored. Opaque to adapters."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...


class Snapshot(Protocol):
    """The state of a sequence's recurrent layers after some positions, as a cache has kept it."""

    @property
    def num_positions(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""


class KvCache(Protocol):
    """What all layers keep of one sequence: keys and values of each position, and the state of
    recurrent layers after the last one. Opaque to adapters."""

    @property
    def capacity(self) -> int:
        """Positions that fit."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes when it is full."""

    def can_resume(self, num_positions: int) -> bool:
        """Whether the next token may be the one after so many positions, as things are."""

    def snapshot(self, num_positions: int, instead_of: Snapshot | None = None) -> Snapshot:
        """Keep the state after so many positions, in the memory of a snapshot of this cache that
        nobody wants any more, if one is given. Rows of keys and values stay where they are.

        Raises: CheckpointMissing if a layer's state is another one.
        """

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot of this cache; rows from its position on may be overwritten."""


class Ops(Protocol[A]):
    """Operations of one device. Arrays are float32 unless said otherwise."""

    def load_vector(self, file: GgufFile, tensor_name: str) -> A:
        """A one-dimensional weight, converted to float32."""

    def load_matrix(self, file: GgufFile, tensor_name: str) -> Matrix:
        """A two-dimensional weight, or a vector as its only row, kept in the file's own format."""

    def new_kv_cache(
        self,
        layers: tuple[KvLayer, ...],
        capacity: int,
        kv_type: KvType,
        recurrent: tuple[RecurrentLayer, ...] = (),
    ) -> KvCache:
        """An empty cache of `capacity` positions; states of recurrent layers are float32."""

    def embed(self, table: Matrix, token_ids: I32Array, out: A | None = None) -> A:
        """Rows of the embedding table. Shapes: token_ids [T] int32; result [T, H]."""

    def rms_norm(self, x: A, weight: A, eps: float, out: A | None = None) -> A:
        """``weight * x / sqrt(mean(x²) + eps)`` over the last axis.

        Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
        """

    def linear(self, x: A, matrix: Matrix, out: A | None = None, *, add: A | None = None) -> A:
        """``x @ matrix.T``, plus `add`. Shapes: x [T, columns]; add, result [T, rows]."""

    def project(self, x: A, matrices: Sequence[Matrix]) -> list[A]:
        """``x @ matrix.T`` for each of several matrices, as `linear` would give it."""

    def split_heads(self, x: A, num_heads: int) -> A:
        """View [T, heads*D] as [T, heads, D]."""

    def merge_heads(self, x: A) -> A:
        """View [T, heads, D] as [T, heads*D]."""

    def norm_and_rotate(
        self,
        q: A,
        k: A,
        positions: I32Array,
        table: RopeTable,
        *,
        q_weight: A | None = None,
        k_weight: A | None = None,
        eps: float = 0.0,
        norms_after: bool = False,
    ) -> None:
        """In place: RMS norm of each head where there is a weight, then rotate pairs by position.

        With `norms_after` heads are rotated first, then divided by ``sqrt(mean(x²) + eps)``; there
        are no weights.
        Shapes: q [T, heads, D]; k [T, kv_heads, D]; positions [T] int32; weights [D].
        Source: Su et al. 2021 (arXiv 2104.09864).
        """

    def scale_queries(self, q: A, positions: I32Array, temperature: AttentionTemperature) -> None:
        """In place: every query times its temperature's factor. Shapes: q [T, heads, D]."""

    def attention(
        self,
        q: A,
        k: A,
        v: A,
        cache: KvCache,
        cache_layer: int,
        positions: I32Array,
        scale: float,
        out: A | None = None,
        *,
        sinks: A | None = None,
    ) -> A:
        """Write k and v at `positions`, then attend with q over what the layer's mask lets it see.

        Positions ascend by one. Query head h reads key/value head ``h // (heads / kv_heads)``.
        A sink is a score without a value: it has its share in the softmax, and nothing else.
        Shapes: q [T, heads, D]; k, v [T, kv_heads, D]; sinks [heads]; result [T, heads, D].
        """

    def route(self, logits: A, rule: RoutingRule, *, bias: A | None = None) -> tuple[A, A]:
        """Choose experts; `bias` is added for the choice alone.

        Shapes: logits [T, E]; bias [E]; result ids [T, K] int32, weights [T, K].
        """

    def add(self, x: A, y: A, out: A | None = None) -> A:
        """``x + y``."""

    def add_bias(self, x: A, bias: A, out: A | None = None) -> A:
        """``x + bias`` for every row. `out` may be `x`. Shapes: x, result [T, C]; bias [C]."""

    def scale_rows(self, x: A, factors: A | float, out: A | None = None) -> A:
        """Every row times its factor, or all times one number. `out` may be `x`.

        Shapes: x, result [T, C]; factors [T, 1].
        """

    def gated(self, x: A, gate: A, kind: Gate, out: A | None = None) -> A:
        """``x * f(gate)``, with `kind` as f. `out` may be `x`.

        n divides C: each value of a gate stands for C / n neighbouring columns, which are the
        whole row (n = 1), a head (n = heads), or one.
        Shapes: x, result [T, C]; gate [T, n].
        """

    def swiglu(self, gate: A, up: A, out: A | None = None) -> A:
        """``silu(gate) * up``, what a dense FFN has before its down projection. `out` may be `up`.

        Source: Shazeer 2020 (arXiv 2002.05202).
        Shapes: gate, up, result [T, F].
        """

    def columns(self, x: A, first: int, last: int) -> A:
        """``x[..., first:last]``: some columns of rows, or of every head, to be used on their own.

        Whether they are a view or a copy is the backend's choice: nobody writes to `x` afterwards.
        Shapes: x [T, C] or [T, heads, C]; result [T, last - first] or [T, heads, last - first].
        """

    def causal_conv(
        self,
        x: A,
        weight: A,
        cache: KvCache,
        layer: int,
        positions: I32Array,
        out: A | None = None,
    ) -> A:
        """``silu(sum_i weight[:, i] * x[t - K + 1 + i])``: each channel convolved on its own.

        `layer` counts the cache's recurrent layers; rows before the first of `positions` are those
        that it keeps, at position 0 zeros. Positions ascend by one.
        Shapes: x, result [T, C]; weight [C, K].
        Raises: CheckpointMissing if the layer's state is not that before the first position.
        """

    def delta_rule(
        self,
        mixed: A,
        alpha: A,
        beta: A,
        shape: DeltaShape,
        *,
        a: A,
        dt_bias: A,
        cache: KvCache,
        layer: int,
        positions: I32Array,
        eps: float,
        out: A | None = None,
    ) -> A:
        """Gated DeltaNet: every value head h reads and writes a matrix M, at position 0 zeros.

        ``M *= exp(g)``; ``M += b (v - M k) kᵀ``; result ``M q``, with g = a * softplus(alpha +
        dt_bias), b = sigmoid(beta), queries and keys divided by ``sqrt(sum x² + eps)`` and queries
        by sqrt(key_dim). A row of `mixed` is q, k, v, each head after head.
        `layer`, positions and errors as for `causal_conv`.
        Shapes: mixed [T, channels]; alpha, beta [T, heads]; a, dt_bias [heads]; result
        [T, heads, value_dim], where heads are value heads.
        Source: Yang et al. 2024 (arXiv 2412.06464).
        """


class MoeBlock(Protocol[A]):
    """Computes the routed experts of one layer, wherever they are."""

    def __call__(self, layer_id: int, hidden: A, topk_ids: A, topk_weights: A) -> A:
        """Weighted sum of the chosen experts.

        Shapes: hidden [T, H]; topk_ids [T, K] int32 global expert ids; topk_weights [T, K];
        result [T, H].
        """


OnLayer: TypeAlias = Callable[[int, A], None]
"""What is told a layer's id and the hidden states after it [T, H], which it must not keep: the next
layer adds to them in place."""


def nobody_looks(layer_id: int, hidden: object) -> None:
    """Where only what is after the last layer counts."""


class Model(Protocol[A]):
    """A loaded model: its forward pass in Ops."""

    spec: ModelSpec

    def forward(
        self,
        token_ids: I32Array,
        positions: I32Array,
        cache: KvCache,
        moe: MoeBlock[A],
        on_layer: OnLayer[A] = nobody_looks,
    ) -> A:
        """Hidden states after the last layer; `on_layer` is told those after every layer.

        Shapes: token_ids, positions [T]; result [T, H].
        """

    def head(self, hidden: A) -> A:
        """Logits. Shapes: hidden [T, H]; result [T, V]."""


__all__ = [
    "Gate",
    "Gating",
    "KvCache",
    "KvType",
    "Matrix",
    "Model",
    "MoeBlock",
    "OnLayer",
    "Ops",
    "Phase",
    "RoutingRule",
    "Snapshot",
    "nobody_looks",
]
