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
    experts. `log_odds` [2, L].
    """

    def __init__(self, layers: Iterable[HeatLayer], half_lives: HalfLives) -> None:
        """Without any selections. Raises: ValueError without layers."""
        self.layers = tuple(layers)
        self.half_lives = half_lives
        shape = self.shape
        self.totals: I64Array = np.zeros(shape, np.int64)
        self.slow: F64Array = np.zeros(shape)
        self.fast: F64Array = np.zeros(shape)
        self.log_odds: F64Array = np.zeros(shape[:2])
        """How much better `fast` has predicted the latest selections than `slow`: the logarithm of
        the ratio of likelihoods, with the fast half-life."""
        self.pairs_of_owner: dict[str, list[int]] = {}
        """How many selections each owner has computed, by owner name, then by `HEAT_PHASES`."""
        self._rows = {each.layer_id: row for row, each in enumerate(self.layers)}
        self._num_used = np.array([each.num_experts_used for each in self.layers], np.float64)
        self._num_experts = np.array([each.num_experts for each in self.layers], np.float64)

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
        # Dynamic model averaging of two predictions (Raftery, Karny, Ettler 2010): each is scored
        # by selections that it has not seen yet, and old scores are forgotten.
        odds = np.log(self._shares(self.fast) / self._shares(self.slow)) * selections
        self._decay(
            self.log_odds[:, :, None],
            odds.sum(axis=2, keepdims=True),
            num_tokens=num_tokens,
            half_life=self.half_lives.fast,
        )
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

        A mixture of the two decayed counts by how well they have predicted lately, each with half a
        selection added to every expert (Jeffreys' prior; Krichevsky, Trofimov 1981), so that none
        is impossible. What a phase has
        not counted yet is taken from the other one. Without any selections all experts are equally
        likely, whatever their skew: nothing says which ones are hot.
        Raises: KeyError for a layer without experts.
        """
        row = self._rows[layer_id]
        index = phase_index(phase)
        if not self.totals[index, row].any():
            index = 1 - index
        layer, odds = self.layers[row], np.exp(np.clip(self.log_odds[index, row], -30.0, 30.0))
        weight = float(odds / (1.0 + odds))
        result: F64Array = np.zeros(layer.num_experts)
        for counts, share in ((self.slow, 1.0 - weight), (self.fast, weight)):
            smoothed = counts[index, row, : layer.num_experts] + 0.5
            result += smoothed * (share * layer.num_experts_used / smoothed.sum())
        return result

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
        for name in ("totals", "slow", "fast", "log_odds"):
            setattr(copied, name, getattr(self, name).copy())
        copied.pairs_of_owner = {name: list(each) for name, each in self.pairs_of_owner.items()}
        return copied

    def _shares(self, counts: F64Array) -> F64Array:
        """The share of a layer's selections that each expert is expected to have, as in
        `probabilities`. Shapes: counts, result [2, L, E], not defined beyond a layer's experts."""
        smoothed_sums: F64Array = counts.sum(axis=2) + 0.5 * self._num_experts
        shares: F64Array = (counts + 0.5) / smoothed_sums[:, :, None]
        return shares

    @staticmethod
    def _decay(
        decayed: F64Array,
        new: I64Array | F64Array,
        *,
        num_tokens: F64Array,
        half_life: float,
    ) -> None:
        """Add what so many tokens have brought.

        Shapes: decayed, new [2, L, …]; num_tokens [2, L].
        """
        rate = np.log(2.0) / half_life
        lost = -np.expm1(-rate * num_tokens)
        # The mean weight of a token at the end, where the last one's is 1.
        mean = lost / np.maximum(-np.expm1(-rate) * num_tokens, 1e-300)
        decayed *= (1.0 - lost)[:, :, None]
        decayed += new * mean[:, :, None]


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
