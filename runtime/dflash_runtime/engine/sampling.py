"""Choosing the next token from logits: greedy, or with temperature and filters by probability."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import BoolArray, F32Array, F64Array, I64Array
from dflash_runtime.compute.backend import DeviceSampling

_FIRST_BLOCK, _GROWTH = 1024, 16
"""Most likely tokens scanned first for top-p; each further scan takes `_GROWTH` times as many."""
_ROUNDING = 1e-9
"""Bound of the rounding error of a sum of all probabilities."""


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
    typical_p: float = 1.0
    """Keep the tokens whose information is nearest to what is expected, until their probabilities
    pass p (Meister et al. 2022).
    Applied after `top_k`, as llama.cpp does."""
    seed: int | None = None
    """Start of the random sequence; None = a new one each time."""

    def __post_init__(self) -> None:
        for name in ("temperature", "typical_p", "top_p", "min_p"):
            if not isinstance(getattr(self, name), float | int):
                raise SettingsError(f"{name}={getattr(self, name)!r}: must be a number")
        for name, kind in (("top_k", int), ("seed", int | None)):
            if not isinstance(getattr(self, name), kind):
                raise SettingsError(f"{name}={getattr(self, name)!r}: must be a whole number")
        for name, value, is_good, allowed in (
            ("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "from 0 to 100"),
            ("top_k", self.top_k, self.top_k >= 0, "0 or more"),
            ("typical_p", self.typical_p, 0.0 < self.typical_p <= 1.0, "above 0 and up to 1"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and up to 1"),
            ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            ("seed", self.seed, self.seed is None or self.seed >= 0, "0 or more"),
        ):
            if not is_good:
                raise SettingsError(f"{name}={value}: must be {allowed}")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's probabilities, before any sampling option."""

    logprob: float
    """The chosen token's."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the most likely tokens, the most likely first."""


def token_logprobs(logits: F32Array, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of one token and of the `num_top` most likely. Shapes: logits [V]."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    num_top = min(num_top, logits.size)
    if num_top == 1:  # as scoring asks for; thrice as fast
        top_id = int(np.argmax(logits))
        return TokenLogprobs(float(wide[token_id]), ((top_id, float(wide[top_id])),))
    top = np.argpartition(-logits, num_top - 1)[:num_top] if num_top else np.empty(0, np.int64)
    # Ties by id, for an order that does not depend on the partition.
    top = top[np.lexsort((top, -logits[top]))]
    return TokenLogprobs(float(wide[token_id]), tuple((int(i), float(wide[i])) for i in top))


class Sampler:
    """Samples tokens; two samplers with the same options and seed give the same ones.

    Each sampled token takes one number of the generator, whether host or device samples it.
    """

    def __init__(self, options: SamplingParams) -> None:
        self._options = options
        self._random = np.random.default_rng(options.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the argmax, the first of equals."""
        return self._options.temperature == 0.0

    @property
    def needs_host(self) -> bool:
        """Whether no device can sample so: the host does, from its logits."""
        return not self.is_greedy and self._options.typical_p < 1.0

    @property
    def device_sampling(self) -> DeviceSampling | None:
        """The options for sampling on a device; None for argmax."""
        if self.is_greedy:
            return None
        options = self._options
        return DeviceSampling(options.temperature, options.top_k, options.top_p, options.min_p)

    def __call__(self, logits: F32Array, allowed: BoolArray | None = None) -> int:
        """Token id, as `sample` with the next number."""
        return self.sample(logits, 0.0 if self.is_greedy else self._random.random(), allowed)

    def numbers(self, count: int) -> F64Array:
        """Random numbers in [0, 1) for the next `count` tokens. Shapes: result [count]."""
        return self._random.random(count)

    def sample(self, logits: F32Array, number: float, allowed: BoolArray | None = None) -> int:
        """Sample a token id, one of the `allowed`, with a random number in [0, 1). Greedy, it is
        their argmax. Shapes: logits, allowed [V]; allowed may be shorter.

        Tokens are in order of descending logits, ties by id; the one is taken at which the
        cumulative probability of what the filters leave passes `number`. If there is no
        distribution, since a logit is NaN or the largest infinite, it is the argmax; a generation
        ends before such logits are sampled (Steps.finite).
        """
        if allowed is not None:
            # Most places in a grammar allow few tokens, and sorting takes long.
            token_ids = np.flatnonzero(allowed)
            return int(token_ids[self.sample(logits[token_ids], number)])
        if self.is_greedy:
            return int(np.argmax(logits))
        options, size = self._options, logits.size
        # Sorting values is ten times as fast as sorting ids; the id is looked up at the end.
        descending = np.negative(logits)
        if 0 < options.top_k < size:
            descending = np.partition(descending, options.top_k - 1)[: options.top_k]
        descending.sort()
        # Float64, and sums in a fixed order, so that a seed means the same text everywhere.
        probabilities = descending.astype(np.float64)
        # A tiny temperature leaves nothing but the peak; infinite peaks are handled below.
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(probabilities[0], probabilities, out=probabilities)
            probabilities /= options.temperature
        np.exp(probabilities, out=probabilities)
        total = probabilities.sum()
        if np.isnan(total):
            return int(np.argmax(logits))
        probabilities /= total
        kept: I64Array | None = None
        if options.typical_p < 1.0:
            kept = _typical(probabilities, options.typical_p)
            probabilities = probabilities[kept]
            probabilities /= probabilities.sum()
        if options.top_p < 1.0:
            probabilities = _reaching(probabilities, options.top_p)
        if options.min_p > 0.0:
            probabilities = probabilities[probabilities >= options.min_p * probabilities[0]]
        cumulative = np.cumsum(probabilities, out=probabilities)
        place = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
        if kept is not None:
            place = int(kept[place])
        equals = np.flatnonzero(logits == -descending[place])
        return int(equals[place - np.searchsorted(descending, descending[place])])


def _typical(probabilities: F64Array, share: float) -> I64Array:
    """Places of the descending probabilities whose logarithms are nearest to the mean of all of
    them, until their sum passes `share`; ascending. Shapes: [N]; result [M], M > 0."""
    with np.errstate(divide="ignore"):
        information = -np.log(probabilities)  # infinite where a probability is 0
    is_possible = probabilities > 0.0
    entropy = (probabilities[is_possible] * information[is_possible]).sum()
    order = np.argsort(np.abs(information - entropy), kind="stable")
    passed = np.cumsum(probabilities[order]) > share
    num_kept = int(passed.argmax()) + 1 if passed.any() else order.size
    return np.sort(order[:num_kept])


def _reaching(probabilities: F64Array, share: float) -> F64Array:
    """The fewest of descending probabilities that reach `share` together. Shapes: [N]."""
    num_seen = _FIRST_BLOCK
    while True:
        seen = probabilities[:num_seen]
        before = np.cumsum(seen) - seen
        # Past this block every sum before is above `share`, rounding included.
        if num_seen >= probabilities.size or before[-1] > share + _ROUNDING:
            return seen[before < share]
        num_seen *= _GROWTH
