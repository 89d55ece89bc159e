"""Answers from Python, divided into reasoning, content and calls as the server divides them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_adapters.text.grammar import Grammar, GrammarKind, GrammarSource
from dflash_protocol.errors import ContextExceeded, GrammarError, SettingsError
from dflash_runtime import AsyncEngine, Content, Engine, Reasoning, ToolCall
from dflash_runtime.engine.answer_text import joined_events
from support.random_models import Qwen3MoeShape
from support.random_models import write_qwen3moe as write_model

ASKED = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{{ messages[0].content }}{{ tools }}{% if opens %}<think>{% endif %}{# <tool_call> #}"
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "END"}}\n</tool_call>'
CALLED = ToolCall("add", '{"a": "END"}')
SCHEMA = {"enum": ["red", "blue"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    shape = Qwen3MoeShape(
        num_layers=1, num_experts=4, num_experts_used=2, vocab_size=300, context_length=512
    )
    keys = {"tokenizer.chat_template": TEMPLATE}
    return write_model(path, shape, seed=1, tokenizer="bytes", keys=keys)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine.open(model, backend="reference", context=500) as engine:
        engine.prepare_chat()
        yield engine


def text(engine: Engine, text: str) -> Grammar:
    """A grammar of this text alone."""
    return engine.grammars.compile(GrammarSource(GrammarKind.CHOICE, json.dumps([text])))


def test_an_answer_comes_in_parts(engine: Engine) -> None:
    grammar = text(engine, f"<think>\nEND\n</think>\n\nI add.\n{CALL}")
    for tools in ([ADD], [ADD["function"]]):
        answer = [*engine.answer(ASKED, 200, tools=tools, grammar=grammar, stop="END")]
        assert joined_events(answer) == [Reasoning("END"), Content("I add."), CALLED]
        assert len(answer) > 4
        assert engine.last_generation.finish_reason == "stop"
    written = engine.last_generation.num_generated_tokens
    stopped = engine.answer(ASKED, 200, tools=[ADD], grammar=grammar, stop=["add", "no"])
    assert joined_events(stopped) == [Reasoning("END"), Content("I ")]
    assert engine.last_generation.finish_reason == "stop"
    assert engine.last_generation.num_generated_tokens < written
    [*_, last] = joined_events(engine.answer(ASKED, 200, grammar=grammar))
    assert last == Content(f"I add.\n{CALL}")  # it is no tool that was offered


def test_its_format_may_be_named(engine: Engine) -> None:
    grammar = text(engine, '<invoke name="add">\n</invoke>')
    named = engine.answer(ASKED, 200, tools=[ADD], grammar=grammar, answer_format="minimax-m2")
    assert [*named] == [ToolCall("add", "{}")]


def test_an_answer_that_is_left_ends_its_generation(engine: Engine) -> None:
    answer = engine.answer(ASKED, 200, ignore_eos=True, temperature=1.0, seed=1)
    next(answer)
    answer.close()  # type: ignore[attr-defined]
    assert engine.last_generation.num_generated_tokens < 200
    assert [*engine.answer(ASKED, 3, ignore_eos=True)]


def test_a_schema_is_followed_by_what_is_no_call(engine: Engine) -> None:
    kinds = set()
    for seed in range(8):
        options: dict[str, Any] = {"schema": SCHEMA, "temperature": 1.0, "seed": seed}
        for tools in ([], [ADD]):
            answer = joined_events(engine.answer(ASKED, 150, tools=tools, **options))
            if engine.last_generation.finish_reason == "length":  # calls, one after the other
                assert tools
                continue
            kinds |= {type(each) for each in answer}
            if isinstance(answer[0], Content):
                assert json.loads(answer[0].text) in SCHEMA["enum"]
    assert kinds >= {Content}
    opened = engine.answer(ASKED, 40, extra={"opens": True}, schema=SCHEMA)
    assert {type(each) for each in opened} == {Reasoning}  # it never closes it


def test_what_cannot_be_asked_is_refused(engine: Engine) -> None:
    unnamed: list[Any] = [
        [{"a": 1}],
        [ADD, ADD],
        [{"function": 3}],
        [{"name": "a", "parameters": 1}],
    ]
    for tools in unnamed:
        with pytest.raises(SettingsError, match="tools"):
            engine.answer(ASKED, 4, tools=tools)
    with pytest.raises(SettingsError, match="answer_format"):
        engine.answer(ASKED, 4, answer_format="hermse")
    with pytest.raises(SettingsError, match="stop"):
        engine.answer(ASKED, 4, stop=[""])
    with pytest.raises(SettingsError):
        engine.answer(ASKED, 4, schema=SCHEMA, grammar=text(engine, "a"))
    with pytest.raises(GrammarError):
        engine.answer(ASKED, 4, schema={"type": "strin"})
    with pytest.raises(GrammarError, match="glm"):
        engine.answer(ASKED, 4, schema=SCHEMA, tools=[ADD], answer_format="glm")
    with pytest.raises(ContextExceeded):
        engine.answer([{"role": "user", "content": "a" * 600}], 4)


@pytest.mark.asyncio
async def test_answers_for_asyncio_are_the_same(model: Path) -> None:
    async with AsyncEngine.open(model, backend="reference", context=500) as engine:
        written = f"<think>hm</think>I add.{CALL}"
        grammar = await engine.call(lambda each: text(each, written))
        asked: dict[str, Any] = {"tools": [ADD], "grammar": grammar}
        answer = engine.answer(ASKED, 200, **asked)
        parts = [part async for part in answer]
        assert joined_events(parts) == [Reasoning("hm"), Content("I add."), CALLED]
        assert answer.stats is not None
        assert answer.stats.finish_reason == "stop"
        assert await engine.answer(ASKED, 200, **asked, stop=".").text() == "I add"
        with pytest.raises(SettingsError, match="tools"):
            await engine.answer(ASKED, 200, tools=[{"a": 1}]).text()
        assert await engine.answer(ASKED, 9, schema=SCHEMA).text() in ('"red"', '"blue"')
