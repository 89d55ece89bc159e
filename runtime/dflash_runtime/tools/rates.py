"""How fast a model reads prompts and writes tokens here: trials that are repeated, and their rates.

Prompts are of a text that comes with the program, not random tokens, as which experts are chosen
decides how fast a model is that is divided between devices.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from dflash_protocol.errors import SettingsError
from dflash_runtime.engine.engine import Engine
from dflash_runtime.engine.first_heat import first_text

_STRIDE = 97
"""Tokens by which the prompt of each repetition begins later in the text."""


@dataclass(frozen=True, slots=True)
class RateTrial:
    """A prompt that is read, or tokens that are written after one.

    `num_written` of 0: the time of the prompt counts, else only that of the tokens.
    """

    num_prompt: int
    num_written: int = 0

    @property
    def name(self) -> str:
        """As llama-bench has it: ``pp512``, ``tg128``, or ``tg128 @ d512`` after 512 tokens."""
        if not self.num_written:
            return f"pp{self.num_prompt}"
        after = f" @ d{self.num_prompt}" if self.num_prompt else ""
        return f"tg{self.num_written}{after}"

    @property
    def num_positions(self) -> int:
        """The context that it needs, in tokens."""
        return max(1, self.num_prompt) + self.num_written


@dataclass(frozen=True, slots=True)
class Rates:
    """What a trial's repetitions took, in tokens/s."""

    trial: RateTrial
    tokens_per_s: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.tokens_per_s)

    @property
    def deviation(self) -> float:
        """The sample's standard deviation; 0 of a single one."""
        return statistics.stdev(self.tokens_per_s) if len(self.tokens_per_s) > 1 else 0.0


def trials_of(
    prompts: Iterable[int], written: Iterable[int], *, after: Iterable[int]
) -> list[RateTrial]:
    """A trial for each prompt, and for each number of written tokens after each prompt of `after`,
    of which 0 is none. A number of 0 has no trial."""
    depths = list(after)
    return [
        *(RateTrial(num) for num in prompts if num),
        *(RateTrial(depth, num) for depth in depths for num in written if num),
    ]


def require_room(trials: Iterable[RateTrial], num_positions: int) -> None:
    """Raises: SettingsError if a trial does not fit a context of so many tokens."""
    for trial in trials:
        if trial.num_positions > num_positions:
            raise SettingsError(
                f"{trial.name} needs {trial.num_positions} tokens of context, of which there are "
                f"{num_positions}; measure fewer, or give a larger --context"
            )


def measured(
    engine: Engine,
    trial: RateTrial,
    *,
    repetitions: int,
    on_progress: Callable[[int, int], None],
) -> Rates:
    """Run a trial once to warm up, and then `repetitions` times.

    `on_progress` gets the number of runs that are done, and of all.
    Raises: as `Engine.generate`.
    """
    rates = []
    for number, prompt in enumerate(islice(_prompts(engine, trial), repetitions + 1)):
        on_progress(number, repetitions + 1)
        tokens = engine.generate(
            prompt,
            trial.num_written + 1,
            # The likeliest tokens soon repeat themselves, and with them the experts.
            temperature=1.0,
            seed=number,
            ignore_eos=True,
        )
        for _ in tokens:
            pass
        last = engine.last_generation
        if number:
            is_prompt = not trial.num_written
            rates.append(last.prefill_tokens_per_s if is_prompt else last.decode_tokens_per_s)
    return Rates(trial, tuple(rates))


def _prompts(engine: Engine, trial: RateTrial) -> Iterator[list[int]]:
    """A prompt for each run: parts of the text, which is repeated if it is too short."""
    if engine.tokenizer is None:
        random = np.random.default_rng(1)
        text = random.integers(engine.spec.vocab_size, size=1 << 12).tolist()
    else:
        text = engine.encode_prompt(first_text())
    size, first = max(1, trial.num_prompt), 0
    while True:
        yield list(islice(cycle(text), first, first + size))
        first = (first + _STRIDE) % len(text)
