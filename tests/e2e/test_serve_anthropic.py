"""A server as a process, used by Anthropic's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.imported_later import anthropic
from support.processes import wait_until
from support.random_models import Qwen3MoeShape
from support.serving import NO_TLS, RunningServer, small_chat_server

pytestmark = pytest.mark.e2e

SHAPE = Qwen3MoeShape(
    num_layers=2, num_experts=4, num_experts_used=2, vocab_size=300, context_length=16384
)
LONG = 16000
"""Tokens that take many seconds."""
KEY = "a-key-of-32-characters-or-so-----"
TEMPLATE = (
    "{% if tools %}Call tools in <tool_call>.\n{% endif %}"
    "{% if enable_thinking is defined %}<think> {{ enable_thinking }}\n{% endif %}"
    "{%- for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
)
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0, "ignore_eos": True}}
TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "How warm it is.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
WRITTEN = (
    "<think>Where is that?</think>I look."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("anthropic")
    (folder / "keys").write_text(f"{KEY}\n")
    (folder / "keys").chmod(0o600)
    keys = "--api-key-file", str(folder / "keys")
    with small_chat_server(folder, SHAPE, TEMPLATE, *keys) as server:
        yield server


def connected(server: RunningServer, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=server.url,
        max_retries=0,
        timeout=60,
        http_client=anthropic.DefaultHttpxClient(verify=NO_TLS),
        **options,
    )


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with connected(server, api_key=KEY) as client:
        yield client


def texts(answer: anthropic.types.Message) -> list[str]:
    return [block.text for block in answer.content if block.type == "text"]


def test_a_stream_says_what_the_whole_answer_says(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "any", "max_tokens": 40, "messages": MESSAGES, **GREEDY}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert texts(last) == texts(whole)
    assert (last.stop_reason, whole.stop_reason) == ("max_tokens", "max_tokens")
    counted = client.messages.count_tokens(model="any", messages=MESSAGES)
    for usage in (last.usage, whole.usage):
        assert usage.output_tokens == 40
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "any", "max_tokens": 40, "messages": MESSAGES, **GREEDY}
    [block] = client.messages.create(**asked).content
    assert block.type == "text"
    stop = block.text[8:11]
    answer = client.messages.create(**asked, stop_sequences=["never", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    with client.messages.stream(**asked, stop_sequences=[stop]) as stream:
        last = stream.get_final_message()
    assert (texts(last), last.stop_sequence) == (texts(answer), stop)


def test_a_tool_is_called_after_thinking_and_the_talk_goes_on(client: anthropic.Anthropic) -> None:
    # The small model cannot call; what it writes is given, what comes of that is not.
    asked: dict[str, Any] = {
        "model": "any",
        "max_tokens": 2000,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": TOOLS,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "messages": MESSAGES,
    }
    written: dict[str, Any] = {"extra_body": {"choice": [WRITTEN]}}
    whole = client.messages.create(**asked, **written)
    with client.messages.stream(**asked, **written) as stream:
        answer = stream.get_final_message()
    thinking, text, call = answer.content
    for first, second in zip(whole.content[:2], answer.content[:2], strict=True):
        assert first.to_dict() == second.to_dict()
    assert thinking.type == "thinking"
    assert thinking.thinking == "Where is that?"
    assert text.type == "text"
    assert text.text.strip() == "I look."
    assert call.type == "tool_use"
    assert (call.name, call.input, answer.stop_reason) == ("weather", {"city": "Oslo"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "3 degrees"}
    asked["messages"] = [
        *MESSAGES,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    last = client.messages.create(**asked, extra_body={"choice": ["It is cold."]})
    assert last.stop_reason == "end_turn"
    [block] = last.content
    assert block.type == "text"
    assert block.text == "It is cold."
    lines = ["Call tools in <tool_call>.", "<think> True", "system: Be brief.", "user: hello"]
    lines += ["assistant: Where is that?I look.Oslo", "tool: 3 degrees", "user: And?", ""]
    read = client.post("/tokenize", body={"content": "\n".join(lines)}, cast_to=dict[str, Any])
    del asked["max_tokens"]
    assert client.messages.count_tokens(**asked).input_tokens == len(read["tokens"])
    usage = last.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(read["tokens"])


def test_choices_of_tools_are_followed(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "any",
        "max_tokens": 2000,
        "messages": MESSAGES,
        "tools": [{**TOOLS[0], "input_schema": {"enum": [{"city": "Bergen"}]}}],
        "extra_body": {"temperature": 0},
    }
    choices: list[Any] = [
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "weather"},
    ]
    for choice in choices:
        answer = client.messages.create(**asked, tool_choice=choice)
        [call] = [each for each in answer.content if each.type == "tool_use"]
        assert call.input == {"city": "Bergen"}
    answer = client.messages.create(**{**asked, "max_tokens": 4, "tool_choice": {"type": "none"}})
    assert all(each.type == "text" for each in answer.content)


def test_the_client_knows_our_errors(server: RunningServer, client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "any", "max_tokens": 4}
    image: Any = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages: .*'image'") as caught:
        client.messages.create(**asked, messages=[{"role": "user", "content": [image]}])
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="does not fit the context"):
        client.messages.create(**asked, messages=[{"role": "user", "content": "x" * 20_000}])
    with (
        connected(server, api_key="no-key-of-ours") as other,
        pytest.raises(anthropic.AuthenticationError),
    ):
        other.messages.create(**asked, messages=MESSAGES)
    with connected(server, auth_token=KEY) as other:
        assert other.messages.create(**asked, messages=MESSAGES).usage.output_tokens <= 4


def test_a_client_that_goes_away_is_written_for_no_more(
    server: RunningServer, client: anthropic.Anthropic
) -> None:
    def sample(name: str) -> float:
        text = client.get("/metrics", cast_to=str)
        return next(
            (float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)), 0.0
        )

    before = sample("dflash_moe_generation_tokens_total")
    with client.messages.stream(
        model="any", max_tokens=LONG, messages=MESSAGES, **GREEDY
    ) as stream:
        for _ in zip(range(5), stream, strict=False):
            pass
    wait_until(lambda: sample("dflash_moe_num_requests_running") == 0, "its end")
    assert sample("dflash_moe_generation_tokens_total") - before < LONG / 4
