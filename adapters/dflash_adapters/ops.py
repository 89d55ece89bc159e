"""The Ops protocol: the operations an architecture is written in.

An adapter says *what* (norm, project, rotate, attend, route); a compute backend says *how*.
``A`` is the backend's array type. Every op takes an optional output buffer, never synchronises a
device by itself, and has fixed shapes for a fixed T; positions are explicit per token.
Knows nothing of experts' whereabouts: the MoE block is handed to the adapter as a callable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.moe_spec import KvLayer, ModelSpec
from dflash_adapters.rope import RopeTable
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


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How K experts and their weights follow from a token's router logits.

    Source: reference table of routed MoE blocks; top-k of the scores, weights are the scores of the
    chosen, divided by ``max(sum, smallest normal half)`` if ``normalise``.
    """

    num_experts_used: int
    gating: Gating
    normalise: bool


class Matrix(Protocol):
    """A weight [rows, columns] on the backend's device, as stored. Opaque to adapters."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...


class KvCache(Protocol):
    """Keys and values of every attention layer for one sequence. Opaque to adapters."""

    @property
    def capacity(self) -> int:
        """Positions that fit."""


class Ops(Protocol[A]):
    """Operations of one device. Arrays are float32 unless said otherwise."""

    def load_vector(self, file: GgufFile, tensor_name: str) -> A:
        """A one-dimensional weight, converted to float32."""

    def load_matrix(self, file: GgufFile, tensor_name: str) -> Matrix:
        """A two-dimensional weight, kept in the file's own format."""

    def new_kv_cache(self, layers: tuple[KvLayer, ...], capacity: int, kv_type: KvType) -> KvCache:
        """An empty cache of `capacity` positions."""

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
    ) -> None:
        """In place: RMS norm of each head where there is a weight, then rotate pairs by position.

        Shapes: q [T, heads, D]; k [T, kv_heads, D]; positions [T] int32; weights [D].
        Source: Su et al. 2021 (arXiv 2104.09864).
        """

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
    ) -> A:
        """Write k and v at `positions`, then attend with q over all positions up to its own.

        Positions ascend by one. Query head h reads key/value head ``h // (heads / kv_heads)``.
        Shapes: q [T, heads, D]; k, v [T, kv_heads, D]; result [T, heads, D].
        """

    def route(self, logits: A, rule: RoutingRule) -> tuple[A, A]:
        """Choose experts. Shapes: logits [T, E]; result ids [T, K] int32, weights [T, K]."""

    def add(self, x: A, y: A, out: A | None = None) -> A:
        """``x + y``."""


class MoeBlock(Protocol[A]):
    """Computes the routed experts of one layer, wherever they are."""

    def __call__(self, layer_id: int, hidden: A, topk_ids: A, topk_weights: A) -> A:
        """Weighted sum of the chosen experts.

        Shapes: hidden [T, H]; topk_ids [T, K] int32 global expert ids; topk_weights [T, K];
        result [T, H].
        """


class Model(Protocol[A]):
    """A loaded model: its forward pass in Ops."""

    spec: ModelSpec

    def forward(
        self, token_ids: I32Array, positions: I32Array, cache: KvCache, moe: MoeBlock[A]
    ) -> A:
        """Hidden states after the last layer. Shapes: token_ids, positions [T]; result [T, H]."""

    def head(self, hidden: A) -> A:
        """Logits. Shapes: hidden [T, H]; result [T, V]."""


__all__ = [
    "Gating",
    "KvCache",
    "KvType",
    "Matrix",
    "Model",
    "MoeBlock",
    "Ops",
    "Phase",
    "RoutingRule",
]
