"""Rates are those of the runs after the first, of exactly the tokens that a trial names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_protocol.errors import SettingsError
from dflash_runtime.engine.engine import GenerationStats
from dflash_runtime.tools.rates import Rates, RateTrial, measured, require_room, trials_of


class CountingEngine:
    """An engine of which run i takes i seconds for a prompt, and i for all tokens after the first;
    the text that prompts are taken from has 300 tokens."""

    def __init__(self, *, has_tokenizer: bool = True) -> None:
        self.spec = SimpleNamespace(vocab_size=50)
        self.tokenizer = object() if has_tokenizer else None
        self.asked: list[tuple[list[int], int, dict[str, Any]]] = []
        self.last_generation = GenerationStats()

    def encode_prompt(self, text: str) -> list[int]:
        assert text
        return list(range(300))

    def generate(
        self, prompt: Sequence[int], max_tokens: int, **options: Any
    ) -> Iterator[SimpleNamespace]:
        self.asked.append((list(prompt), max_tokens, options))
        took_s = float(len(self.asked))
        self.last_generation = GenerationStats(
            num_prompt_tokens=len(prompt),
            num_generated_tokens=max_tokens,
            prefill_s=took_s,
            decode_s=took_s,
        )
        yield from [SimpleNamespace()] * max_tokens


def run(engine: CountingEngine, trial: RateTrial, repetitions: int) -> Rates:
    return measured(
        engine,  # type: ignore[arg-type]
        trial,
        repetitions=repetitions,
        on_progress=lambda done, total: None,
    )


def test_the_first_run_only_warms_up() -> None:
    engine = CountingEngine()
    rates = run(engine, RateTrial(120), 2)
    assert rates.tokens_per_s == (120 / 2, 120 / 3)
    assert rates.mean == 50
    assert rates.deviation == pytest.approx(200**0.5)
    assert [(len(prompt), max_tokens) for prompt, max_tokens, _ in engine.asked] == [(120, 1)] * 3
    assert run(CountingEngine(), RateTrial(10), 1).deviation == 0


def test_written_tokens_are_timed_without_the_prompt_and_drawn_anew_each_time() -> None:
    engine = CountingEngine()
    rates = run(engine, RateTrial(0, 60), 2)
    assert rates.tokens_per_s == (30, 20)
    assert [(len(prompt), max_tokens) for prompt, max_tokens, _ in engine.asked] == [(1, 61)] * 3
    options = [each for _, _, each in engine.asked]
    assert all(each["ignore_eos"] and each["temperature"] == 1 for each in options)
    assert len({each["seed"] for each in options}) == 3


def test_prompts_differ_and_go_round_the_text_if_it_is_too_short() -> None:
    engine = CountingEngine()
    run(engine, RateTrial(700), 3)
    prompts = [prompt for prompt, _, _ in engine.asked]
    assert len({tuple(prompt) for prompt in prompts}) == 4
    assert prompts[1] == [(97 + each) % 300 for each in range(700)]
    without = CountingEngine(has_tokenizer=False)
    run(without, RateTrial(9000), 1)
    assert all(0 <= each < 50 for prompt, _, _ in without.asked for each in prompt)


def test_trials_have_the_names_of_llama_bench() -> None:
    trials = trials_of([512, 0, 64], [128, 0], after=[0, 512])
    assert [each.name for each in trials] == ["pp512", "pp64", "tg128", "tg128 @ d512"]
    assert [each.num_positions for each in trials] == [512, 64, 129, 640]
    assert trials_of([0], [0], after=[0]) == []


def test_what_does_not_fit_the_context_is_refused_before_anything_runs() -> None:
    require_room(trials_of([512], [128], after=[384]), 512)
    with pytest.raises(SettingsError, match=r"tg128 @ d385 needs 513 tokens of context.* 512;"):
        require_room(trials_of([512], [128], after=[385]), 512)
