"""Logits do not depend on how many experts are in memory, which, or since when."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from dflash_protocol.ids import F32Array
from dflash_runtime import Engine
from support.disk_engines import MANY_LAYERS, TRAINED, Adversary, opened, stats_of
from support.random_models import write_qwen3moe

FEW, MANY = 40, 300
NUM_PROMPT, PARENTS = 40, [-1, 0, 0, 1, 3, 2, 5]


@pytest.fixture(scope="module", params=["random", *TRAINED], ids=lambda each: Path(each).stem)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in TRAINED:
        return Path(request.param)
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, MANY_LAYERS, seed=5, tensor_type="Q8_0")


def slots_of(path: Path, size: float | str) -> int | None:
    """None if a layer has more experts."""
    with Engine.open(path, backend="cpu", threads=1) as engine:
        layers = engine.spec.moe.layers
    least, total = layers[0].num_experts, sum(each.num_experts for each in layers)
    num_slots = least if size == "a layer" else round(total * float(size))
    return num_slots if num_slots >= least else None


Results = tuple[list[tuple[int, object]], F32Array, list[int], F32Array]


def results_of(engine: Engine, num_tokens: int, between: Callable[[], bool]) -> Results:
    """Tokens with all log-probabilities; logits of chunks and of single tokens; a tree's tokens and
    hidden states. `between` is called between tokens, and between layers of chunks."""
    rng, last = np.random.default_rng(3), engine.spec.num_layers - 1
    ids = rng.integers(0, engine.spec.vocab_size, NUM_PROMPT + 20).tolist()
    tokens: list[tuple[int, object]] = []
    for token in engine.generate(
        ids[:NUM_PROMPT],
        num_tokens,
        ignore_eos=True,
        top_logprobs=engine.spec.vocab_size,
        is_cancelled=between,
    ):
        tokens.append((token.token_id, token.logprobs))
        between()
    assert len(tokens) == num_tokens
    logits = engine.logits(ids, [NUM_PROMPT // 2, 7, 3, *[1] * 30])
    between()
    engine.prefill(ids[:NUM_PROMPT])
    between()
    verified = engine.verify(ids[NUM_PROMPT:][: len(PARENTS)], PARENTS, feature_layers=[last])
    return tokens, logits, verified.next_token_ids.tolist(), verified.features[last]


@cache
def expected_of(path: Path, num_tokens: int) -> Results:
    with opened(path, None) as engine:
        return results_of(engine, num_tokens, lambda: False)


FAST = ("a layer", True, 0.3, FEW), (0.5, False, 0.3, FEW)
CASES = [
    case if case in FAST else pytest.param(*case, marks=pytest.mark.slow)
    for case in product(["a layer", 0.1, 0.5, 1.0], [False, True], [0.0, 0.3], [FEW, MANY])
    if case in FAST or case[-1] == MANY
]


@pytest.mark.wide(1)
@pytest.mark.parametrize(("size", "prefetches", "share", "num_tokens"), CASES)
def test_logits_do_not_depend_on_memory(
    model: Path, size: float | str, prefetches: bool, share: float, num_tokens: int
) -> None:
    """Experts leave at random, `share` of them each time; memory that holds none is NaNs."""
    num_slots = slots_of(model, size)
    if num_slots is None:
        pytest.skip("a layer has more experts")
    tokens, logits, drafted, features = expected_of(model, num_tokens)
    with opened(model, num_slots, moe_predict_prefetch=prefetches) as engine:
        adversary = Adversary(engine, share)
        found = results_of(engine, num_tokens, adversary)
        stats = stats_of(engine)
    assert found[0] == tokens
    np.testing.assert_array_equal(found[1], logits)
    assert found[2] == drafted
    np.testing.assert_array_equal(found[3], features)
    assert stats.failed == 0
    assert adversary.num_calls > 2 * num_tokens
    assert bool(adversary.num_left) == bool(share)
    if size != 1.0 or share:
        assert stats.missed > num_slots
    if prefetches and size != 1.0:
        assert stats.look_ahead.prefetched > 0
