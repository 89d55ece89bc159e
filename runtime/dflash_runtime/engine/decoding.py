"""Decoding: each token from the one before it, by whichever way is the fastest here.

Knows nothing of text; a generation asks for one token after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np

from dflash_protocol.ids import F32Array
from dflash_runtime.compute.backend import RecordedStep
from dflash_runtime.engine.sampling import TokenLogprobs
from dflash_runtime.engine.steps import Steps

Choose: TypeAlias = Callable[[F32Array], tuple[int, TokenLogprobs | None]]
"""The next token from its logits [V], with its log-probabilities if they are wanted."""

_AHEAD = 2
"""Steps that are started before a token is read: one that computes, and one that waits for it while
the host is busy with other things. When a stop token comes, they were in vain."""


class Decoding(Protocol):
    """The tokens of one run after its prompt."""

    def next(self, token_id: int, position: int) -> tuple[int, TokenLogprobs | None]:
        """The token that follows `token_id`, which is the one returned last, at `position`.

        Raises: as Steps.forward.
        """


def decoding_of(
    steps: Steps, run: int, choose: Choose, *, is_greedy: bool, end_position: int
) -> Decoding:
    """How a run goes on; no token from `end_position` on is ever computed.

    `is_greedy`: all that `choose` does is to take the likeliest token.
    """
    recorded = steps.recorded(run)
    if recorded is None:
        return _StepByStep(steps, run, choose)
    if is_greedy and not recorded.needs_host:
        return _RunningAhead(steps, run, recorded, end_position)
    return _Recorded(steps, run, recorded, choose=choose, is_greedy=is_greedy)


class _StepByStep:
    """A step is asked of every layer's owners."""

    def __init__(self, steps: Steps, run: int, choose: Choose) -> None:
        self._steps = steps
        self._run = run
        self._choose = choose

    def next(self, token_id: int, position: int) -> tuple[int, TokenLogprobs | None]:
        hidden = self._steps.forward(self._run, np.array([token_id], np.int32), position)
        return self._choose(self._steps.head(hidden)[0])


class _Recorded:
    """One recorded step after the other: the host reads a token, or chooses it from the logits."""

    def __init__(
        self,
        steps: Steps,
        run: int,
        recorded: RecordedStep,
        *,
        choose: Choose,
        is_greedy: bool,
    ) -> None:
        self._steps = steps
        self._run = run
        self._recorded = recorded
        self._choose = choose
        self._is_greedy = is_greedy

    def next(self, token_id: int, position: int) -> tuple[int, TokenLogprobs | None]:
        self._steps.check(self._run)
        recorded = self._recorded
        recorded.begin(token_id, position)
        recorded.start()
        if not recorded.needs_host:
            self._steps.count()
        if self._is_greedy:
            return recorded.token(position + 1), None
        return self._choose(recorded.logits())


class _RunningAhead:
    """The device takes the likeliest token itself, and goes on while the host reads it."""

    def __init__(self, steps: Steps, run: int, recorded: RecordedStep, end_position: int) -> None:
        self._steps = steps
        self._run = run
        self._recorded = recorded
        self._end_position = end_position
        self._num_started = -1

    def next(self, token_id: int, position: int) -> tuple[int, TokenLogprobs | None]:
        self._steps.check(self._run)
        if self._num_started < 0:
            self._recorded.begin(token_id, position)
            self._num_started = position
        while self._num_started < min(position + 1 + _AHEAD, self._end_position):
            self._recorded.start()
            self._num_started += 1
        next_id = self._recorded.token(position + 1)
        self._steps.count()
        return next_id, None
