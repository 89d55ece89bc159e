"""The demo's chat template through the server, with OpenAI's client."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from demo.chat.checks import is_right
from demo.chat.evaluate import answer as answer_of
from demo.chat.talks import talks
from demo.chat.template import TEMPLATE

from dflash_runtime import Content, Engine, Reasoning, ToolCall
from dflash_runtime.engine.answer_text import joined_events
from support.processes import ROOT
from support.random_models import Qwen3MoeShape, write_qwen3moe
from support.serving import running_server

pytestmark = pytest.mark.e2e

GET_TIME: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Current time in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}

TRAINED = ROOT / "demo" / "dflash-demo-chat.gguf"


def test_the_trained_model_is_right_about_most_talks_it_has_not_seen() -> None:
    held_out = (asked for talk in talks(1, held_out=True) for asked in talk.asked())
    with Engine.open(TRAINED) as engine:
        right = [is_right(each, answer_of(engine, each, 96)) for each in islice(held_out, 24)]
    assert sum(right) >= 20, right


def test_from_python_the_trained_model_reasons_and_calls_a_tool() -> None:
    with Engine.open(TRAINED) as engine:
        asked = [{"role": "user", "content": "What time is it in Rome?"}]
        assert [*engine.answer(asked, 120, tools=[GET_TIME])][-1] == ToolCall(
            "get_time", '{"city": "Rome"}'
        )
        asked = [{"role": "user", "content": "What is 27 + 45?"}]
        [reasoning, content] = joined_events(engine.answer(asked, 120, stop=["So", "."]))
        assert isinstance(reasoning, Reasoning)
        assert reasoning.text.endswith("So 27 + 45 = 72.")
        assert content == Content("27 + 45 = 72")


def test_the_trained_model_answers_reasons_and_calls_a_tool() -> None:
    def user(text: str) -> list[Any]:
        return [{"role": "user", "content": text}]

    with running_server(TRAINED) as server, server.client() as client:

        def chat(messages: list[Any], **more: Any) -> Any:
            fields = {"model": "demo", "messages": messages, "temperature": 0, **more}
            return client.chat.completions.create(max_tokens=120, **fields).choices[0]

        assert "Oslo" in chat(user("What is the capital of Norway?")).message.content
        message = chat(user("What is 27 + 45?")).message
        assert message.content == "27 + 45 = 72."
        assert message.reasoning_content.endswith("So 27 + 45 = 72.")
        stopped = chat(user("What is 27 + 45?"), stop=["So", " = "])
        assert (stopped.message.content, stopped.finish_reason) == ("27 + 45", "stop")
        assert stopped.message.reasoning_content == message.reasoning_content
        asked = user("What time is it in Rome?")
        called = chat(asked, tools=[GET_TIME])
        assert called.finish_reason == "tool_calls"
        [call] = called.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "get_time",
            {"city": "Rome"},
        )
        schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}}
        named = {"name": "city", "schema": {**schema, "required": ["city"]}}
        beside = {"response_format": {"type": "json_schema", "json_schema": named}}
        again = chat(asked, tools=[GET_TIME], **beside)
        [same] = again.message.tool_calls
        assert (same.function, again.finish_reason) == (call.function, "tool_calls")
        answered = chat(user("What is the capital of Norway?"), tools=[GET_TIME], **beside)
        assert (json.loads(answered.message.content), answered.message.tool_calls) == (
            {"city": "Oslo"},
            None,
        )
        result = {"role": "tool", "tool_call_id": call.id, "content": "14:05"}
        talk = [*asked, called.message.model_dump(exclude_none=True), result]
        assert "14:05" in chat(talk, tools=[GET_TIME]).message.content


def test_a_tool_is_called_and_its_result_is_read_back(tmp_path: Path) -> None:
    shape = Qwen3MoeShape(
        num_layers=2, num_experts=4, num_experts_used=2, vocab_size=300, context_length=1024
    )
    model = write_qwen3moe(tmp_path / "random.gguf", shape, seed=1, tokenizer="bytes")
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    tool = json.loads(json.dumps(GET_TIME))
    tool["function"]["parameters"]["properties"]["city"] = {"enum": ["Oslo", "Rome"]}
    tool["function"]["parameters"]["additionalProperties"] = False
    asked: list[Any] = [{"role": "user", "content": "What time is it in Oslo?"}]
    with (
        running_server(model, "--chat-template-file", str(template)) as server,
        server.client() as client,
    ):
        answer = client.chat.completions.create(
            model="any",
            messages=asked,
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=200,
        ).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.tool_calls is not None
        [call] = answer.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "get_time"
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        result = {"role": "tool", "tool_call_id": call.id, "content": "14:05"}
        talk: list[Any] = [*asked, answer.message.model_dump(exclude_none=True), result]
        again = client.chat.completions.create(
            model="any",
            messages=talk,
            tools=[tool],
            max_tokens=4,
        )
        assert again.usage is not None
        assert again.usage.prompt_tokens > 300  # bytes: both turns, the tool and its result
