"""Front ends in browsers: Open WebUI's requests, and a page of another origin."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.browser import Page, browser_page
from support.other_origin import page_of_another_origin
from support.processes import wait_until
from support.random_models import Qwen3MoeShape, write_qwen3moe
from support.serving import CHAT_TEMPLATE, NO_TLS, RunningServer, running_server

pytestmark = pytest.mark.e2e

SHAPE = Qwen3MoeShape(
    num_layers=2, num_experts=4, num_experts_used=2, vocab_size=300, context_length=16384
)
ASK = """(async () => {
  const answer = await fetch(URL_OF_CHATS, {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: "Bearer none" },
    body: JSON.stringify({
      model: "small", stream: true, seed: 1, max_tokens: 10, ignore_eos: true,
      messages: [{ role: "user", content: "hello" }],
    }),
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return [answer.status, text];
    text += value;
  }
})().catch((error) => error.name)"""


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    with page_of_another_origin() as origin:
        yield origin


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    return write_qwen3moe(path, SHAPE, seed=1, tokenizer="bytes")


@contextlib.contextmanager
def small_server(model: Path, *arguments: str) -> Iterator[RunningServer]:
    template = model.with_suffix(".jinja")
    template.write_text(CHAT_TEMPLATE)
    with running_server(model, "--chat-template-file", str(template), *arguments) as server:
        yield server


@pytest.fixture(scope="module")
def server(model: Path, origin: str) -> Iterator[RunningServer]:
    with small_server(model, "--cors", origin) as server:
        yield server


@pytest.fixture
def page(tmp_path: Path, origin: str) -> Iterator[Page]:
    with browser_page(tmp_path / "profile") as page:
        page.open(origin)
        yield page


@pytest.fixture
def open_webui(server: RunningServer) -> Iterator[httpx.Client]:
    """What its backend sends; after its sources (`backend/open_webui/routers/openai.py`)."""
    headers = {
        "Authorization": "Bearer none",
        "X-OpenWebUI-User-Name": "A%20B",
        "X-OpenWebUI-User-Id": "f7f9a0c6",
        "X-OpenWebUI-User-Email": "a@example.org",
        "X-OpenWebUI-User-Role": "admin",
        "X-OpenWebUI-Chat-Id": "4c1a",
    }
    with httpx.Client(
        base_url=f"{server.url}/v1", headers=headers, verify=NO_TLS, timeout=60
    ) as client:
        yield client


def chat(content: str, **params: Any) -> dict[str, Any]:
    """A turn of a chat, with what a user has set in the controls of a model."""
    return {
        "stream": True,
        "model": "small",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": content},
        ],
        "stream_options": {"include_usage": True},
        "temperature": 0.8,
        "top_p": 0.9,
        "min_p": 0.05,
        "top_k": 40,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "repeat_penalty": 1.1,
        "seed": 7,
        "stop": ["<|im_end|>"],
        "logit_bias": {"5": -10},
        **params,
    }


def chunks(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    assert answer.status_code == 200, answer.read()
    for line in answer.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def test_open_webui_chats_stops_asks_again_and_names_the_chat(
    server: RunningServer, open_webui: httpx.Client
) -> None:
    [listed] = open_webui.get("/models").json()["data"]
    assert (listed["id"], listed["object"]) == ("small", "model")
    # A user presses stop: the backend closes its connection. What a user adds to a model's
    # parameters is sent as it is.
    body = chat("hello", ignore_eos=True, max_tokens=16000)
    with open_webui.stream("POST", "/chat/completions", json=body) as answer:
        for number, _ in enumerate(chunks(answer)):
            if number == 3:
                break
    wait_until(
        lambda: server.get("/status").json()["queue"]["running"] == 0, "the stopped text to end"
    )
    [stopped, *_] = server.get("/status/requests").json()["latest"]
    assert stopped["end"] == "cancelled"
    assert stopped["generated_tokens"] < 16000
    # Regenerate asks for the same again; with a seed it is the same.
    texts = []
    body = chat("hello", max_tokens=60)
    for _ in range(2):
        with open_webui.stream("POST", "/chat/completions", json=body) as answer:
            found = list(chunks(answer))
        assert found[-1]["usage"]["total_tokens"] > 0
        parts = [each["choices"][0]["delta"] for each in found if each["choices"]]
        texts.append("".join(part.get("content") or "" for part in parts))
    assert texts[0] == texts[1]
    # Titles, tags and proposals to go on are asked for whole.
    title = {
        "model": "small",
        "messages": [{"role": "user", "content": "### Task:\nGenerate a title.\n"}],
        "stream": False,
        "max_completion_tokens": 1000,
    }
    named = open_webui.post("/chat/completions", json=title).raise_for_status().json()
    assert isinstance(named["choices"][0]["message"]["content"], str)


def test_a_page_of_an_origin_that_is_named_chats(server: RunningServer, page: Page) -> None:
    chats = json.dumps(f"{server.url}/v1/chat/completions")
    status, text = page.evaluate(ASK.replace("URL_OF_CHATS", chats))
    assert status == 200
    assert text.rstrip().endswith("data: [DONE]")
    assert page.complaints == []


def test_one_of_another_origin_does_not(model: Path, page: Page) -> None:
    with small_server(model) as server:
        chats = json.dumps(f"{server.url}/v1/chat/completions")
        assert page.evaluate(ASK.replace("URL_OF_CHATS", chats)) == "TypeError"
        assert any("CORS" in each for each in page.complaints)
        assert server.get("/status/requests").json()["latest"] == []
