"""Choosing the next token from logits: greedy, or temperature with top-k, top-p and min-p.

Knows nothing of models; one row of logits in, one token id out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import F32Array, F64Array
from dflash_runtime.compute.backend import DeviceSampling

_FIRST_BLOCK, _GROWTH = 1024, 16
"""Tokens that are looked at to find a share of the probability; so many times as many next."""
_ROUNDING = 1e-9
"""More than sums of the probabilities of all tokens are rounded by."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
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
    """(token id, logprob) of the most likely ones, the first the most likely."""


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
    """Draws tokens; two samplers with the same options and seed draw the same ones.

    Each token that is drawn takes one number of the generator's, whoever draws it.
    """

    def __init__(self, options: SamplingParams) -> None:
        self._options = options
        self._random = np.random.default_rng(options.seed)

    @property
    def is_greedy(self) -> bool:
        """It takes the most likely token, the first of equals."""
        return self._options.temperature == 0.0

    @property
    def device_sampling(self) -> DeviceSampling | None:
        """The same for a device that draws; None if it is to take the most likely."""
        if self.is_greedy:
            return None
        options = self._options
        return DeviceSampling(options.temperature, options.top_k, options.top_p, options.min_p)

    def __call__(self, logits: F32Array) -> int:
        """Token id. Shapes: logits [V]."""
        if self.is_greedy:
            return int(np.argmax(logits))
        return self.sample(logits, self._random.random())

    def numbers(self, count: int) -> F64Array:
        """What the next tokens are drawn with: from 0 to below 1. Shapes: result [count]."""
        return self._random.random(count)

    def sample(self, logits: F32Array, number: float) -> int:
        """Token id, drawn with that number. Shapes: logits [V].

        Tokens stand in order of their logits, equal ones in order of their ids, and the one is
        taken that `number` of all that the filters leave falls on. Where there is no such order or
        no distribution, since a logit is NaN or the largest one infinite, it is what a greedy
        sampler takes; a generation ends before it has such logits sampled (Steps.finite).
        """
        options, size = self._options, logits.size
        # All that counts is how large the first, second, … logit is: sorting these is ten times as
        # quick as sorting ids.
        descending = np.negative(logits)
        if 0 < options.top_k < size:
            descending = np.partition(descending, options.top_k - 1)[: options.top_k]
        descending.sort()
        # Float64, and sums in a fixed order, so that a seed means the same text everywhere.
        probabilities = descending.astype(np.float64)
        # A tiny temperature takes all but the peak to nothing; infinite peaks are seen below.
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(probabilities[0], probabilities, out=probabilities)
            probabilities /= options.temperature
        np.exp(probabilities, out=probabilities)
        total = probabilities.sum()
        if np.isnan(total):
            return int(np.argmax(logits))
        probabilities /= total
        if options.top_p < 1.0:
            probabilities = _reaching(probabilities, options.top_p)
        if options.min_p > 0.0:
            probabilities = probabilities[probabilities >= options.min_p * probabilities[0]]
        cumulative = np.cumsum(probabilities, out=probabilities)
        place = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
        equals = np.flatnonzero(logits == -descending[place])
        return int(equals[place - np.searchsorted(descending, descending[place])])


def _reaching(probabilities: F64Array, share: float) -> F64Array:
    """Those of descending probabilities before which there is less than `share`. Shapes: [N]."""
    num_seen = _FIRST_BLOCK
    while True:
        seen = probabilities[:num_seen]
        before = np.cumsum(seen) - seen
        # Further on there is more before all of them, even as sums are rounded.
        if num_seen >= probabilities.size or before[-1] > share + _ROUNDING:
            return seen[before < share]
        num_seen *= _GROWTH
