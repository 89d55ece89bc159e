"""A server as a process, used by Ollama's own client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

from support.imported_later import ollama
from support.processes import wait_until
from support.random_models import Qwen3MoeShape
from support.serving import CHAT_TEMPLATE, NO_TLS, RunningServer, small_chat_server

pytestmark = pytest.mark.e2e

SHAPE = Qwen3MoeShape(
    num_layers=2, num_experts=4, num_experts_used=2, vocab_size=300, context_length=16384
)
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("model")
    template = "{% if tools %}Call tools in <tool_call>.\n{% endif %}" + CHAT_TEMPLATE
    with small_chat_server(folder, SHAPE, template) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, verify=NO_TLS, timeout=60) as client:
        yield client


def test_it_chats_whole_and_as_a_stream(client: ollama.Client) -> None:
    options = {"seed": 1, "num_predict": 20}
    whole = client.chat("small", MESSAGES, options=options)
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 20)
    assert whole.message.role == "assistant"
    parts = list(client.chat("small:latest", MESSAGES, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts[-2:]] == [False, True]
    assert parts[-1].prompt_eval_count == whole.prompt_eval_count
    text = client.generate("small", "hello", options=options)
    assert text.response == whole.message.content  # as a chat of one message
    raw = "".join(
        part.response or ""
        for part in client.generate("small", "hello", raw=True, options=options, stream=True)
    )
    assert raw == client.generate("small", "hello", raw=True, options=options).response
    shown = client.chat("small", MESSAGES, options=options, logprobs=True, top_logprobs=2)
    assert shown.logprobs is not None
    assert [len(each.top_logprobs or ()) for each in shown.logprobs] == [2] * 20


class City(pydantic.BaseModel):
    """What an answer is parsed into."""

    is_large: bool
    district: str = pydantic.Field(max_length=5)


def test_an_answer_follows_its_format(client: ollama.Client) -> None:
    answer = client.chat(
        "small", MESSAGES, format=City.model_json_schema(), options={"seed": 2, "temperature": 1.5}
    )
    City.model_validate_json(answer.message.content or "")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def test_a_function_is_a_tool_and_its_result_a_message(client: ollama.Client) -> None:
    options = {"seed": 1, "num_predict": 10}
    asked = client.chat("small", MESSAGES, tools=[add], options=options)
    assert asked.done_reason == "length"  # the small model cannot call
    call = ollama.Message.ToolCall(
        function=ollama.Message.ToolCall.Function(name="add", arguments={"a": 1, "b": 2})
    )
    talk: list[Any] = [
        *MESSAGES,
        ollama.Message(role="assistant", content="", thinking="hm", tool_calls=[call]),
        ollama.Message(role="tool", tool_name="add", content="3"),
    ]
    told = client.chat("small", talk, tools=[add], options=options)
    assert told.prompt_eval_count is not None
    assert asked.prompt_eval_count is not None
    assert told.prompt_eval_count > asked.prompt_eval_count


def test_it_lists_and_shows_the_model(client: ollama.Client) -> None:
    [model] = client.list().models
    assert model.model == "small:latest"
    [running] = client.ps().models
    assert running.model == "small:latest"
    assert running.context_length == 16384
    shown = client.show("small")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "qwen3moe"
    assert client.generate("small").done_reason == "load"


def test_it_knows_our_errors(client: ollama.Client, tmp_path: Path) -> None:
    with pytest.raises(ollama.ResponseError, match="not found") as caught:
        client.chat("llama3", MESSAGES)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="images") as caught:
        client.chat("small", [{"role": "user", "content": "?", "images": [b"png"]}])
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="context") as caught:
        next(iter(client.chat("small", [{"role": "user", "content": "x" * 20_000}], stream=True)))
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="embeddings") as caught:
        client.embed("small", "x")
    assert caught.value.status_code == 501


def test_a_client_that_goes_away_is_written_for_no_more(
    server: RunningServer, client: ollama.Client
) -> None:
    name = 'dflash_moe_requests_finished_total{reason="cancelled"}'
    before = server.metric(name)
    stream = client.chat("small", MESSAGES, stream=True)
    next(iter(stream))
    ended = threading.Thread(target=stream.close)  # type: ignore[attr-defined]
    ended.start()
    ended.join()
    wait_until(lambda: server.metric(name) == before + 1, "the request to be cancelled")
