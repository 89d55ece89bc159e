"""Log-probabilities of a prompt's tokens: those that the logits of the whole prompt give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import F64Array
from dflash_runtime import Engine
from dflash_runtime.engine.sampling import TokenLogprobs
from support.random_models import Qwen3MoeShape, write_qwen3moe

SHAPE = Qwen3MoeShape(
    num_layers=2, num_experts=4, num_experts_used=2, vocab_size=300, context_length=1200
)
PROMPT = [(7 * i * i + i) % 300 for i in range(1100)]
"""Longer than a chunk, and than the group of chunks that goes through each layer at once."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(tmp_path_factory.mktemp("model") / "m.gguf", SHAPE, seed=1)


def log_softmax(engine: Engine, prompt: list[int]) -> F64Array:
    """Shapes: result [T, V]."""
    logits = engine.logits(prompt).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


def scored(
    engine: Engine, prompt: list[int], max_tokens: int, **options: Any
) -> tuple[list[TokenLogprobs], list[int]]:
    found: list[TokenLogprobs] = []

    def note(some: Sequence[TokenLogprobs]) -> None:
        found.extend(some)

    options = {"top_logprobs": 2, "ignore_eos": True, **options}
    tokens = engine.generate(prompt, max_tokens, on_prompt_logprobs=note, **options)
    written = [token.token_id for token in tokens]
    return found, written


@pytest.mark.parametrize(("backend", "longest"), [("reference", 520), ("auto", len(PROMPT))])
def test_they_are_those_of_the_logits(model: Path, backend: str, longest: int) -> None:
    with Engine.open(model, backend=backend, device="cpu") as engine:
        for length, max_tokens in ((1, 0), (2, 3), (70, 0), (longest, 3)):
            check(engine, PROMPT[:length], max_tokens)


def check(engine: Engine, prompt: list[int], max_tokens: int) -> None:
    expected = log_softmax(engine, prompt)
    plain = [token.token_id for token in engine.generate(prompt, 3, ignore_eos=True)]
    found, written = scored(engine, prompt, max_tokens, reuse_prefix=True)
    stats = engine.last_generation
    assert (stats.num_prompt_tokens, stats.num_reused_tokens) == (len(prompt), 0)
    assert (stats.num_generated_tokens, stats.finish_reason) == (max_tokens, "length")
    again = engine.generate(prompt, 3, ignore_eos=True, reuse_prefix=True)
    assert [token.token_id for token in again] == plain
    assert written == plain[:max_tokens]
    assert len(found) == len(prompt) - 1
    for row, token_id, each in zip(expected, prompt[1:], found, strict=False):
        assert each.logprob == pytest.approx(row[token_id], abs=1e-6)
        assert [lp for _, lp in each.top] == pytest.approx(np.sort(row)[:-3:-1], abs=1e-6)


def test_nothing_but_a_prompt_is_computed_only_for_its_log_probabilities(model: Path) -> None:
    with Engine.open(model, backend="reference") as engine:
        with pytest.raises(SettingsError, match="max_tokens"):
            engine.generate([1], 0)
        with pytest.raises(SettingsError, match="top_logprobs"):
            engine.generate([1], 0, on_prompt_logprobs=print)


def test_one_that_is_cancelled_ends(model: Path) -> None:
    with Engine.open(model, backend="reference") as engine:
        calls = iter(range(100))
        found, written = scored(engine, PROMPT, 0, is_cancelled=lambda: next(calls) == 3)
        assert len(found) < len(PROMPT) - 1
        assert written == []
        assert engine.last_generation.finish_reason == "cancelled"
