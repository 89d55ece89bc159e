"""How a router's logits become a choice of experts, and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Gating(StrEnum):
    """How router logits become scores."""

    SOFTMAX = "softmax"
    """Over all experts."""
    SIGMOID = "sigmoid"
    SOFTMAX_WEIGHT = "softmax-weight"
    """Scores are the logits; weights are the softmax of those that are chosen."""
    SQRT_SOFTPLUS = "sqrt-softplus"
    """``sqrt(ln(1 + exp(logit)))``."""


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
