"""A server as a process, used by OpenAI's own client and by clients that mean no good."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import pydantic
import pytest

from support.imported_later import openai
from support.processes import wait_until
from support.random_models import Qwen3MoeShape, write_qwen3moe
from support.serving import (
    CHAT_TEMPLATE,
    NO_TLS,
    RunningServer,
    running_server,
    wire_request,
)

pytestmark = pytest.mark.e2e

SHAPE = Qwen3MoeShape(
    num_layers=2, num_experts=4, num_experts_used=2, vocab_size=300, context_length=16384
)
LONG = 16000
"""Tokens that take many seconds."""
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    return write_qwen3moe(path, SHAPE, seed=1, tokenizer="bytes")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% if tools %}Call tools in <tool_call>.\n{% endif %}" + CHAT_TEMPLATE)
    with running_server(
        model, "--backend", "reference", "--chat-template-file", str(template)
    ) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def complete(client: openai.OpenAI, prompt: str, max_tokens: int, **options: Any) -> str:
    answer = client.completions.create(
        model="any", prompt=prompt, max_tokens=max_tokens, **GREEDY, **options
    )
    return str(answer.choices[0].text)


def tokens_written(server: RunningServer) -> float:
    return server.metric("dflash_moe_generation_tokens_total")


def test_openais_client_chats(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").owned_by == "dflash-moe"
    answer = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=20, logprobs=True, top_logprobs=3, **GREEDY
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(token.top_logprobs) for token in logprobs.content] == [3] * 20


class City(pydantic.BaseModel):
    """What an answer is parsed into; its schema has definitions, and a list of choices."""

    class District(pydantic.BaseModel):
        letter: Literal["a", "b"]
        houses: Annotated[int, pydantic.Field(ge=0, le=99)]

    is_large: bool
    districts: Annotated[list[District], pydantic.Field(max_length=3)]


def test_openais_client_parses_answers_that_follow_a_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="small", messages=MESSAGES, response_format=City, temperature=1.5, seed=1
    )
    city = answer.choices[0].message.parsed
    assert isinstance(city, City)
    assert answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(
        model="small", messages=MESSAGES, response_format=City, temperature=1.5, seed=1
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == city


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def test_openais_client_calls_a_tool_and_goes_on(client: openai.OpenAI) -> None:
    # The small model cannot call; what it writes is given, what comes of that is not.
    written: dict[str, Any] = {"extra_body": {"choice": [f"I add.\n{CALL}"]}}
    with client.chat.completions.stream(
        model="small", messages=MESSAGES, tools=TOOLS, **written
    ) as stream:
        answer = stream.get_final_completion().choices[0]
    assert answer.finish_reason == "tool_calls"
    assert (answer.message.content or "").strip() == "I add."
    [call] = answer.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 2}')
    messages: list[Any] = [
        *MESSAGES,
        answer.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}),
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    last = client.chat.completions.create(
        model="small", messages=messages, tools=TOOLS, extra_body={"choice": ["It is 3."]}
    )
    assert last.choices[0].message.content == "It is 3."
    assert last.choices[0].finish_reason == "stop"


def test_openais_client_streams_what_it_would_get_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=40, **GREEDY
    )
    text, usage = "", None
    with client.chat.completions.create(
        model="small",
        messages=MESSAGES,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == 40


def test_openais_client_completes_with_logprobs_and_stops(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="small", prompt="hello", max_tokens=30, logprobs=2, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.top_logprobs) == 30
    text = answer.choices[0].text
    assert complete(client, "hello", 30, stop=[text[8:11]]) == text[: text.index(text[8:11])]


def test_openais_client_knows_our_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="small", prompt="x" * 20_000)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_a_client_that_goes_away_is_written_for_no_more(
    server: RunningServer, client: openai.OpenAI
) -> None:
    cancelled_before = server.metric('dflash_moe_requests_finished_total{reason="cancelled"}')
    before = tokens_written(server)
    with client.completions.create(
        model="small", prompt="a", max_tokens=LONG, stream=True, **GREEDY
    ) as stream:
        for _ in zip(range(3), stream, strict=False):
            pass
    assert len(complete(client, "b", 3)) > 0
    assert (
        server.metric('dflash_moe_requests_finished_total{reason="cancelled"}')
        == cancelled_before + 1
    )
    assert tokens_written(server) - before < LONG / 4
    # One that waits for a whole answer goes away too.
    with pytest.raises(openai.APITimeoutError), server.client() as other:
        complete(other, "c", LONG, timeout=0.3)
    complete(client, "d", 1)
    assert server.metric("dflash_moe_num_requests_running") == 0


def test_many_clients_get_the_text_that_one_alone_gets(
    server: RunningServer, client: openai.OpenAI
) -> None:
    prompts = [f"number {index % 7} of them" for index in range(32)]
    alone = {prompt: complete(client, prompt, 12) for prompt in set(prompts)}

    def ask(index: int) -> str:
        with server.client() as mine:
            if index % 2:
                return complete(mine, prompts[index], 12)
            with mine.completions.create(
                model="small", prompt=prompts[index], max_tokens=12, stream=True, **GREEDY
            ) as stream:
                return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(ask, range(32)))
    assert texts == [alone[prompt] for prompt in prompts]


def test_a_slow_reader_holds_up_nobody(server: RunningServer, client: openai.OpenAI) -> None:
    """It reads nothing at all, of an answer larger than all buffers between."""
    body = {"prompt": "a", "max_tokens": 3000, "stream": True, "ignore_eos": True, "logprobs": 20}
    ended = 'dflash_moe_requests_finished_total{reason="length"}'
    before = server.metric(ended)
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(wire_request("/v1/completions", body))
        wait_until(lambda: server.metric("dflash_moe_num_requests_running") == 1, "its turn")
        assert len(complete(client, "b", 3)) > 0
        assert server.metric(ended) == before + 2
        assert b"200 OK" in slow.recv(1000)


def test_half_open_connections_hold_up_nobody(server: RunningServer, client: openai.OpenAI) -> None:
    starts = [b"", b"POST /v1/comp", wire_request("/v1/completions", {"prompt": "x" * 100})[:-20]]
    connections = [
        socket.create_connection(("127.0.0.1", server.port)) for _ in range(10) for _ in starts
    ]
    try:
        for index, connection in enumerate(connections):
            connection.sendall(starts[index % len(starts)])
        assert len(complete(client, "b", 3)) > 0
        assert server.get("/ready").status_code == 200
    finally:
        for connection in connections:
            connection.close()


def test_a_body_of_ten_megabytes_is_refused_and_holds_up_nobody(
    server: RunningServer, client: openai.OpenAI
) -> None:
    done = threading.Event()
    statuses: list[int] = []

    def send_large() -> None:
        with httpx.Client(timeout=30, verify=NO_TLS) as mine:
            while not done.is_set():
                body = {"prompt": "x" * 10_000_000}
                statuses.append(mine.post(f"{server.url}/v1/completions", json=body).status_code)

    thread = threading.Thread(target=send_large)
    thread.start()
    try:
        wait_until(lambda: statuses, "the first answer")
        for _ in range(5):
            assert len(complete(client, "b", 3)) > 0
    finally:
        done.set()
        thread.join()
    assert set(statuses) == {413}


def test_clients_take_turns(server: RunningServer) -> None:
    """One with many requests, one with a few: theirs are not all behind."""
    ended: list[str] = []

    def ask(address: str) -> None:
        transport = httpx.HTTPTransport(local_address=address, verify=NO_TLS)
        body = {"prompt": address, "max_tokens": 40, "ignore_eos": True}
        with httpx.Client(transport=transport, timeout=60) as mine:
            mine.post(f"{server.url}/v1/completions", json=body).raise_for_status()
        ended.append(address)

    with ThreadPoolExecutor(20) as pool:
        many = [pool.submit(ask, "127.0.0.1") for _ in range(16)]
        wait_until(lambda: server.metric("dflash_moe_num_requests_waiting") >= 8, "a queue")
        few = [pool.submit(ask, "127.0.0.2") for _ in range(2)]
        for each in [*many, *few]:
            each.result()
    behind = ended[::-1].index("127.0.0.2")
    assert behind >= 2, ended  # of the many, that had asked before
