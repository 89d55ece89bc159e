"""A server as a process, whose responses OpenAI's own client asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

from support.imported_later import openai
from support.processes import wait_until
from support.random_models import Qwen3MoeShape
from support.serving import RunningServer, small_chat_server

pytestmark = pytest.mark.e2e

SHAPE = Qwen3MoeShape(
    num_layers=2, num_experts=4, num_experts_used=2, vocab_size=300, context_length=16384
)
LONG = 16000
"""Tokens that take many seconds."""
TEMPLATE = (
    "{% if tools %}Call tools in <tool_call>.\n{% endif %}"
    "{%- for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
)
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "add",
        "description": "Adds.",
        "strict": False,
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
]
WRITTEN = (
    '<think>A sum.</think>I add.<tool_call>\n{"name": "add", "arguments": {"a": 17}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("responses")
    with small_chat_server(folder, SHAPE, TEMPLATE) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def test_a_stream_says_what_the_whole_response_says(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "input": "hello", "max_output_tokens": 40, **GREEDY}
    whole = client.responses.create(**asked, instructions="Be brief.", metadata={"a": "b"})
    assert (whole.status, whole.metadata) == ("incomplete", {"a": "b"})
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 40
    with client.responses.stream(**asked, instructions="Be brief.") as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    chat = client.chat.completions.create(
        model="any",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
        ],
        max_tokens=40,
        **GREEDY,
    )
    assert chat.choices[0].message.content == whole.output_text


def test_a_tool_is_called_and_the_talk_goes_on_by_id_or_by_items(client: openai.OpenAI) -> None:
    # The small model cannot call; what it writes is given, what comes of that is not.
    written: dict[str, Any] = {"extra_body": {"choice": [WRITTEN]}}
    asked: dict[str, Any] = {"model": "any", "tools": TOOLS}
    question: Any = {"role": "user", "content": [{"type": "input_text", "text": "9 and 8?"}]}
    with client.responses.stream(input=[question], **asked, **written) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds.count("response.output_item.done") == 3
    assert kinds[-1] == "response.completed"
    reasoning, message, call = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "A sum."
    assert message.type == "message"
    assert response.output_text.strip() == "I add."
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("add", '{"a": 17}')
    whole = client.responses.create(input=[question], **asked, **written)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "17"}
    said: dict[str, Any] = {"extra_body": {"choice": ["It is 17."]}}
    by_id = client.responses.create(
        input=[result], previous_response_id=response.id, **asked, **said
    )
    shown: list[Any] = [*response.output]
    by_items = client.responses.create(
        input=[question, *shown, result], store=False, **asked, **said
    )
    assert by_id.output_text == by_items.output_text == "It is 17."
    assert by_id.usage is not None
    assert by_items.usage is not None
    assert by_id.usage.input_tokens == by_items.usage.input_tokens
    lines = ["Call tools in <tool_call>.", "user: 9 and 8?"]
    lines += ["assistant: A sum.I add.17", "tool: 17", ""]
    read = client.post("/../tokenize", body={"content": "\n".join(lines)}, cast_to=dict[str, Any])
    assert by_id.usage.input_tokens == len(read["tokens"])
    third = client.responses.create(
        input="And?", previous_response_id=by_id.id, model="any", max_output_tokens=1
    )
    assert third.previous_response_id == by_id.id


def test_responses_are_kept_until_they_are_deleted(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "input": "hello", "max_output_tokens": 2}
    kept = client.responses.create(**asked)
    assert client.responses.retrieve(kept.id) == kept
    [item] = client.responses.input_items.list(kept.id)
    said = item.model_dump(include={"type", "role", "content"})
    assert said["content"][0]["text"] == "hello"
    assert (said["type"], said["role"]) == ("message", "user")
    client.responses.delete(kept.id)
    for gone in (kept.id, client.responses.create(**asked, store=False).id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**asked, previous_response_id=gone)
        assert caught.value.param == "previous_response_id"


class Sum(pydantic.BaseModel):
    """What an answer is parsed into."""

    is_even: bool


def test_an_answer_is_parsed(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model="any", input="4?", text_format=Sum, temperature=1.5, extra_body={"seed": 1}
    )
    assert isinstance(answer.output_parsed, Sum)


def test_what_is_not_supported_is_refused_by_name(client: openai.OpenAI) -> None:
    image = {"type": "input_image", "image_url": "https://example.org/a.png"}
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("input", {"input": [{"role": "user", "content": [image]}]}),
        ("input", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ("input", {"input": "x" * 20_000}),
        ("background", {"input": "x", "background": True}),
        ("truncation", {"input": "x", "truncation": "auto"}),
        ("tools", {"input": "x", "tools": [{"type": "web_search"}]}),
        ("reasoning", {"input": "x", "reasoning": {"effort": "high"}}),
        ("text", {"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}),
    ]
    for param, body in wrong:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="any", **body)
        assert caught.value.param == param


def test_a_client_that_goes_away_is_written_for_no_more(
    server: RunningServer, client: openai.OpenAI
) -> None:
    before = server.metric("dflash_moe_generation_tokens_total")
    with client.responses.create(
        model="any", input="hello", max_output_tokens=LONG, stream=True, **GREEDY
    ) as stream:
        events = [event for event, _ in zip(stream, range(6), strict=False)]
    wait_until(lambda: server.metric("dflash_moe_num_requests_running") == 0, "its end")
    assert server.metric("dflash_moe_generation_tokens_total") - before < LONG / 4
    assert events[0].type == "response.created"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(events[0].response.id)
