"""DRY ("don't repeat yourself"): makes tokens less likely that would go on repeating what stands
before, the more so the longer the repeated part is.

As llama.cpp defines it: if the last n tokens stand earlier too, the token that followed them there
loses ``multiplier * base ** (n - allowed_length)``, if n reaches the allowed length. Nothing is
repeated across a sequence breaker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import I32Array
from dflash_runtime.engine.breakers import LONGEST_TAIL, Breakers

_LARGEST = 3e38
_LARGEST_LOG = 88.7228391
"""Of the largest float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dry:
    """How repetitions are penalised.

    Raises: SettingsError naming the option that is out of range.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    window: int | None = None
    """How many of the latest tokens are looked at; None: all."""
    breakers: Breakers = field(default_factory=Breakers)

    def __post_init__(self) -> None:
        for name, least in (("multiplier", 0.0), ("base", 1.0)):
            value = getattr(self, name)
            is_number = isinstance(value, float | int) and not isinstance(value, bool)
            if not is_number or not least <= value <= 100.0:
                raise SettingsError(f"dry_{name}={value!r}: must be a number from {least:g} to 100")
        if self.allowed_length < 0:
            raise SettingsError(f"dry_allowed_length={self.allowed_length}: must be 0 or more")
        if self.window is not None and self.window < 0:
            raise SettingsError(f"dry_penalty_last_n={self.window}: must be 0 or more")

    def penalty(self, length: int) -> float:
        """What a token loses that would go on after a repetition of that length."""
        exponent = length - self.allowed_length
        if self.base > 1.000001:
            exponent = min(exponent, int(_LARGEST_LOG / math.log(self.base)))
        return min(self.multiplier * self.base**exponent, _LARGEST)


class DryTable:
    """The tokens of one generation that would go on with a repetition. Used by one thread.

    Every token costs a pass over those of the window.
    """

    def __init__(self, dry: Dry, prompt: I32Array, *, vocab_size: int) -> None:
        """Shapes: prompt [T], at least one token."""
        self._dry = dry
        self._size = prompt.size
        self._token_ids = np.zeros(max(64, 2 * prompt.size), np.int32)
        self._token_ids[: prompt.size] = prompt
        self._lengths = np.zeros_like(self._token_ids)
        """At each earlier token, how many up to it equal the last ones."""
        self._lengths[: prompt.size] = _suffix_lengths(prompt.tolist())
        self._longest = np.zeros(vocab_size, np.int32)
        """Scratch: by token id."""
        self._break: int | None = None
        """The last place at which a sequence breaker begins."""
        for place in range(prompt.size - 1, -1, -1):
            if self._break_length(place) is not None:
                self._break = place
                break

    def accept(self, token_id: int) -> None:
        """Go on after a token."""
        end = self._size
        if end == self._token_ids.size:
            self._token_ids = np.resize(self._token_ids, 2 * end)
            self._lengths = np.resize(self._lengths, 2 * end)
        tokens, lengths = self._token_ids, self._lengths
        tokens[end] = token_id
        first = max(1, end + 1 - self._num_seen(end + 1))
        same = tokens[first:end] == token_id
        lengths[first:end] = np.where(same, lengths[first - 1 : end - 1] + 1, 0)
        lengths[0] = tokens[0] == token_id
        lengths[end] = 0
        self._size = end + 1
        # Breakers of several tokens are complete some tokens after they began.
        for place in range(end, max(-1, end - LONGEST_TAIL - 1), -1):
            if self._break is not None and place <= self._break:
                break
            if self._break_length(place) is not None:
                self._break = place
                break

    def penalties(self) -> dict[int, float]:
        """What each token loses that would go on with a repetition, by its id."""
        dry, size = self._dry, self._size
        num_seen = self._num_seen(size)
        if num_seen <= dry.allowed_length:
            return {}
        limit = num_seen
        if self._break is not None and size - 1 - self._break < num_seen:
            length = self._break_length(self._break)
            assert length is not None
            limit = size - 1 - self._break - length
        if limit < dry.allowed_length:
            return {}
        first = size - num_seen
        # A repetition may not begin before the window.
        lengths = np.minimum(self._lengths[first : size - 1], np.arange(1, num_seen))
        lengths = np.minimum(lengths, limit)
        places = np.flatnonzero(lengths >= dry.allowed_length)
        token_ids = self._token_ids[first + 1 + places]
        longest = self._longest
        longest[token_ids] = -1
        np.maximum.at(longest, token_ids, lengths[places])
        found = np.unique(token_ids)
        of_length = {int(each): dry.penalty(int(each)) for each in np.unique(longest[found])}
        return {
            token_id: of_length[length]
            for token_id, length in zip(found.tolist(), longest[found].tolist(), strict=True)
            if () not in dry.breakers.tails.get(token_id, ())
        }

    def _num_seen(self, size: int) -> int:
        window = self._dry.window
        return size if window is None else min(size, window)

    def _break_length(self, place: int) -> int | None:
        """Tokens of the longest breaker that begins at a place, but for the first; None: none."""
        tails = self._dry.breakers.tails.get(int(self._token_ids[place]))
        if tails is None:
            return None
        after = self._token_ids[place + 1 : min(self._size, place + 1 + LONGEST_TAIL)].tolist()
        fitting = [len(tail) for tail in tails if list(tail) == after[: len(tail)]]
        return max(fitting, default=None)


def _suffix_lengths(token_ids: Sequence[int]) -> list[int]:
    """At each token, how many up to it equal the last ones; 0 at the last. Takes linear time: the
    Z-algorithm (Gusfield 1997, section 1.4) on the reversed sequence."""
    reverse = token_ids[::-1]
    size = len(reverse)
    found = [0] * size
    left = right = 0
    for place in range(1, size):
        length = min(right - place, found[place - left]) if place < right else 0
        while place + length < size and reverse[length] == reverse[place + length]:
            length += 1
        found[place] = length
        if place + length > right:
            left, right = place, place + length
    return found[::-1]
