"""What was predicted of an engine, beside what it measures, and whether it still holds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from dflash_protocol.ids import Phase
from dflash_runtime.engine.generation import GenerationStats
from dflash_runtime.engine.measuring.kept import drop_box, keep_box, kept_box
from dflash_runtime.experts.telemetry import PhaseStats
from dflash_runtime.placement.plan import Forecast, Plan
from dflash_runtime.placement.situation import PlannedRequest

_LOG = logging.getLogger(__name__)

TOLERANCE = 0.25
"""Predictions may be off by this share."""
STALE_AFTER_S = 60.0
FASTER_AFTER_S = 1.0
"""The same of service that is faster: a busy machine explains slow service, but only figures that
were taken while it was busy explain this."""
_WINDOW_S = 2.0
"""Service that is compared as a whole: single steps vary."""

_FEWEST_STEPS = 32
"""Of a generation that tells something: its first steps fill a pipeline."""
_FEWEST_PROMPT_TOKENS, _MOST_PROMPT_TOKENS = 512, 8192
"""Of a prompt that tells something: predictions are of 512 and 4,096 tokens."""
_FARTHEST = 2.0
"""Generations are compared up to so many times the planned request's positions: later steps take
longer than those that were predicted."""


_FEWEST_ASKS = 2000
"""Requests of steps to the processor, before the time that they took is used."""
_EXPLAINS = 0.1
"""A change of the experts' time by this share explains a wrong prediction of steps."""
_SAME = 0.02
"""A smaller change is not written."""


class PredictionWatch:
    """Compares predicted times with measured ones.

    States: fresh; stale, once all service of a minute was off by more than TOLERANCE in the same
    direction. Used by one thread.
    """

    def __init__(self, *, faster_after_s: float = STALE_AFTER_S) -> None:
        """`faster_after_s`: service that is faster has lasted long enough after this time."""
        self._faster_after_s = faster_after_s
        self._predicted_s = self._measured_s = 0.0
        self._off_s = 0.0
        """Service that was off without a break; below 0: faster than predicted."""
        self._ratio = 1.0

    @property
    def is_stale(self) -> bool:
        """Whether the box should be measured anew."""
        return self._off_s >= STALE_AFTER_S or -self._off_s >= self._faster_after_s

    @property
    def ratio(self) -> float:
        """Measured time divided by the predicted one, of the last whole window; 1 before."""
        return self._ratio

    def add(self, *, predicted_s: float, measured_s: float) -> None:
        """Add a piece of service, such as a step. Times that are not positive are ignored."""
        if not (predicted_s > 0.0 and measured_s > 0.0) or self.is_stale:
            return
        self._predicted_s += predicted_s
        self._measured_s += measured_s
        if max(self._predicted_s, self._measured_s) < _WINDOW_S:
            return
        self._ratio = ratio = self._measured_s / self._predicted_s
        direction = (ratio > 1.0 + TOLERANCE) - (ratio < 1.0 - TOLERANCE)
        if direction * self._off_s <= 0.0:  # right again, or off the other way
            self._off_s = 0.0
        self._off_s += direction * self._measured_s
        self._predicted_s = self._measured_s = 0.0


class Predictions:
    """An engine's plan, and whether its steps and prompts take what they were predicted to.

    Both are compared by generation, from times that are taken anyway. Once one of them was off for
    a minute of service, or for a second that was faster, the kept box is dropped, so that the next
    start measures again; for faster service once, as a prediction itself may be wrong. If the
    cause is the processor's experts in a device's steps, the box gets the time that they took
    instead (see `learn`). Predictions from no heat are not compared, unless all experts are on the
    parent's device.
    States: as PredictionWatch. Used by the engine's thread.
    """

    def __init__(
        self,
        plan: Plan | None,
        *,
        request: PlannedRequest,
        cache_dir: str | None = None,
        asked: Callable[[], PhaseStats | None] = lambda: None,
        expert_bytes: float = 0.0,
    ) -> None:
        """`plan`: None if nothing was planned; `cache_dir`: of the kept box. `asked`: what steps
        have asked of the processor so far, None if it has no experts; `expert_bytes`: of one expert
        in the file, on average."""
        self.plan = plan
        self._asked, self._expert_bytes = asked, expert_bytes
        self._farthest = _FARTHEST * (request.prompt + request.written)
        self._cache_dir = cache_dir
        box = None if plan is None else kept_box(plan.origin.box_key, cache_dir)
        faster_after_s = FASTER_AFTER_S
        if box is None or box.is_second:
            faster_after_s = STALE_AFTER_S
        self._steps = PredictionWatch(faster_after_s=faster_after_s)
        self._prompts = PredictionWatch(faster_after_s=faster_after_s)

    def note(self, stats: GenerationStats, elapsed_s: float) -> None:
        """Compare a generation that has ended. `elapsed_s`: from its first token on, its reader's
        time included; a device computes ahead in that, so that a step takes something between this
        and the time that was waited for tokens."""
        plan = self.plan
        if plan is None or self._steps.is_stale or self._prompts.is_stale:
            return
        if not plan.origin.heat_tokens and plan.share_here < 1.0:
            return
        self._note_prompt(plan.forecast, stats)
        self._note_steps(plan.forecast, stats, elapsed_s)
        if self._prompts.is_stale:
            self._drop(plan, Phase.PREFILL, self._prompts.ratio)
        elif self._steps.is_stale and not self.learn():
            self._drop(plan, Phase.DECODE, self._steps.ratio)

    def _note_steps(self, forecast: Forecast, stats: GenerationStats, elapsed_s: float) -> None:
        num_steps = stats.num_generated_tokens - (stats.finish_reason != "stop")
        if num_steps < _FEWEST_STEPS:
            return
        if stats.num_prompt_tokens + num_steps / 2 > self._farthest:
            return
        predicted_s = num_steps / forecast.decode
        measured_s = min(max(predicted_s, stats.decode_s), max(elapsed_s, stats.decode_s))
        self._steps.add(predicted_s=predicted_s, measured_s=measured_s)

    def _note_prompt(self, forecast: Forecast, stats: GenerationStats) -> None:
        num_tokens = stats.num_prompt_tokens - stats.num_reused_tokens
        # Attention to many reused positions takes longer than was predicted.
        if max(_FEWEST_PROMPT_TOKENS, stats.num_reused_tokens) <= num_tokens <= _MOST_PROMPT_TOKENS:
            predicted_s = forecast.prompt_s(num_tokens)
            self._prompts.add(predicted_s=predicted_s, measured_s=stats.prefill_s)

    def _drop(self, plan: Plan, phase: Phase, ratio: float) -> None:
        drop_box(plan.origin.box_key, self._cache_dir, is_doubted=ratio < 1.0)
        # docs: something else uses the machine, or did while it was measured, or its clocks, memory
        # or driver have changed; the next start measures it again
        _LOG.warning(
            "%s takes %.2f times as long as predicted: the kept measurements are dropped",
            phase,
            ratio,
        )

    def learn(self) -> bool:
        """Write into the kept box, once, how long the processor's experts took in steps. The next
        plan uses this time: passes that are measured before an engine is open may be faster.
        Returns whether it differs enough from the box to explain wrong predictions."""
        plan, counted = self.plan, self._asked()
        if plan is None or counted is None or counted.requests < _FEWEST_ASKS:
            return False
        key, device = plan.origin.box_key, str(plan.setup.device)
        box = kept_box(key, self._cache_dir)
        speed = None if box is None else box.host_asked.get(device)
        if box is None or speed is None:
            return False
        num_bytes = counted.pairs / counted.requests * self._expert_bytes
        served = speed.as_served(num_bytes, counted.compute_s / counted.requests)
        before_s, now_s = speed.computing.at(num_bytes), served.computing.at(num_bytes)
        if before_s <= 0.0 or abs(now_s / before_s - 1.0) < _SAME:
            return False
        self._asked = lambda: None
        keep_box(replace(box, host_asked={**box.host_asked, device: served}), self._cache_dir)
        # docs: the next plan uses this time
        _LOG.info("the processor's experts took %.2f times as long as measured", now_s / before_s)
        return abs(now_s / before_s - 1.0) >= _EXPLAINS
