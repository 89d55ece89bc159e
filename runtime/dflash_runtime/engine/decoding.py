"""Decoding: each token from the one before it, by the fastest way the backend has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np

from dflash_protocol.ids import F32Array
from dflash_runtime.compute.backend import NOT_FINITE, CapturedStep
from dflash_runtime.engine.sampling import Sampler, TokenLogprobs
from dflash_runtime.engine.steps import Steps

Choose: TypeAlias = Callable[[F32Array], tuple[int, TokenLogprobs | None]]
"""The next token from its logits [V], with its log-probabilities if asked for."""

_AHEAD = 2
"""Captured steps launched before a token is read: one runs, one is queued behind it while the host
is busy. Their results are discarded when a stop token comes."""

_ALONE = 16
"""Tokens without launching ahead, after one that the device has left to the host."""

_NUMBERS = 1024
"""Random numbers, one a sampled token, that are copied to the device at once."""


class Decoding(Protocol):
    """The tokens of one run after its prompt."""

    def next(self, token_id: int, position: int) -> tuple[int, TokenLogprobs | None]:
        """The token after `token_id`, the one returned last, which is at `position`.

        Raises: as Steps.forward; NotFinite.
        """


def decoding_of(
    steps: Steps, run: int, choose: Choose, *, sampler: Sampler | None, end_position: int
) -> Decoding:
    """How this backend decodes a run, before `end_position`.

    `sampler`: given if `choose` does no more than call it; the device can then sample by itself.
    """
    captured = steps.captured(run)
    if captured is None:
        return _StepByStep(steps, run, choose)
    if sampler is None:
        return _FromLogits(steps, run, captured, choose)
    return _OnDevice(steps, run, captured, sampler=sampler, end_position=end_position)


class _StepByStep:
    """Each step is a forward pass driven by the host, layer by layer."""

    def __init__(self, steps: Steps, run: int, choose: Choose) -> None:
        self._steps = steps
        self._run = run
        self._choose = choose

    def next(self, token_id: int, position: int) -> tuple[int, TokenLogprobs | None]:
        hidden = self._steps.forward(self._run, np.array([token_id], np.int32), position)
        return self._choose(self._steps.head(hidden)[0])


class _FromLogits:
    """Captured steps, one at a time; the host chooses from the logits of each."""

    def __init__(self, steps: Steps, run: int, captured: CapturedStep, choose: Choose) -> None:
        self._steps = steps
        self._run = run
        self._captured = captured
        self._choose = choose
        captured.choose_by(None)

    def next(self, token_id: int, position: int) -> tuple[int, TokenLogprobs | None]:
        self._steps.check(self._run)
        captured = self._captured
        captured.begin(token_id, position)
        captured.start()
        if not captured.counts_itself:
            self._steps.count()
        return self._choose(self._steps.finite(captured.logits()))


class _OnDevice:
    """Captured steps that sample on the device, launched ahead while the host reads tokens.

    Where the device cannot decide a token exactly, the host samples it from the logits. More such
    tokens may follow: for the next ones no step is launched ahead.
    """

    def __init__(
        self, steps: Steps, run: int, captured: CapturedStep, *, sampler: Sampler, end_position: int
    ) -> None:
        self._steps = steps
        self._run = run
        self._captured = captured
        self._sampler = sampler
        self._end_position = end_position
        self._num_started: int | None = None
        self._num_alone = 0
        self._numbers: list[float] = []
        self._first_numbered = 0
        captured.choose_by(sampler.device_sampling)

    def next(self, token_id: int, position: int) -> tuple[int, TokenLogprobs | None]:
        self._steps.check(self._run)
        captured = self._captured
        if self._num_started is None:
            captured.begin(token_id, position)
            self._num_started = position
        ahead = 0 if captured.needs_host or self._num_alone else _AHEAD
        while self._num_started < min(position + 1 + ahead, self._end_position):
            self._num_started += 1
            self._expect(self._num_started)
            captured.start()
        next_id = captured.token(position + 1)
        if next_id == NOT_FINITE:
            self._steps.refuse_run()
        self._num_alone = max(0, self._num_alone - 1)
        if next_id is None:
            next_id = self._sampled_by_host(token_id, position)
        if not captured.counts_itself:
            self._steps.count()
        return next_id, None

    def _expect(self, position: int) -> None:
        """Have the random number for this position on the device."""
        if self._sampler.is_greedy:
            return
        if not self._numbers:
            self._first_numbered = position
        if position < self._first_numbered + len(self._numbers):
            return
        numbers = self._sampler.numbers(min(_NUMBERS, self._end_position + 1 - position))
        self._captured.expect(position, numbers)
        self._numbers += numbers.tolist()

    def _sampled_by_host(self, token_id: int, position: int) -> int:
        """The next token, sampled by the host; the next step starts from it."""
        captured = self._captured
        if self._num_started != position + 1:  # the logits at hand are of another step
            captured.begin(token_id, position)
            captured.start()
        self._num_started = None
        self._num_alone = _ALONE
        number = self._numbers[position + 1 - self._first_numbered]
        return self._sampler.sample(self._steps.finite(captured.logits()), number)
