"""Terms that descriptions of models and the backends that compute them share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


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
        """Save the state after so many positions, in the memory of `instead_of`, a snapshot of this
        cache that is no longer needed, if given. Rows of keys and values are not copied.

        Raises: CheckpointMissing if a layer's state is another one.
        """

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot of this cache; rows from its position on may be overwritten."""
