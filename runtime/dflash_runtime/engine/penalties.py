"""Penalties for tokens that were used before, and biases of tokens: changes of a step's logits.

A logit is divided by the repetition penalty if it is above zero, else by its reciprocal (Keskar et
al. 2019, section 4.1); then OpenAI's presence and frequency penalties and DRY's are taken off, and
the bias is added.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.backend import LogitChanges
from dflash_runtime.engine.dry import Dry, DryTable

MOST_BIASES = 1024
_MOST = 100.0


@dataclass(frozen=True, slots=True)
class Penalties:
    """What changes logits before a token is chosen. The defaults change nothing.

    Raises: SettingsError naming the option that is out of range.
    """

    presence: float = 0.0
    """Taken from the logit of each token that was generated."""
    frequency: float = 0.0
    """The same, for each time that it was."""
    repetition: float = 1.0
    """Makes tokens of the prompt and of what was generated less likely if above 1."""
    window: int | None = None
    """How many of the latest tokens `repetition` looks at; None: all."""
    biases: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    dry: Dry | None = None

    def __post_init__(self) -> None:
        for name, least in (("presence", -_MOST), ("frequency", -_MOST), ("repetition", 0.01)):
            _check_number(f"{name}_penalty", getattr(self, name), least, _MOST)
        if self.window is not None and self.window < 0:
            raise SettingsError(f"repeat_last_n={self.window}: must be 0 or more")
        if len(self.biases) > MOST_BIASES:
            raise SettingsError(f"logit_bias={len(self.biases)} tokens: at most {MOST_BIASES}")
        for value in self.biases.values():
            _check_number("logit_bias", value, -_MOST, _MOST)

    @property
    def is_neutral(self) -> bool:
        """Whether they change nothing."""
        return self == Penalties(window=self.window)


class PenaltyTable:
    """The tokens whose logits one generation changes, and how. Used by one thread."""

    def __init__(self, penalties: Penalties, prompt: I32Array, *, vocab_size: int) -> None:
        """Raises: SettingsError for a bias of a token that does not exist."""
        self._penalties = penalties
        self._places: dict[int, int] = {}
        """By token id, its place in the arrays."""
        self._token_ids = np.zeros(64, np.int32)
        self._divisors, self._offsets = (np.zeros(64, np.float32) for _ in range(2))
        self._generated = Counter[int]()
        self._latest: deque[int] | None = None
        """The latest tokens, if `repetition` looks at so many."""
        self._seen = Counter[int]()
        """How often each is among those that `repetition` looks at."""
        self._dry: DryTable | None = None
        self._of_dry: dict[int, float] = {}
        """What `_dry` takes off, by token id."""
        for token_id in penalties.biases:
            if not 0 <= token_id < vocab_size:
                raise SettingsError(f"logit_bias={token_id}: is no token of this model")
            self._update(token_id)
        if penalties.repetition != 1.0:
            latest = prompt.tolist()
            if penalties.window is not None:
                latest = latest[max(0, len(latest) - penalties.window) :]
                self._latest = deque(latest)
            self._seen.update(latest)
            for token_id in self._seen:
                self._update(token_id)
        if penalties.dry is not None:
            self._dry = DryTable(penalties.dry, prompt, vocab_size=vocab_size)
            self._update_dry(self._dry)

    def accept(self, token_id: int) -> None:
        """Go on after a token."""
        self._generated[token_id] += 1
        latest, seen = self._latest, self._seen
        seen[token_id] += 1
        if latest is not None:
            latest.append(token_id)
            if len(latest) > (self._penalties.window or 0):
                oldest = latest.popleft()
                seen[oldest] -= 1
                self._update(oldest)
        self._update(token_id)
        if self._dry is not None:
            self._dry.accept(token_id)
            self._update_dry(self._dry)

    @property
    def changes(self) -> LogitChanges:
        """Of the next step; valid until `accept`."""
        size = len(self._places)
        return LogitChanges(self._token_ids[:size], self._divisors[:size], self._offsets[:size])

    def _update_dry(self, dry: DryTable) -> None:
        old, self._of_dry = self._of_dry, dry.penalties()
        for token_id in old.keys() | self._of_dry.keys():
            if old.get(token_id) != self._of_dry.get(token_id):
                self._update(token_id)

    def _update(self, token_id: int) -> None:
        penalties, count = self._penalties, self._generated[token_id]
        place = self._places.setdefault(token_id, len(self._places))
        if place == self._token_ids.size:
            self._token_ids = np.resize(self._token_ids, 2 * place)
            self._divisors = np.resize(self._divisors, 2 * place)
            self._offsets = np.resize(self._offsets, 2 * place)
        self._token_ids[place] = token_id
        self._divisors[place] = penalties.repetition if self._seen[token_id] > 0 else 1.0
        self._offsets[place] = (
            penalties.frequency * count
            + (penalties.presence if count else 0.0)
            - penalties.biases.get(token_id, 0.0)
            + self._of_dry.get(token_id, 0.0)
        )


def changed(logits: F32Array, changes: LogitChanges) -> F32Array:
    """A copy of finite logits with the changes, the same bits as on a device. Shapes: [V]."""
    result = logits.copy()
    of_tokens = result[changes.token_ids]
    divisors = np.where(of_tokens > 0, changes.divisors, np.float32(1) / changes.divisors)
    largest = np.finfo(np.float32).max  # infinite logits end a text
    with np.errstate(over="ignore"):
        result[changes.token_ids] = np.clip(
            of_tokens / divisors - changes.offsets, -largest, largest
        )
    return result


def _check_number(name: str, value: object, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, float | int) or not math.isfinite(value):
        raise SettingsError(f"{name}={value!r}: must be a number")
    if not least <= value <= most:
        raise SettingsError(f"{name}={value}: must be from {least:g} to {most:g}")
