"""Texts that follow a grammar, on every backend: the tokens, how a text ends, what fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_adapters.text.grammar import Grammar, GrammarKind, GrammarSource, TokenMatcher
from dflash_protocol.errors import GrammarError
from dflash_protocol.ids import I32Array
from dflash_runtime import Engine
from dflash_runtime.engine.demo_model import demo_model_path
from dflash_runtime.engine.steps import Steps
from support.emulated_gpu import TINY, EmulatedGpus
from support.random_models import write_qwen3moe

CONTEXT = 64
PROMPT = [5, 6, 7]
SAMPLED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.5, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
]
ANY_TEXT = GrammarSource(GrammarKind.REGEX, r"(?s:.*)")
PAIR = GrammarSource(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"enum": [1, 22]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    ),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    shape = replace(TINY, vocab_size=300, context_length=CONTEXT)
    return write_qwen3moe(path, shape, seed=4, tensor_type="Q8_0", tokenizer="bytes")


@pytest.fixture(params=["reference", "cpu", "cuda:0"])
def engine(request: pytest.FixtureRequest, model: Path, gpus: EmulatedGpus) -> Iterator[Engine]:
    where = {"backend": "reference"} if request.param == "reference" else {"device": request.param}
    with Engine.open(model, context=CONTEXT, **where) as engine:
        yield engine


def ids(engine: Engine, grammar: Grammar | None, most: int = 50, **options: Any) -> list[int]:
    tokens = engine.generate(PROMPT, most, grammar=grammar, **options)
    return [token.token_id for token in tokens]


def text_of(engine: Engine, token_ids: list[int]) -> str:
    assert engine.tokenizer is not None
    return engine.tokenizer.decode(token_ids)


def test_a_text_follows_its_schema_and_ends_with_it(engine: Engine) -> None:
    grammar = engine.grammars.compile(PAIR)
    for options in SAMPLED:
        written = ids(engine, grammar, **options)
        pair = json.loads(text_of(engine, written))
        assert len(pair["a"]) <= 5
        assert pair["b"] in (1, 22)
        assert engine.last_generation.finish_reason == "stop"
        assert engine.last_generation.num_generated_tokens == len(written)
        # Token by token by the host alone, from the logits.
        assert ids(engine, grammar, top_logprobs=0, **options) == written
        assert ids(engine, grammar, **options) == written


def test_a_forced_text_is_computed_together(
    engine: Engine, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are those that are written one by one; each takes a random number."""
    appended, together = Steps.appended, list[int]()

    def counted(steps: Steps, run: int, token_ids: I32Array, position: int) -> bool:
        is_done = appended(steps, run, token_ids, position)
        together.append(token_ids.size if is_done else 0)
        return is_done

    monkeypatch.setattr(Steps, "appended", counted)
    names = ["a-name-that-takes", "b", "third"]
    letter = {"enum": ["a", "b", "c", "d"]}
    schema = {
        "type": "object",
        "properties": dict.fromkeys(names, letter),
        "required": names,
        "additionalProperties": False,
    }
    source = GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(schema), space="")
    grammar = engine.grammars.compile(source)
    is_captured = request.node.callspec.params["engine"] != "reference"
    for options in SAMPLED:
        one_by_one = ids(engine, grammar, top_logprobs=0, **options)
        assert set(json.loads(text_of(engine, one_by_one))) == {*names}
        assert not together
        for most in (50, *range(20, 30)):
            assert ids(engine, grammar, most, **options) == one_by_one[:most]
            assert (max(together, default=0) > 2) == is_captured
        together.clear()


def test_where_all_may_come_the_text_is_the_free_one(engine: Engine) -> None:
    grammar = engine.grammars.compile(ANY_TEXT)
    may_come = grammar.matcher().allowed()
    for options in SAMPLED[:1]:
        free = ids(engine, None, 20, ignore_eos=True, **options)
        allowed = [bool(may_come[token_id]) for token_id in free]
        num_same = allowed.index(False) if False in allowed else len(free)
        assert ids(engine, grammar, 20, ignore_eos=True, **options)[:num_same] == free[:num_same]


def test_a_free_text_after_a_grammar_is_as_before(engine: Engine) -> None:
    for options in SAMPLED:
        before = ids(engine, None, 8, ignore_eos=True, **options)
        ids(engine, engine.grammars.compile(PAIR), **options)
        assert ids(engine, None, 8, ignore_eos=True, **options) == before


def test_log_probabilities_are_the_models(engine: Engine) -> None:
    grammar = engine.grammars.compile(GrammarSource(GrammarKind.CHOICE, '["xyz"]'))
    tokens = list(engine.generate(PROMPT, 5, grammar=grammar, top_logprobs=300))
    assert text_of(engine, [token.token_id for token in tokens]) == "xyz"
    logits = engine.logits([*PROMPT, *(token.token_id for token in tokens)])
    for position, token in enumerate(tokens, len(PROMPT) - 1):
        assert token.logprobs is not None
        row = logits[position].astype(np.float64)
        log_sum = row.max() + np.log(np.exp(row - row.max()).sum())
        assert token.logprobs.logprob == pytest.approx(row[token.token_id] - log_sum, abs=0.05)


def test_a_text_that_is_too_long_ends_for_its_length(engine: Engine) -> None:
    grammar = engine.grammars.compile(GrammarSource(GrammarKind.REGEX, "[a-z]{500}"))
    for most, reason in ((7, "length"), (500, "context")):
        written = ids(engine, grammar, most)
        assert engine.last_generation.finish_reason == reason
        assert text_of(engine, written).isalpha()


def test_a_grammar_without_a_way_on_ends_the_text_with_an_error(model: Path) -> None:
    with Engine.open(model, backend="reference", context=CONTEXT) as engine:
        grammar = engine.grammars.compile(PAIR)
        [not_allowed] = engine.tokenizer.encode("}") if engine.tokenizer is not None else []
        stuck = grammar.matcher()
        with pytest.raises(GrammarError):
            stuck.accept(not_allowed)
        with pytest.raises(GrammarError):
            ids(engine, _Stuck(stuck))
        assert ids(engine, None, 3, ignore_eos=True)  # it serves on


class _Stuck(Grammar):
    """A grammar whose text is at its end before it has begun."""

    def __init__(self, matcher: TokenMatcher) -> None:
        """Leave out the compiled grammar, which is not used."""
        self._stuck = matcher

    def matcher(self) -> TokenMatcher:
        return self._stuck


def test_the_demo_model_writes_json() -> None:
    with Engine.open(demo_model_path()) as engine:
        grammar = engine.grammars.compile(PAIR)
        for seed in range(5):
            tokens = engine.generate("As JSON: ", 60, grammar=grammar, temperature=1.5, seed=seed)
            pair = json.loads("".join(token.text for token in tokens))
            assert {*pair} == {"a", "b"}
