"""The Ops protocol: the operations that the host's model is written in.

The model says *what* (norm, project, rotate, attend, route); a backend says *how*. ``A`` is the
backend's array type. Every op takes an optional output buffer and has fixed shapes for a fixed T;
positions are explicit per token. Routed experts are no op: the model is handed what computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from dflash_adapters.layers import Gate
from dflash_adapters.loading import Loader, Matrix
from dflash_adapters.rope import AttentionTemperature, RopeTable
from dflash_adapters.routing import RoutingRule
from dflash_adapters.spec import DeltaShape, KvLayer, RecurrentLayer
from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.kv_cache import KvCache, KvType

A = TypeVar("A")


class Ops(Loader[A], Protocol[A]):
    """Operations of one host backend. Arrays are float32 unless said otherwise."""

    def new_kv_cache(
        self,
        layers: tuple[KvLayer, ...],
        capacity: int,
        kv_type: KvType,
        recurrent: tuple[RecurrentLayer, ...] = (),
    ) -> KvCache:
        """An empty cache of `capacity` positions; states of recurrent layers are float32."""

    def embed(self, table: Matrix, token_ids: AnyArray, out: A | None = None) -> A:
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
        positions: AnyArray,
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

    def scale_queries(self, q: A, positions: AnyArray, temperature: AttentionTemperature) -> None:
        """In place: every query times its temperature's factor. Shapes: q [T, heads, D]."""

    def attention(
        self,
        q: A,
        k: A,
        v: A,
        cache: KvCache,
        cache_layer: int,
        positions: AnyArray,
        *,
        scale: float,
        out: A | None = None,
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

        The result may be a view or a copy: the caller does not write to `x` afterwards.
        Shapes: x [T, C] or [T, heads, C]; result [T, last - first] or [T, heads, last - first].
        """

    def causal_conv(
        self,
        x: A,
        weight: A,
        cache: KvCache,
        layer: int,
        positions: AnyArray,
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
        positions: AnyArray,
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
