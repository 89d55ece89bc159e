"""Penalties and biases: which tokens they change and by how much, on every backend alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import F32Array
from dflash_runtime import Engine
from dflash_runtime.engine.dry import Dry
from dflash_runtime.engine.penalties import MOST_BIASES, Penalties, PenaltyTable, changed
from support.emulated_gpu import TINY, EmulatedGpus
from support.examples import examples
from support.random_models import write_qwen3moe

CONTEXT, VOCABULARY = 64, 67
PROMPT = [5, 6, 7, 5]
EACH = [
    Penalties(presence=3.0),
    Penalties(frequency=1.5),
    Penalties(repetition=1.3),
    Penalties(repetition=0.8, window=3),
    Penalties(biases={3: 100.0}),
    Penalties(presence=-1.0, frequency=0.3, repetition=1.1, window=5, biases={1: 2.0, 9: -50.0}),
    Penalties(repetition=1.1, dry=Dry(multiplier=2.0, allowed_length=0, window=9)),
]


def plainly_changed(
    penalties: Penalties, logits: F32Array, prompt: list[int], written: list[int]
) -> F32Array:
    """Token by token, from the definition."""
    tokens = prompt + written
    if penalties.window is not None:
        tokens = tokens[max(0, len(tokens) - penalties.window) :]
    counts = Counter(written)
    result = logits.copy()
    for token_id in range(logits.size):
        logit, repetition = result[token_id], np.float32(penalties.repetition)
        if token_id in tokens:
            logit = logit / (repetition if logit > 0 else np.float32(1) / repetition)
        offset = penalties.frequency * counts[token_id] - penalties.biases.get(token_id, 0.0)
        offset += penalties.presence if counts[token_id] else 0.0
        result[token_id] = logit - np.float32(offset)
    return result


TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=200)


@examples(150)
@given(
    st.builds(
        Penalties,
        presence=st.sampled_from([0.0, 0.5, -2.0]),
        frequency=st.sampled_from([0.0, 0.25, -1.0]),
        repetition=st.sampled_from([1.0, 1.1, 0.5]),
        window=st.sampled_from([None, 0, 1, 7, 500]),
        biases=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=5),
    ),
    TOKENS.filter(bool),
    TOKENS,
    st.integers(0, 1 << 32),
)
def test_logits_change_as_they_are_defined_to(
    penalties: Penalties, prompt: list[int], written: list[int], seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 5, VOCABULARY).astype(np.float32)
    table = PenaltyTable(penalties, np.array(prompt, np.int32), vocab_size=VOCABULARY)
    for token_id in written:
        table.accept(token_id)
    changes = table.changes
    assert np.unique(changes.token_ids).size == changes.token_ids.size
    expected = plainly_changed(penalties, logits, prompt, written)
    assert changed(logits, changes).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "fields",
    [
        {"presence": 101.0},
        {"frequency": float("nan")},
        {"repetition": 0.0},
        {"repetition": -1.0},
        {"repetition": "1"},
        {"window": -1},
        {"biases": {1: 101.0}},
        {"biases": {1: float("inf")}},
        {"biases": dict.fromkeys(range(MOST_BIASES + 1), 1.0)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_out_of_range_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        Penalties(**fields)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, replace(TINY, vocab_size=VOCABULARY), seed=4, tensor_type="Q8_0")


@pytest.fixture(params=["reference", "cpu", "cuda:0"])
def engine(request: pytest.FixtureRequest, model: Path, gpus: EmulatedGpus) -> Iterator[Engine]:
    where = {"backend": "reference"} if request.param == "reference" else {"device": request.param}
    with Engine.open(model, context=CONTEXT, **where) as engine:
        yield engine


def ids(engine: Engine, most: int = 12, **options: Any) -> list[int]:
    tokens = engine.generate(PROMPT, most, ignore_eos=True, **options)
    return [token.token_id for token in tokens]


def test_the_device_chooses_as_the_host_does(engine: Engine) -> None:
    free = ids(engine)
    samplings: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3}]
    for penalties in EACH:
        for sampling in samplings:
            written = ids(engine, penalties=penalties, **sampling)
            # With log-probabilities the host chooses each token from the model's logits.
            assert ids(engine, penalties=penalties, top_logprobs=0, **sampling) == written
    assert ids(engine, penalties=Penalties(biases={3: 100.0}), most=5) == [3] * 5
    assert ids(engine, penalties=Penalties(biases={free[0]: -100.0}), most=1) != free[:1]
    assert len({*ids(engine, penalties=Penalties(presence=100.0))}) == 12
    assert ids(engine) == ids(engine, penalties=Penalties()) == free


def test_tokens_that_are_to_end_a_text_do(engine: Engine) -> None:
    free = ids(engine)
    last = next(index for index in range(1, 12) if free[index] not in free[:index])
    assert ids(engine, stop_ids=[free[last]]) == free[:last]
    assert engine.last_generation.finish_reason == "stop"


def test_a_bias_of_no_token_is_refused(engine: Engine) -> None:
    with pytest.raises(SettingsError, match=f"{VOCABULARY}: is no token"):
        ids(engine, penalties=Penalties(biases={VOCABULARY: 1.0}))
