"""How fast an engine has been lately, by the words of a plan's forecast."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from dflash_runtime.engine.generation import GenerationStats
from dflash_runtime.placement.cost import PROMPTS
from dflash_runtime.placement.plan import Forecast, Plan
from dflash_runtime.placement.plan_record import summary_of

_LATEST = 32
"""Generations that are looked back at."""

_SIMILAR = 2.0
"""A prompt that is up to so many times longer or shorter is compared with a predicted one."""

SPEEDS = tuple(field.name for field in fields(Forecast))
"""``decode``, and prompts by their length: in tokens a second."""


class MeasuredSpeeds:
    """Tokens a second of the latest generations, summed up. One thread adds, any may read."""

    def __init__(self) -> None:
        self.rates: Mapping[str, float | None] = dict.fromkeys(SPEEDS)
        """By the names of `SPEEDS`; None before there was such work. Replaced, never changed."""
        self._latest: dict[str, deque[tuple[int, float]]] = {
            name: deque(maxlen=_LATEST) for name in SPEEDS
        }

    def add(self, stats: GenerationStats) -> None:
        """Add a generation. What was not timed, or has another length, is left out."""
        if stats.num_generated_tokens > 1 and stats.decode_s > 0.0:
            self._latest["decode"].append((stats.num_generated_tokens - 1, stats.decode_s))
        num_computed = stats.num_prompt_tokens - stats.num_reused_tokens
        for length in PROMPTS:
            is_similar = length / _SIMILAR <= num_computed <= length * _SIMILAR
            if is_similar and stats.num_generated_tokens and stats.prefill_s > 0.0:
                self._latest[f"prompt_{length}"].append((num_computed, stats.prefill_s))
        self.rates = {name: _rate(each) for name, each in self._latest.items()}


def plan_report(plan: Plan | None, measured: MeasuredSpeeds) -> dict[str, Any] | None:
    """A plan's summary, with ``measured`` beside its ``forecast``; None without a plan."""
    return None if plan is None else {**summary_of(plan), "measured": dict(measured.rates)}


def predicted(plan: Plan) -> Mapping[str, float]:
    """The plan's speeds by the names of `SPEEDS`."""
    return asdict(plan.forecast)


def _rate(latest: deque[tuple[int, float]]) -> float | None:
    seconds = sum(each_s for _, each_s in latest)
    return sum(num_tokens for num_tokens, _ in latest) / seconds if seconds else None
