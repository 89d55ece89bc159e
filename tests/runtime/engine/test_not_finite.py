"""What a model computes may be NaN or infinite: that is said, and no token is made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.errors import NotFinite
from dflash_protocol.ids import AnyArray
from dflash_runtime import Engine
from dflash_runtime.engine.sampling import Sampler, SamplingParams, token_logprobs
from dflash_runtime.engine.steps import Steps
from support.emulated_gpu import TINY, install_emulated_gpus
from support.not_finite import EMBEDDINGS, OUTPUT_NORM, with_nan
from support.random_models import write_qwen3moe

PROMPT = [5, 6, 7]
BAD_TOKEN = 9
"""Its embedding is NaN in the models of that name."""
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 1},
    "with log-probabilities": {"top_logprobs": 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")

    def written(name: str, tensor_type: str, **options: Any) -> Path:
        path = folder / f"{name}.gguf"
        return write_qwen3moe(path, TINY, seed=4, tensor_type=tensor_type, **options)

    return {
        "good": written("good", "Q8_0"),
        "F32 good": written("f32-good", "F32"),
        "F32": written("f32", "F32", change=with_nan(OUTPUT_NORM, (3,))),
        "Q8_0": written("q8", "Q8_0", change=with_nan(OUTPUT_NORM, (3,))),
        "token": written("token", "F32", change=with_nan(EMBEDDINGS, (BAD_TOKEN, 3))),
    }


DEVICES = ("reference", "cpu", "cuda:0")
Opened = Callable[[str, str], Engine]


@pytest.fixture
def opened(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """An engine with the model of that name, closed in the end."""
    engines: list[Engine] = []

    def open_one(model: str, device: str) -> Engine:
        options: dict[str, Any] = {"backend": device}
        if device == "cuda:0":
            install_emulated_gpus(monkeypatch)
            options = {"device": device}
        engines.append(Engine.open(models[model], context=48, **options))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", ["F32", pytest.param("Q8_0", marks=pytest.mark.slow)])
def test_one_nan_of_the_last_norm_is_an_error(opened: Opened, model: str, device: str) -> None:
    engine = opened(model, device)
    for options in WAYS.values():
        with pytest.raises(NotFinite, match="logits") as caught:
            list(engine.generate(PROMPT, 4, ignore_eos=True, **options))
        assert "\n" not in str(caught.value)
    with pytest.raises(NotFinite):
        engine.logits(PROMPT)
    with pytest.raises(NotFinite):
        engine.prefill(PROMPT)


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_that_makes_them_so_ends_the_text_in_which_it_stands_and_no_other(
    opened: Opened, device: str
) -> None:
    engine = opened("token", device)
    expected = [t.token_id for t in engine.generate(PROMPT, 6, ignore_eos=True)]
    bad = [*PROMPT, BAD_TOKEN, 8]
    for _ in range(2):
        with pytest.raises(NotFinite):
            list(engine.generate(bad, 4, reuse_prefix=True))
        assert [t.token_id for t in engine.generate(PROMPT, 6, ignore_eos=True)] == expected
    # A tree of draft tokens: of whatever size, by the device or by the host.
    engine.prefill(PROMPT)
    good = engine.verify([3, 4], [-1, 0])
    # More tokens than a step has are cut into parts, each of which takes long to emulate.
    trees = [[BAD_TOKEN], [3, BAD_TOKEN]] + ([[3] * 9 + [BAD_TOKEN]] if device == "cpu" else [])
    for tree in trees:
        with pytest.raises(NotFinite):
            engine.verify(tree, [-1, *range(len(tree) - 1)])
    again = engine.verify([3, 4], [-1, 0])
    assert again.next_token_ids.tolist() == good.next_token_ids.tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_after_the_first_is_looked_at_too(
    opened: Opened, device: str, way: str, models: dict[str, Path]
) -> None:
    """The prompt is well; what a step computes from the token that follows it is not."""
    engine = opened("F32 good", device)
    expected = [t.token_id for t in engine.generate(PROMPT, 4, ignore_eos=True, **WAYS[way])]
    path = models["good"].with_name(f"{way}-{device.replace(':', '')}.gguf")
    # Only a float has NaN in it: of that token's embedding, in a table of floats.
    change = with_nan(EMBEDDINGS, (expected[2], 0))
    models["late"] = write_qwen3moe(path, TINY, seed=4, change=change)
    tokens = opened("late", device).generate(PROMPT, 4, ignore_eos=True, **WAYS[way])
    assert [token.token_id for token in islice(tokens, 3)] == expected[:3]
    with pytest.raises(NotFinite):
        next(tokens)


def test_nothing_of_a_run_that_ended_so_is_used_again(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What made its logits NaN may be in its keys and values."""
    engine = opened("good", "cpu")
    prompt = [*PROMPT] * 4

    def reused() -> int:
        list(engine.generate(prompt, 1, reuse_prefix=True))
        return engine.last_generation.num_reused_tokens

    assert [reused(), reused()] == [0, len(prompt) - 1]
    finite = Steps.finite

    def once(steps: Steps, logits: AnyArray) -> AnyArray:
        monkeypatch.undo()
        return finite(steps, np.full_like(logits, np.nan))

    monkeypatch.setattr(Steps, "finite", once)
    with pytest.raises(NotFinite):
        reused()
    assert [reused(), reused()] == [0, len(prompt) - 1]


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-9, 1.0, 100.0])
def test_finite_logits_however_large_have_tokens_and_probabilities(temperature: float) -> None:
    largest = float(np.finfo(np.float32).max)
    for values in ([-largest, largest, 0.0, largest], [-largest] * 4, [0.0, 1e-45, -1e-45, 0.0]):
        logits = np.array(values, np.float32)
        argmax = set(np.flatnonzero(logits == logits.max()).tolist())
        for options in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"min_p": 1e-300}):
            sampler = Sampler(SamplingParams(temperature, seed=1, **options))
            token_id = sampler(logits)
            assert token_id in argmax or max(values) < 1.0, (values, options)
            found = token_logprobs(logits, token_id, 4)
            assert math.isfinite(found.logprob)
            assert all(math.isfinite(logprob) for _, logprob in found.top)
