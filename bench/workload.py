"""Expert work of one layer: hidden rows, routing, weights; the same for all sides, by seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_protocol.ids import F32Array, I32Array

_ZIPF_EXPONENT = 0.65
"""With 512 tokens over 128 experts the fullest gets about 250 tokens, the median 22."""


@dataclass(frozen=True, slots=True)
class Work:
    """One chunk of tokens at one layer. Every token uses K different experts.

    Shapes: hidden [T, H] float32; expert_ids [T, K] int32; weights [T, K] float32.
    """

    layer_index: int
    hidden: F32Array
    expert_ids: I32Array
    weights: F32Array

    @property
    def num_tokens(self) -> int:
        return int(self.hidden.shape[0])

    @property
    def num_used(self) -> int:
        return int(self.expert_ids.shape[1])

    @property
    def num_groups(self) -> int:
        """Experts that some token uses."""
        return int(np.unique(self.expert_ids).size)


def make_work(
    layer_index: int,
    num_tokens: int,
    *,
    hidden_size: int,
    num_experts: int,
    num_used: int,
    seed: tuple[int, ...],
) -> Work:
    """Random work. One token draws its experts uniformly; several draw them zipf-skewed.

    Text sends many tokens of a chunk to few experts; which ones is random.
    """
    random = np.random.default_rng((*seed, layer_index, num_tokens))
    chances = np.ones(num_experts)
    if num_tokens > 1:
        chances = random.permutation(1 / np.arange(1, num_experts + 1) ** _ZIPF_EXPONENT)
    # Top K of log-chances plus Gumbel noise: a draw without replacement.
    scores = np.log(chances) + random.gumbel(size=(num_tokens, num_experts))
    expert_ids = np.argsort(-scores, axis=1)[:, :num_used].astype(np.int32)
    logits = random.standard_normal((num_tokens, num_used))
    weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return Work(
        layer_index,
        random.standard_normal((num_tokens, hidden_size), np.float32),
        np.ascontiguousarray(expert_ids),
        weights.astype(np.float32),
    )
