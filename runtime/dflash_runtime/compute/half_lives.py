"""How long uses of experts count where the least used leave, and how that is chosen: what the
processor's arena and the simulator of caches agree on.

Uses that count for two tokens are nearly LRU, those that count for thousands a static set. Which of
them finds most differs from model to model: each step, all of them are tried on what is chosen, as
if each had memory of its own for so many experts of a layer.
"""

from __future__ import annotations

import math
from enum import StrEnum

HALF_LIVES = (2.0, 16.0, 128.0, 2048.0)
"""Tokens after which a use counts half."""

RATES = tuple(math.log(2.0) / each for each in HALF_LIVES)
"""A use counts 2 ** (token / half-life), whose logarithm grows so much with each token. Keys of
experts are logarithms of sums of such uses."""

OLDEST = 40.0
"""Uses whose keys are so much smaller add nothing, and are alike."""

SOON = 2.0
"""By how much the key of an expert counts more, at most, if its layer comes next, than if its layer
has just been computed: until it may be used again, that one takes its place for a whole step."""

FIRST = 1
"""Which is used until more is known: in the trained demo models it finds most, or nearly; see
docs/worklog.md."""

WINDOW = 2000
"""Tokens whose misses are compared, later ones counting more."""

LEAST_GAIN = 0.05
"""Another one is used if it would miss less by this share."""

LEAST_TOKENS = 64
"""That must have been seen."""


class CachePolicy(StrEnum):
    """Values of the setting: which half-life is used; with AUTO the one that finds most."""

    AUTO = "auto"
    LRU = "lru"
    LFU = "lfu"
    STATIC = "static"

    @property
    def first(self) -> int:
        """The index in HALF_LIVES of the one that is used, with AUTO at first."""
        fixed = {CachePolicy.LRU: 2.0, CachePolicy.LFU: 128.0, CachePolicy.STATIC: 2048.0}
        return HALF_LIVES.index(fixed[self]) if self in fixed else FIRST
