"""Heat: how often each expert of each layer was chosen, in all and lately, and what that predicts.

Selections of prompts (prefill) and of written tokens (decode) are counted apart; drafts that were
verified count as decode. Pure: counts come from outside, see `engine.heat_keeper`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from dflash_adapters.spec import MoeSpec
from dflash_protocol.ids import F64Array, I64Array, Phase

HEAT_PHASES = (Phase.PREFILL, Phase.DECODE)
"""What the first axis of counts stands for."""

ALIKE = 16.0
"""Counts are believed if they differ from what is expected by more than this multiple of what
independent tokens would. Neighbouring tokens choose alike: routing planted as that of
Qwen3-30B-A3B (`bench.planted_routing`) differs by 8 to 13 times as much as independent tokens, and
after a change of a quarter of the popular experts by 80."""
_LEAST_BELIEVED = 0.01
"""Of what was counted at all, so that its order is kept where differences may be chance."""


def phase_index(phase: Phase) -> int:
    """Index of a phase in `HEAT_PHASES`; of `VERIFY` that of decode."""
    return 0 if phase is Phase.PREFILL else 1


@dataclass(frozen=True, slots=True)
class HeatLayer:
    """The sizes of one layer's experts."""

    layer_id: int
    num_experts: int
    num_experts_used: int


@dataclass(frozen=True, slots=True)
class HalfLives:
    """After how many tokens a selection counts half: in what follows changes of topic, and in the
    long-term mean."""

    fast: float = 500.0
    slow: float = 20_000.0


def layers_of(moe: MoeSpec) -> tuple[HeatLayer, ...]:
    """A model's layers with experts."""
    return tuple(
        HeatLayer(each.layer_id, each.num_experts, each.num_experts_used) for each in moe.layers
    )


class Heat:
    """Selections by phase, layer and global expert id: in all, and decayed with two half-lives.

    Each phase and layer has a clock of its own, the tokens that it has computed. A token's
    selections lose half of their weight in each half-life of tokens that follow; those of tokens
    that were counted together are spread evenly over them, so that the result hardly depends on how
    often counts are taken. Used by one thread at a time.

    Shapes: all [2, L, E], by `HEAT_PHASES`, `layers` and global expert id; zero beyond a layer's
    experts.
    """

    def __init__(self, layers: Iterable[HeatLayer], half_lives: HalfLives) -> None:
        """Without any selections. Raises: ValueError without layers."""
        self.layers = tuple(layers)
        self.half_lives = half_lives
        shape = self.shape
        self.totals: I64Array = np.zeros(shape, np.int64)
        self.slow: F64Array = np.zeros(shape)
        self.fast: F64Array = np.zeros(shape)
        self.pairs_of_owner: dict[str, list[int]] = {}
        """How many selections each owner has computed, by owner name, then by `HEAT_PHASES`."""
        self._rows = {each.layer_id: row for row, each in enumerate(self.layers)}
        self._num_used = np.array([each.num_experts_used for each in self.layers], np.float64)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of counts."""
        most = max(each.num_experts for each in self.layers)
        return len(HEAT_PHASES), len(self.layers), most

    def add(self, selections: I64Array) -> None:
        """Count selections made since the last call. Shapes: selections [2, L, E]."""
        num_pairs = selections.sum(axis=2)
        if not num_pairs.any():
            return
        num_tokens = num_pairs / self._num_used
        self.totals += selections
        for counts, half_life in (
            (self.slow, self.half_lives.slow),
            (self.fast, self.half_lives.fast),
        ):
            self._decay(counts, selections, num_tokens=num_tokens, half_life=half_life)

    def add_pairs(self, pairs_of_owner: Mapping[str, Iterable[int]]) -> None:
        """Count what owners have computed since the last call, by name, then by `HEAT_PHASES`."""
        for name, pairs in pairs_of_owner.items():
            if any(pairs := list(pairs)):
                before = self.pairs_of_owner.get(name, [0] * len(HEAT_PHASES))
                self.pairs_of_owner[name] = [a + b for a, b in zip(before, pairs, strict=True)]

    def probabilities(self, phase: Phase, layer_id: int) -> F64Array:
        """How many of a token's selections are expected to be each expert: its probability to be
        chosen. Sums to the number of experts used. Shapes: result [E], by global id.

        All experts are equally likely at first. Then the slow counts of both phases, the slow ones
        of this phase and its fast ones are each believed as far as they differ from the result so
        far by more than chance (James-Stein's positive-part estimator; Baranchik 1970). So the fast
        counts matter after a change of topic, and on steady traffic not at all, though they fit the
        latest tokens better: those that follow are not the latest ones. No expert is impossible.
        What a phase has not counted yet is taken from the other one. Raises: KeyError for a layer
        without experts.
        """
        row = self._rows[layer_id]
        index = phase_index(phase)
        if not self.totals[index, row].any():
            index = 1 - index
        layer, slow, fast = self.layers[row], self.half_lives.slow, self.half_lives.fast
        expected: F64Array = np.full(layer.num_experts, layer.num_experts_used / layer.num_experts)
        for counts, half_life, least in (
            (self.slow[:, row].sum(axis=0), slow, _LEAST_BELIEVED),
            (self.slow[index, row], slow, 0.0),
            (self.fast[index, row], fast, 0.0),
        ):
            expected = _revised(expected, counts[: layer.num_experts], half_life, least=least)
        return expected

    def selections(self, phase: Phase, layer_id: int) -> I64Array | None:
        """All selections of a layer in a phase, undecayed; None if it has never reported any.

        Shapes: result [E]. Raises: KeyError for a layer without experts.
        """
        row = self._rows[layer_id]
        counts = self.totals[phase_index(phase), row, : self.layers[row].num_experts]
        return counts.copy() if counts.any() else None

    def num_tokens(self, phase: Phase | None = None, layer_id: int | None = None) -> int:
        """Tokens whose selections were counted: of one layer, or of the layer with the most; of one
        phase, or of all. 0: no evidence."""
        tokens = self.totals.sum(axis=2) / self._num_used
        by_layer = tokens.sum(axis=0) if phase is None else tokens[phase_index(phase)]
        return round(float(by_layer.max() if layer_id is None else by_layer[self._rows[layer_id]]))

    def copy(self) -> Self:
        """The same heat, which later counts don't change."""
        copied = type(self)(self.layers, self.half_lives)
        for name in ("totals", "slow", "fast"):
            setattr(copied, name, getattr(self, name).copy())
        copied.pairs_of_owner = {name: list(each) for name, each in self.pairs_of_owner.items()}
        return copied

    @staticmethod
    def _decay(
        decayed: F64Array,
        new: I64Array,
        *,
        num_tokens: F64Array,
        half_life: float,
    ) -> None:
        """Add what so many tokens have brought.

        Shapes: decayed, new [2, L, E]; num_tokens [2, L].
        """
        rate = np.log(2.0) / half_life
        lost = -np.expm1(-rate * num_tokens)
        # The mean weight of a token at the end, where the last one's is 1.
        mean = lost / np.maximum(-np.expm1(-rate) * num_tokens, 1e-300)
        decayed *= (1.0 - lost)[:, :, None]
        decayed += new * mean[:, :, None]


def _revised(expected: F64Array, counts: F64Array, half_life: float, *, least: float) -> F64Array:
    """How many of a token's selections are expected to be each expert, after these decayed counts.

    `least`: how far they are believed at least, of 1. Shapes: expected, counts, result [E].
    """
    num_used = float(expected.sum())
    num_tokens = float(counts.sum()) / num_used
    if num_tokens < 1e-6:  # the latest token alone counts 1
        return expected
    found = counts / num_tokens
    variance = float((expected * (1.0 - expected / num_used)).sum())
    variance /= max(1.0, _undecayed(num_tokens, half_life))
    differs = max(float(((found - expected) ** 2).sum()), 1e-300)
    weight = max(least, 1.0 - ALIKE * variance / differs)
    revised: F64Array = (1.0 - weight) * expected + weight * found
    return revised


def _undecayed(num_tokens: float, half_life: float) -> float:
    """Of how many tokens that have not decayed the mean varies as that of decayed ones whose
    weights have this sum: the square of the sum over the sum of squares (Kish 1965). As many at
    first, twice as many in the end."""
    kept = float(2.0 ** (-1.0 / half_life))
    return num_tokens * (1.0 + kept) / (2.0 - min(1.0, num_tokens * (1.0 - kept)))


def hottest_share(counts: I64Array, num_experts: int) -> float:
    """The share of all selections that so many of the hottest experts have. Shapes: counts [E]."""
    ordered = np.sort(counts)[::-1]
    return float(ordered[:num_experts].sum() / max(1, ordered.sum()))


def experts_for(counts: I64Array, share: float) -> int:
    """How many of the hottest experts together have this share of all selections.

    Shapes: counts [E].
    """
    reached = np.cumsum(np.sort(counts)[::-1])
    return int(np.searchsorted(reached, share * reached[-1])) + 1 if reached[-1] else 0
