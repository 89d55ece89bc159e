"""Tools and reasoning: what a chat's body may ask for, and how answers have them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from dflash_protocol.settings import Settings
from dflash_runtime import Engine
from dflash_runtime.serving import generation
from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.requests import ChatBody, ChatMessage, parse_body
from support.serving import CHAT_TEMPLATE

Serve = Callable[..., AbstractAsyncContextManager[Any]]
MESSAGES = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
LONG = '{"a": [' + ",".join(["[]"] * 100_000) + "]}"
"""Arguments whose parsing would take long."""
TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }} Call as <tool_call>.{% endif %}"
    "{%- if enable_thinking is false %}quick{% endif %}"
    + CHAT_TEMPLATE
    + "{%- if opens %}<think>\n{% endif %}"
)


def body(**fields: Any) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"messages": MESSAGES, **fields}).encode())


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{}]}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [{**WEATHER, "more": 1}]}, "tools"),
        ({"tools": [named("a b")]}, "tools"),
        ({"tools": [named("")]}, "tools"),
        ({"tools": [named("a"), named("a")]}, "tools"),
        ({"tools": [named(str(each)) for each in range(600)]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": named("other")}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "reasoning_format": "none"}, "reasoning_format"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"reasoning_format": "xml"}, "reasoning_format"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_wrong_or_not_supported_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        body(**fields)
    assert (caught.value.status, caught.value.body["error"]["param"]) == (400, param)


def test_tools_and_effort_become_variables_of_the_template() -> None:
    asked = body(tools=[WEATHER], reasoning_effort="none")
    tools = asked.offered_tools()
    variables = asked.template_variables(TEMPLATE, tools)
    assert variables == {"tools": [WEATHER], "enable_thinking": False}
    assert asked.template_variables("{{ tools }}{{ reasoning_effort }}", tools) == {
        "tools": [WEATHER],
        "reasoning_effort": "none",
    }
    for effort, thinks in (("none", False), ("high", True)):
        for switch in ("{% if not thinking %}", "{% if thinking is defined and thinking %}"):
            variables = body(reasoning_effort=effort).template_variables(switch, [])
            assert variables == {"thinking": thinks}
    assert body(tools=[WEATHER], tool_choice="none").offered_tools() == []
    for template, param in (
        ("{{ enable_thinking }}", "tools"),
        ("{{ tools }}", "reasoning_effort"),
    ):
        with pytest.raises(ApiError) as caught:
            asked.template_variables(template, tools)
        assert caught.value.body["error"]["param"] == param


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ("", {}),
        ({"a": 1}, {"a": 1}),
        ("[1]", "[1]"),
        ("no JSON", "no JSON"),
        ("[" * 5000, "[" * 5000),
        (LONG, LONG),
        (json.dumps({"text": "a, [b], {c}" * 30_000}), {"text": "a, [b], {c}" * 30_000}),
        (None, None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_of_earlier_calls_are_objects_for_the_template(
    arguments: object, expected: object
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    fields = {"role": "assistant", "content": None, "tool_calls": [call, "x"]}
    message = ChatMessage.model_validate(fields).for_template()
    assert message["tool_calls"][0]["function"]["arguments"] == expected
    assert message["tool_calls"][1] == "x"
    assert message["content"] == ""


async def answered(
    served: Any, text: str | None, **fields: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The only choice of an answer, with this text if there is one, whole, and put together from a
    stream."""
    asked = {"messages": MESSAGES, "choice": None if text is None else [text], **fields}
    response = await served.post("/v1/chat/completions", **asked)
    assert response.status_code == 200, response.text
    whole = response.json()["choices"][0]
    stream = await served.post("/v1/chat/completions", **asked, stream=True)
    message: dict[str, Any] = {}
    for line in stream.text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        choice = json.loads(line.removeprefix("data: "))["choices"][0]
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                [call] = value
                assert call.pop("index") == len(message.setdefault(name, []))
                message[name].append(call)
            else:
                message[name] = message.get(name, "") + value
    return whole, {"message": message, "finish_reason": choice["finish_reason"]}


@pytest.mark.asyncio
async def test_answers_have_reasoning_content_and_calls(serve: Serve) -> None:
    async with serve(template=TEMPLATE) as served:
        text = f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}"
        whole, streamed = await answered(served, text, tools=[WEATHER])
        for choice in (whole, streamed):
            message = choice["message"]
            assert choice["finish_reason"] == "tool_calls"
            assert message["reasoning_content"].strip() == "hm"
            assert message["content"].strip() == "I look."
            calls = message["tool_calls"]
            assert [call["function"]["name"] for call in calls] == ["weather"] * 2
            assert [json.loads(call["function"]["arguments"]) for call in calls] == [
                {"city": "Oslo"}
            ] * 2
            assert len({call["id"] for call in calls}) == 2


@pytest.mark.asyncio
async def test_the_setting_names_the_format_in_place_of_the_template(serve: Serve) -> None:
    minimax = '<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n</invoke>'
    async with serve(template=TEMPLATE, settings=Settings(answer_format="minimax-m2")) as served:
        for choice in await answered(served, minimax, tools=[WEATHER]):
            assert choice["finish_reason"] == "tool_calls"
        for choice in await answered(served, CALL, tools=[WEATHER]):
            assert choice["message"]["content"] == CALL


@pytest.mark.asyncio
async def test_what_is_no_call_of_a_tool_is_content(serve: Serve) -> None:
    async with serve(template=TEMPLATE) as served:
        for text, fields in (
            (CALL, {}),
            (CALL, {"tools": [WEATHER], "tool_choice": "none"}),
            (CALL.replace("weather", "other"), {"tools": [WEATHER]}),
            (CALL.replace('"}', '"'), {"tools": [WEATHER]}),
        ):
            for choice in await answered(served, text, **fields):
                assert choice["message"]["content"] == text
                assert "tool_calls" not in choice["message"]
                assert choice["finish_reason"] == "stop"


@pytest.mark.asyncio
async def test_stop_strings_are_those_of_the_content(serve: Serve) -> None:
    thought, call = "<think>\nEND\n</think>\n\n", CALL.replace("Oslo", " END")
    async with serve(template=TEMPLATE) as served:
        fields = {"tools": [WEATHER], "stop": [" END", "no"], "logprobs": True}
        for end, content, reason in ((".", "I look.", "tool_calls"), (" END.", "I look", "stop")):
            fields = {"tools": [WEATHER], "stop": [" END", "no"], "logprobs": True}
            for choice in await answered(served, f"{thought}I look{end}\n{call}", **fields):
                message = choice["message"]
                assert (message["content"].strip(), choice["finish_reason"]) == (content, reason)
                assert message["reasoning_content"].strip() == "END"
                assert ("tool_calls" in message) == (reason == "tool_calls")
        # All of it is content.
        for choice in await answered(served, thought, reasoning_format="none", stop="END"):
            assert choice["message"]["content"] == "<think>\n"


@pytest.mark.asyncio
async def test_reasoning_is_left_in_or_left_out_if_asked(serve: Serve) -> None:
    text = "<think>\nhm\n</think>\n\nyes"
    async with serve(template=TEMPLATE) as served:
        for choice in await answered(served, text, reasoning_format="none"):
            assert choice["message"]["content"] == text
        for choice in await answered(served, text, include_reasoning=False):
            assert choice["message"]["content"] == "yes"
            assert "reasoning_content" not in choice["message"]


@pytest.mark.asyncio
async def test_a_schema_is_followed_behind_reasoning_that_the_prompt_has_begun(
    serve: Serve,
) -> None:
    async with serve(template=TEMPLATE) as served:
        fields: dict[str, Any] = {
            "chat_template_kwargs": {"opens": True},
            "max_tokens": 30,
            "temperature": 0,
        }
        whole, streamed = await answered(served, "yes", **fields)
        for choice in (whole, streamed):  # it never closes it
            assert choice["finish_reason"] == "length"
            assert choice["message"].get("content") in (None, "")
            assert choice["message"]["reasoning_content"]


STRICT = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.asyncio
async def test_a_tool_that_has_to_be_called_is_with_arguments_of_its_schema(serve: Serve) -> None:
    async with serve(template=TEMPLATE) as served:
        for choice, names in (
            ("required", {"add", "weather"}),
            (named("add"), {"add"}),
        ):
            for seed in range(4):
                response = await served.post(
                    "/v1/chat/completions",
                    messages=MESSAGES,
                    tools=[STRICT, WEATHER],
                    tool_choice=choice,
                    parallel_tool_calls=False,
                    seed=seed,
                    max_tokens=200,
                )
                answer = response.json()["choices"][0]
                if answer["finish_reason"] == "length":  # arguments without a schema of their own
                    assert choice == "required"
                    continue
                assert answer["finish_reason"] == "tool_calls"
                [call] = answer["message"]["tool_calls"]
                assert call["function"]["name"] in names
                arguments = json.loads(call["function"]["arguments"])
                if call["function"]["name"] == "add":
                    assert arguments["a"] in (1, 2)
                    assert arguments["b"] in (True, False)
                assert answer["message"]["content"] is None


COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
FOLLOWS_COLOUR = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR}}
}


@pytest.mark.asyncio
async def test_content_follows_its_schema_beside_tools(serve: Serve) -> None:
    ends = set()
    async with serve(template=TEMPLATE) as served:
        for seed in range(8):
            fields: dict[str, Any] = {"tools": [STRICT], "parallel_tool_calls": False}
            fields |= {"seed": seed, "max_tokens": 200, **FOLLOWS_COLOUR}
            for choice in await answered(served, None, **fields):
                message = choice["message"]
                ends.add(choice["finish_reason"])
                for call in message.get("tool_calls", []):
                    assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
                if choice["finish_reason"] == "stop":
                    assert json.loads(message["content"])["colour"] in ("red", "blue")
                elif choice["finish_reason"] == "tool_calls":
                    assert not message["content"]
        assert ends == {"stop", "tool_calls"}
        for fields, param in (
            ({"json_schema": {"type": "strin"}}, "json_schema"),
            ({"guided_json": "["}, "guided_json"),
        ):
            response = await served.post(
                "/v1/chat/completions", messages=MESSAGES, tools=[STRICT], **fields
            )
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param


@pytest.mark.asyncio
async def test_what_cannot_be_enforced_is_refused(serve: Serve) -> None:
    other = TEMPLATE.replace("<tool_call>", "<minimax:tool_call>")
    async with serve(template=other) as served:
        for fields, param in (
            ({"tools": [STRICT]}, "tools"),
            ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
            ({"tools": [WEATHER], "parallel_tool_calls": False}, "parallel_tool_calls"),
            ({"tools": [WEATHER], **FOLLOWS_COLOUR}, "response_format"),
        ):
            response = await served.post("/v1/chat/completions", messages=MESSAGES, **fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
    async with serve(template=TEMPLATE) as served:
        for fields, param in (
            ({"tools": [STRICT], "regex": "a"}, "tools"),
            (
                {"tools": [named_schema({"type": "strin"})], "tool_choice": "required"},
                "tool_choice",
            ),
        ):
            response = await served.post("/v1/chat/completions", messages=MESSAGES, **fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param


def named_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


@pytest.mark.asyncio
async def test_while_a_call_is_written_the_stream_says_that_it_is_still_there(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "KEEP_ALIVE_S", 0.05)
    generate = Engine.generate

    def slow(*arguments: Any, **options: Any) -> Any:
        for token in generate(*arguments, **options):
            time.sleep(0.01)
            yield token

    monkeypatch.setattr(Engine, "generate", slow)
    async with serve(template=TEMPLATE) as served:
        stream = await served.post(
            "/v1/chat/completions", messages=MESSAGES, choice=[CALL], tools=[WEATHER], stream=True
        )
        before_call = stream.text.partition('"tool_calls"')[0]
        assert before_call.count(": still here") > 2
