"""Ollama's interface over a small model: what its answers and errors look like."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_runtime.serving.access import ApiKeys
from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.ollama_bodies import OllamaChatBody, OllamaGenerateBody
from dflash_runtime.serving.requests import ChatBody, CompletionBody, body_of, parse_body
from support.examples import examples
from support.serving import CHAT_TEMPLATE

Serve = Callable[..., AbstractAsyncContextManager[Any]]
OPTIONS: dict[str, Any] = {"seed": 3, "num_predict": 12}
CHAT: dict[str, Any] = {
    "model": "small", "messages": [{"role": "user", "content": "hello"}], "options": OPTIONS,
}  # fmt: skip
GENERATE: dict[str, Any] = {"model": "small:latest", "prompt": "hello", "options": OPTIONS}
TIMES = {
    "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count",
    "eval_duration",
}  # fmt: skip
THINKING = (
    "{% if tools %}Call tools in <tool_call>.\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
) + CHAT_TEMPLATE


def lines(response: Any) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def text_of(line: dict[str, Any]) -> str:
    return str(line["message"]["content"] if "message" in line else line["response"])


@pytest.mark.asyncio
async def test_chats_and_texts_stream_as_lines(serve: Serve) -> None:
    async with serve() as served:
        for path, body in (("/api/chat", CHAT), ("/api/generate", GENERATE)):
            whole = (await served.post(path, **body, stream=False)).json()
            *parts, last = lines(await served.post(path, **body))
            assert "".join(map(text_of, [*parts, last])) == text_of(whole)
            assert {*last} == {*whole}
            assert not any(part["done"] for part in parts)
            for end in (whole, last):
                assert (end["done"], end["done_reason"]) == (True, "length")
                assert end["model"] == body["model"]
                assert datetime.fromisoformat(end["created_at"]).tzinfo is not None
                assert {*end} > TIMES
                assert all(isinstance(end[name], int) and end[name] >= 0 for name in TIMES)
                assert end["eval_count"] == 12
                assert end["total_duration"] >= end["eval_duration"] > 0


@pytest.mark.asyncio
async def test_a_text_is_a_chat_or_raw(serve: Serve) -> None:
    async with serve() as served:
        as_chat = [{"role": "system", "content": "Be brief."}, *CHAT["messages"]]
        chat = await served.post("/api/chat", **{**CHAT, "messages": as_chat}, stream=False)
        text = await served.post("/api/generate", **GENERATE, system="Be brief.", stream=False)
        assert text.json()["response"] == chat.json()["message"]["content"]
        raw = await served.post("/api/generate", **GENERATE, raw=True, stream=False)
        same = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repeat_penalty": 1.1, "seed": 3}
        plain = await served.post("/v1/completions", prompt="hello", max_tokens=12, **same)
        assert raw.json()["response"] == plain.json()["choices"][0]["text"]
    async with serve(template=None) as served:  # nor has the model a template
        bare = await served.post("/api/generate", **GENERATE, stream=False)
        assert bare.json()["response"] == raw.json()["response"]
        refused = await served.post("/api/generate", **GENERATE, system="x")
        assert (refused.status_code, refused.json()) == (
            400, {"error": "system: this model has no chat template"},
        )  # fmt: skip


@pytest.mark.asyncio
async def test_formats_and_logprobs(serve: Serve) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    options = {"seed": 1, "temperature": 1.5, "num_predict": 60}
    async with serve() as served:
        for body in ({**CHAT, "options": options}, {**GENERATE, "options": options}):
            path = "/api/chat" if "messages" in body else "/api/generate"
            answer = (await served.post(path, **body, format=schema, stream=False)).json()
            assert isinstance(json.loads(text_of(answer))["ok"], bool)
            begun = (await served.post(path, **body, format="json", stream=False)).json()
            assert text_of(begun).startswith("{")
            shown = await served.post(path, **body, logprobs=True, top_logprobs=2)
            tokens = [each for line in lines(shown)[:-1] for each in line["logprobs"]]
            assert len(tokens) == lines(shown)[-1]["eval_count"]
            assert all(len(each["top_logprobs"]) == 2 for each in tokens)


@pytest.mark.parametrize(
    ("template", "think", "variables"),
    [
        ("{% if thinking %}<think>{% endif %}", True, {"thinking": True}),
        ("{% if thinking %}<think>{% endif %}", False, {"thinking": False}),
        ("{% if thinking %}<think>{% endif %}", "low", {"thinking": True}),
        ("{{ enable_thinking }}", False, {"enable_thinking": False}),
        ("{{ reasoning_effort }}", True, {"reasoning_effort": "medium"}),
        ("{{ reasoning_effort }}", "low", {"reasoning_effort": "low"}),
        ("<think>", True, {}),
        ("plain", False, {}),
    ],
)
def test_reasoning_is_turned_on_and_off_as_the_template_does(
    template: str, think: object, variables: dict[str, Any]
) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "?"}], "think": think}
    body = parse_body(OllamaChatBody, json.dumps(asked).encode())
    chat = body_of(ChatBody, body.chat(template, 512))
    assert chat.template_variables(template, []) == variables
    assert chat.chat_template_kwargs is None


@pytest.mark.asyncio
async def test_tools_and_thinking(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    call = '<think>hm</think><tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    asked: list[ChatBody] = []

    def noted(kind: Any, fields: Any) -> Any:
        asked.append(body_of(kind, {**fields, "choice": [call]}))
        return asked[-1]

    monkeypatch.setattr("dflash_runtime.serving.doors.ollama.body_of", noted)
    async with serve(template=THINKING) as served:
        answer = await served.post("/api/chat", **CHAT, tools=tools, think=True, stream=False)
        monkeypatch.undo()
        # A call needs more tokens than there are here.
        body = {**CHAT, "options": {"num_predict": -1}}
        assert answer.json()["done_reason"] == "length"
        monkeypatch.setattr("dflash_runtime.serving.doors.ollama.body_of", noted)
        answer = await served.post("/api/chat", **body, tools=tools, think="high", stream=False)
        message = answer.json()["message"]
        assert message["thinking"] == "hm"
        assert message["tool_calls"] == [{"function": {"name": "add", "arguments": {"a": 1}}}]
        parts = lines(await served.post("/api/chat", **body, tools=tools, think=False))
        assert [part["message"]["tool_calls"] for part in parts if "tool_calls" in part["message"]]
        assert [each.reasoning_effort for each in asked] == ["medium", "high", "none"]
        monkeypatch.undo()
        talk = [
            *CHAT["messages"],
            {"role": "assistant", "content": "", **message},
            {"role": "tool", "tool_name": "add", "content": "3"},
        ]
        told = await served.post("/api/chat", **{**CHAT, "messages": talk}, tools=tools)
        assert lines(told)[-1]["done"]


@pytest.mark.asyncio
async def test_the_model_is_described(serve: Serve) -> None:
    async with serve(template=THINKING) as served:
        [tag] = (await served.client.get("/api/tags")).json()["models"]
        assert tag["name"] == tag["model"] == "small:latest"
        assert tag["size"] > 10_000
        assert len(tag["digest"]) == 64
        assert tag["details"]["family"] == "qwen3moe"
        [running] = (await served.client.get("/api/ps")).json()["models"]
        assert (running["name"], running["context_length"]) == ("small:latest", 512)
        for name in ("small", "small:latest"):
            shown = (await served.post("/api/show", model=name)).json()
            assert shown["model_info"]["qwen3moe.context_length"] == 512
            assert shown["capabilities"] == ["completion", "tools", "thinking"]
            assert shown["template"] == THINKING
        assert (await served.client.head("/api/version")).status_code == 200
        assert (await served.client.head("/")).status_code == 200  # the page
        for path in ("/api/chat", "/api/generate"):
            loaded = (await served.post(path, model="small")).json()
            assert (loaded["done"], loaded["done_reason"]) == (True, "load")
            gone = (await served.post(path, model="small", keep_alive=0)).json()
            assert gone["done_reason"] == "unload"


@pytest.mark.asyncio
async def test_what_is_wrong_is_said_in_ollamas_form(serve: Serve) -> None:
    message = {"role": "user", "content": "x"}
    wrong: list[tuple[str, dict[str, Any], int, str]] = [
        ("chat", {"model": "llama3"}, 404, "llama3"),
        ("chat", {"model": "../small"}, 404, "not found"),
        ("generate", {"model": "small:7b"}, 404, "small"),
        ("generate", {"model": ""}, 400, "model"),
        ("show", {"model": "other"}, 404, "other"),
        ("chat", {"messages": [{**message, "images": ["aGk="]}]}, 400, "images"),
        ("generate", {"images": ["aGk="]}, 400, "images"),
        ("generate", {"template": "{{ .Prompt }}"}, 400, "template"),
        ("generate", {"suffix": "end"}, 400, "suffix"),
        ("generate", {"context": [1, 2]}, 400, "context"),
        ("generate", {"raw": True, "system": "x"}, 400, "system"),
        ("chat", {"think": True}, 400, "does not support thinking"),
        ("chat", {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ("chat", {"format": "xml"}, 400, "format"),
        ("chat", {"format": {"not": {}}}, 400, "format"),
        ("chat", {"options": {"num_ctx": 513}}, 400, "num_ctx"),
        ("chat", {"options": {"num_predict": "5"}}, 400, "num_predict"),
        ("chat", {"options": {"temperature": -1}}, 400, "temperature"),
        ("chat", {"options": {"mirostat": 2}}, 400, "mirostat"),
        ("chat", {"options": {"no_such": 2}}, 400, "no_such"),
        ("chat", {"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "context"),
        ("pull", {}, 501, "one model"),
        ("embed", {"input": "x"}, 501, "embeddings"),
        ("nothing", {}, 404, "Not Found"),
    ]
    async with serve() as served:
        for path, fields, status, word in wrong:
            base = {"messages": [message]} if path == "chat" else {"prompt": "x"}
            base = {} if path in ("show", "pull", "embed") else base
            response = await served.post(f"/api/{path}", **{"model": "small", **base, **fields})
            assert response.status_code == status, (path, fields, response.text)
            body = response.json()
            assert {*body} == {"error"}
            assert word in body["error"]
            assert body["error"].isprintable()
        fine = {"num_ctx": 512, "num_thread": 4, "tfs_z": 1.0, "num_predict": 1, "stop": []}
        assert (await served.post("/api/chat", **{**CHAT, "options": fine})).status_code == 200
        assert (await served.post("/v1/completions")).json()["error"]["type"]  # OpenAI's
    async with serve(keys=ApiKeys([b"a-key-of-32-characters-or-so-----"])) as served:
        refused = await served.client.get("/api/tags")
        assert refused.status_code == 401
        assert isinstance(refused.json()["error"], str)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
OPTION_NAMES = ["seed", "num_predict", "stop", "num_ctx", "temperature", "top_k", "mirostat", "x"]


@examples(40)
@given(
    st.sampled_from([OllamaChatBody, OllamaGenerateBody]),
    st.dictionaries(
        st.sampled_from(sorted({*OllamaChatBody.model_fields, *OllamaGenerateBody.model_fields})),
        JSON_VALUES,
        max_size=5,
    ),
    st.dictionaries(st.sampled_from(OPTION_NAMES), JSON_VALUES, max_size=3),
)
def test_any_json_is_taken_or_refused(kind: Any, fields: Any, options: Any) -> None:
    needed = {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    needed = {name: value for name, value in needed.items() if name in kind.model_fields}
    with suppress(ApiError):  # anything else is an error
        body = parse_body(kind, json.dumps({**needed, **fields, "options": options}).encode())
        if kind is OllamaGenerateBody and body.prompt:
            body_of(CompletionBody, body.completion(512))
        body_of(ChatBody, body.chat(THINKING, 512))
