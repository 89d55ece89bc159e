"""The Ops protocol: the operations that the host's model is written in.

The model says *what* (norm, project, rotate, attend, route); a backend says *how*. Every step of a
layer is an operation, so that a backend can record them; routed experts are none, the model is
handed what computes them. Positions are explicit per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from dflash_adapters.layers import Gate
from dflash_adapters.loading import Loader, Matrix
from dflash_adapters.rope import AttentionTemperature, RopeTable
from dflash_adapters.routing import RoutingRule
from dflash_adapters.spec import DeltaShape, KvLayer, RecurrentLayer
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.kv_cache import KvCache, KvType
from dflash_runtime.compute.trees import Tree


@dataclass(frozen=True, slots=True, eq=False)
class DeltaInputs:
    """The inputs of a gated delta rule.

    A row of `mixed` is q, k, v, each head after head; `eps` is for the norms of q and k.
    Shapes: mixed [T, channels]; alpha, beta [T, heads]; a, dt_bias [heads].
    """

    mixed: F32Array
    alpha: F32Array
    beta: F32Array
    shape: DeltaShape
    a: F32Array
    dt_bias: F32Array
    eps: float

    def __post_init__(self) -> None:
        num_tokens, heads = self.mixed.shape[0], self.shape.num_value_heads
        shapes = [self.mixed.shape, self.alpha.shape, self.beta.shape]
        shapes += [self.a.shape, self.dt_bias.shape]
        logits, vector = (num_tokens, heads), (heads,)
        if shapes != [(num_tokens, self.shape.num_channels), logits, logits, vector, vector]:
            raise ValueError(f"{shapes} do not fit {self.shape}")

    @property
    def num_tokens(self) -> int:
        return int(self.mixed.shape[0])

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """Shape of the result."""
        return self.num_tokens, self.shape.num_value_heads, self.shape.value_dim

    def of(self, tokens: I32Array | slice) -> DeltaInputs:
        """The inputs of some tokens. Shapes: tokens [T]."""
        return replace(
            self, mixed=self.mixed[tokens], alpha=self.alpha[tokens], beta=self.beta[tokens]
        )


class ElementOps(Protocol):
    """Operations of `Ops` that are one line of numpy on the host."""

    def add(self, x: F32Array, y: F32Array) -> None:
        """``x += y``. Shapes: x [T, C]; y [T, C] or [C]."""
        x += y

    def multiply(self, x: F32Array, factors: F32Array) -> None:
        """``x *= factors``, a factor for each row. Shapes: x [T, C]; factors [T, 1] or [1, 1]."""
        x *= factors

    def columns(self, x: F32Array, first: int, last: int) -> F32Array:
        """Some columns of rows, or of every head, contiguous. Shapes: x [T, C] or [T, heads, C]."""
        return np.ascontiguousarray(x[..., first:last])

    def temper(self, q: F32Array, temperature: AttentionTemperature, positions: I32Array) -> None:
        """Multiply queries by the temperatures of their positions. Shapes: q [T, heads, D];
        positions [T]."""
        q *= temperature.factors(positions)[:, None, None]


class Ops(ElementOps, Loader[F32Array], Protocol):
    """Operations of one host backend. Arrays are float32 unless said otherwise."""

    def new_kv_cache(
        self,
        layers: tuple[KvLayer, ...],
        capacity: int,
        kv_type: KvType,
        recurrent: tuple[RecurrentLayer, ...] = (),
    ) -> KvCache:
        """An empty cache of `capacity` positions; states of recurrent layers are float32."""

    def embed(self, table: Matrix, token_ids: I32Array) -> F32Array:
        """Rows of the embedding table. Shapes: token_ids [T] int32; result [T, H]."""

    def rms_norm(self, x: F32Array, weight: F32Array, eps: float) -> F32Array:
        """``weight * x / sqrt(mean(x²) + eps)`` over the last axis.

        Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
        """

    def linear(
        self,
        x: F32Array,
        matrix: Matrix,
        out: F32Array | None = None,
        *,
        add: F32Array | None = None,
    ) -> F32Array:
        """``x @ matrix.T``, plus `add`. Shapes: x [T, columns]; add, result [T, rows]."""

    def project(self, x: F32Array, matrices: Sequence[Matrix]) -> list[F32Array]:
        """``x @ matrix.T`` for each of several matrices, as `linear` would give it."""

    def norm_and_rotate(
        self,
        q: F32Array,
        k: F32Array,
        positions: I32Array,
        table: RopeTable,
        *,
        q_weight: F32Array | None = None,
        k_weight: F32Array | None = None,
        eps: float = 0.0,
        norms_after: bool = False,
    ) -> None:
        """In place: RMS norm of each head where there is a weight, then rotate pairs by position.

        With `norms_after` heads are rotated first, then divided by ``sqrt(mean(x²) + eps)``; there
        are no weights.
        Shapes: q [T, heads, D]; k [T, kv_heads, D]; positions [T] int32; weights [D].
        Source: Su et al. 2021 (arXiv 2104.09864).
        """

    def attention(
        self,
        q: F32Array,
        k: F32Array,
        v: F32Array,
        cache: KvCache,
        cache_layer: int,
        positions: I32Array,
        *,
        scale: float,
        sinks: F32Array | None = None,
        tree: Tree | None = None,
    ) -> F32Array:
        """Write k and v at `positions`, then attend with q over what the layer's mask lets it see.

        Positions ascend by one, or rows are the tokens of `tree`: each attends to its ancestors,
        and the cache stays as it is until a path is accepted. Query head h reads key/value head
        ``h // (heads / kv_heads)``.
        A sink is a score without a value: it has its share in the softmax, and nothing else.
        Shapes: q [T, heads, D]; k, v [T, kv_heads, D]; sinks [heads]; result [T, heads, D].
        """

    def route(
        self, logits: F32Array, rule: RoutingRule, *, bias: F32Array | None = None
    ) -> tuple[I32Array, F32Array]:
        """Choose experts; `bias` is added for the choice alone.

        Shapes: logits [T, E]; bias [E]; result ids [T, K] int32, weights [T, K].
        """

    def gated(
        self, x: F32Array, gate: F32Array, kind: Gate, out: F32Array | None = None
    ) -> F32Array:
        """``x * f(gate)``, with `kind` as f. `out` may be `x`.

        n divides C: each value of a gate stands for C / n neighbouring columns, which are the
        whole row (n = 1), a head (n = heads), or one.
        Shapes: x, result [T, C]; gate [T, n].
        """

    def causal_conv(
        self,
        x: F32Array,
        weight: F32Array,
        cache: KvCache,
        layer: int,
        positions: I32Array,
        *,
        tree: Tree | None = None,
    ) -> F32Array:
        """``silu(sum_i weight[:, i] * x[t - K + 1 + i])``: each channel convolved on its own.

        `layer` counts the cache's recurrent layers; rows before the first of `positions` are those
        that it keeps, at position 0 zeros. Positions ascend by one, or rows are the tokens of
        `tree`: each goes on from its parent, and the state stays until a path is accepted.
        Shapes: x, result [T, C]; weight [C, K].
        Raises: CheckpointMissing if the layer's state is not that before the first position.
        """

    def delta_rule(
        self,
        inputs: DeltaInputs,
        cache: KvCache,
        layer: int,
        positions: I32Array,
        *,
        tree: Tree | None = None,
    ) -> F32Array:
        """Gated DeltaNet: every value head h reads and writes a matrix M, at position 0 zeros.

        ``M *= exp(g)``; ``M += b (v - M k) kᵀ``; result ``M q``, with g = a * softplus(alpha +
        dt_bias), b = sigmoid(beta), queries and keys divided by ``sqrt(sum x² + eps)`` and queries
        by sqrt(key_dim). `layer`, positions, `tree` and errors as for `causal_conv`.
        Shapes: result [T, heads, value_dim], where heads are value heads.
        Source: Yang et al. 2024 (arXiv 2412.06464).
        """
