"""Choosing the next token from logits: greedy, or temperature with top-k, top-p and min-p.

Knows nothing of models; one row of logits in, one token id out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import F32Array


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How to sample. The defaults are greedy; filters are applied in the order they stand here.

    Raises: SettingsError naming the option that is out of range.
    """

    temperature: float = 0.0
    """0 = always the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities reach p (Holtzman et al. 2019)."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one (Nguyen et al. 2024)."""
    seed: int | None = None
    """Start of the random sequence; None = a new one each time."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            if not isinstance(getattr(self, name), float | int):
                raise SettingsError(f"{name}={getattr(self, name)!r}: must be a number")
        for name, kind in (("top_k", int), ("seed", int | None)):
            if not isinstance(getattr(self, name), kind):
                raise SettingsError(f"{name}={getattr(self, name)!r}: must be a whole number")
        for name, value, is_good, allowed in (
            ("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "from 0 to 100"),
            ("top_k", self.top_k, self.top_k >= 0, "0 or more"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and up to 1"),
            ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            ("seed", self.seed, self.seed is None or self.seed >= 0, "0 or more"),
        ):
            if not is_good:
                raise SettingsError(f"{name}={value}: must be {allowed}")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities as the model gave them, before any sampling option."""

    logprob: float
    """Of the token that was chosen."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the most likely ones, the first the likeliest."""


def token_logprobs(logits: F32Array, token_id: int, num_top: int) -> TokenLogprobs:
    """Of one token, and of the `num_top` most likely ones. Shapes: logits [V]."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    num_top = min(num_top, logits.size)
    top = np.argpartition(-logits, num_top - 1)[:num_top] if num_top else np.empty(0, np.int64)
    # Equal ones by id, so that the order does not depend on how they were found.
    top = top[np.lexsort((top, -logits[top]))]
    return TokenLogprobs(float(wide[token_id]), tuple((int(i), float(wide[i])) for i in top))


class Sampler:
    """Draws tokens; two samplers with the same options and seed draw the same ones."""

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        self._random = np.random.default_rng(options.seed)

    @property
    def is_greedy(self) -> bool:
        """It takes the most likely token, the first of equals."""
        return self._options.temperature == 0.0

    def __call__(self, logits: F32Array) -> int:
        """Token id. Shapes: logits [V]."""
        options = self._options
        if options.temperature == 0.0:
            return int(np.argmax(logits))
        # Float64, and candidates in a fixed order, so that a seed means the same text everywhere.
        order = np.argsort(-logits, kind="stable")
        if options.top_k:
            order = order[: options.top_k]
        below_peak = logits[order].astype(np.float64) - np.float64(logits[order[0]])
        with np.errstate(over="ignore"):  # a tiny temperature takes all but the peak to nothing
            probabilities = np.exp(below_peak / options.temperature)
        probabilities /= probabilities.sum()
        if options.top_p < 1.0:
            before = np.cumsum(probabilities) - probabilities
            probabilities = probabilities[before < options.top_p]
        if options.min_p > 0.0:
            probabilities = probabilities[probabilities >= options.min_p * probabilities[0]]
        cumulative = np.cumsum(probabilities)
        drawn = self._random.random() * cumulative[-1]
        return int(order[np.searchsorted(cumulative, drawn, side="right")])
