"""The routes over a small model: shapes of answers, errors, and who is let in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.settings import Settings
from dflash_runtime.compute.reference import ReferenceBackend
from dflash_runtime.engine.engine import Engine
from dflash_runtime.serving import bodies
from dflash_runtime.serving.access import ApiKeys

pytestmark = pytest.mark.asyncio

Serve = Callable[..., AbstractAsyncContextManager[Any]]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], **GREEDY}
KEY = "a-key-of-32-characters-or-so-----"


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as OpenAI's do."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def error(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]  # type: ignore[no-any-return]


async def test_a_stream_says_what_the_whole_answer_says(serve: Serve) -> None:
    async with serve() as served:
        for path, body in (
            ("/v1/completions", {"prompt": "hello", "logprobs": 2, **GREEDY}),
            ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2, **CHAT}),
        ):
            body["max_tokens"] = 30
            whole = (await served.post(path, **body)).json()
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            chunks = events(await served.post(path, **body))
            *middle, last = [chunk["choices"][0] for chunk in chunks[:-1]]
            (choice,) = whole["choices"]
            assert choice["finish_reason"] == last["finish_reason"] == "length"
            assert chunks[-1]["choices"] == []
            assert all(chunk["usage"] is None for chunk in chunks[:-1])
            counts = ("prompt_tokens", "completion_tokens", "total_tokens")
            for name in counts:
                assert chunks[-1]["usage"][name] == whole["usage"][name]
            assert whole["usage"]["completion_tokens"] == 30
            parts = [each["logprobs"] for each in middle if each["logprobs"]]
            if path == "/v1/completions":
                assert "".join(each["text"] for each in middle) == choice["text"]
                for name, values in choice["logprobs"].items():
                    assert [value for part in parts for value in part[name]] == values
                    assert len(values) == 30
            else:
                assert middle[0]["delta"] == {"role": "assistant", "content": ""}
                text = "".join(each["delta"]["content"] for each in middle)
                assert text == choice["message"]["content"]
                content = choice["logprobs"]["content"]
                assert [token for part in parts for token in part["content"]] == content
                assert len(content) == 30
                for token in content:
                    # Greedy: what was chosen is the most likely.
                    assert token["top_logprobs"][0]["logprob"] == token["logprob"]
                    assert token["top_logprobs"][0]["bytes"] == token["bytes"]
                    assert len(token["top_logprobs"]) == 2
                    assert token["logprob"] <= 0


async def test_a_prompt_in_common_is_not_computed_again(serve: Serve) -> None:
    async with serve() as served:
        for expected in (0, 0):
            answer = (await served.post("/v1/completions", prompt="x" * 40, **GREEDY)).json()
            # The reference backend keeps whole chunks only, see engine/reuse.py.
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
            assert answer["timings"]["prompt_n"] == 40 - expected


async def test_prompts_are_shared_by_those_who_have_the_same_key_alone(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunking = replace(ReferenceBackend.chunking, preferred=8)
    monkeypatch.setattr(ReferenceBackend, "chunking", chunking)

    async def num_cached(served: Any, headers: dict[str, str]) -> int:
        body = {"prompt": "a secret of forty characters, and so on.", "max_tokens": 2, **GREEDY}
        response = await served.client.post("/v1/completions", json=body, headers=headers)
        answer = response.raise_for_status().json()
        num_cached = int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert answer["timings"]["cache_n"] == num_cached
        assert answer["timings"]["prompt_n"] == answer["usage"]["prompt_tokens"] - num_cached
        return num_cached

    async with serve() as served:
        assert [await num_cached(served, {}) for _ in range(2)] == [0, 32]
    keys = ["a-key-of-32-characters-or-so-----", "another-key-of-32-characters-----"]
    async with serve(keys=ApiKeys([key.encode() for key in keys])) as served:
        first, second = ({"authorization": f"Bearer {key}"} for key in keys)
        asked = [first, first, second, second, first]
        assert [await num_cached(served, each) for each in asked] == [0, 32, 0, 32, 0]


async def test_the_same_seed_gives_the_same_text(serve: Serve) -> None:
    async with serve() as served:

        async def text(seed: int) -> str:
            body = {"prompt": "a", "max_tokens": 20, "seed": seed, "temperature": 2}
            response = await served.post("/v1/completions", **body)
            return str(response.json()["choices"][0]["text"])

        assert await text(5) == await text(5) != await text(6)


async def test_a_stop_string_ends_the_text_before_it(serve: Serve) -> None:
    async with serve() as served:
        body = {"prompt": "hello", "max_tokens": 60, **GREEDY}
        free = (await served.post("/v1/completions", **body)).json()["choices"][0]["text"]
        stop = free[10:13]
        (choice,) = (await served.post("/v1/completions", **body, stop=stop)).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == free[: free.index(stop)]


async def test_the_end_of_the_context_is_a_length(serve: Serve) -> None:
    async with serve() as served:
        body = {"prompt": "x" * 500, "max_tokens": 1000, **GREEDY}
        answer = (await served.post("/v1/completions", **body)).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 513  # the last needs no position


async def test_what_is_wrong_is_said_in_openais_shape(serve: Serve) -> None:
    async with serve(template=None) as served:
        for body, status, param, code in (
            ({"prompt": "x" * 513}, 400, "prompt", "context_length_exceeded"),
            ({"prompt": ""}, 400, "prompt", None),
            ({"prompt": [300]}, 400, "prompt", None),
            ({"prompt": "x", "top_p": 0}, 400, "top_p", None),
            ({"prompt": "x", "n": 3}, 400, "n", "unsupported_value"),
        ):
            response = await served.post("/v1/completions", **body)
            found = error(response)
            assert (response.status_code, found["param"], found["code"]) == (status, param, code)
        response = await served.post("/v1/chat/completions", **CHAT)
        assert response.status_code == 400
        assert "template" in error(response)["message"]
        for unknown, status in (("/v1/nothing", 404), ("/v1/completions", 405)):
            response = await served.client.get(unknown)
            assert response.status_code == status
            assert error(response)["type"] == "invalid_request_error"
        response = await served.client.get("/v1/models/other")
        assert (await served.client.get("/v1/models/small")).json()["object"] == "model"
        assert (response.status_code, error(response)["code"]) == (404, "model_not_found")


async def test_a_template_that_refuses_says_so(serve: Serve) -> None:
    async with serve(template="{{ raise_exception('roles must alternate') }}") as served:
        response = await served.post("/v1/chat/completions", **CHAT)
        assert response.status_code == 400
        assert "roles must alternate" in error(response)["message"]
    async with serve(template="{{ 1/0 }}") as served:
        response = await served.post("/v1/chat/completions", **CHAT)
        assert (response.status_code, error(response)["code"]) == (400, "chat_template_failed")
    async with serve(template="{{ messages[0].content }}{{ mood }}") as served:
        kwargs = {"mood": "!!"}
        response = await served.post("/v1/chat/completions", chat_template_kwargs=kwargs, **CHAT)
        assert response.json()["usage"]["prompt_tokens"] == len("hello!!") - 1  # "he" is one


async def test_text_to_tokens_and_back(serve: Serve) -> None:
    async with serve() as served:
        text = "né 😀 <|endoftext|>"
        tokens = (await served.post("/tokenize", content=text)).json()["tokens"]
        assert (await served.post("/detokenize", tokens=tokens)).json()["content"] == text
        plain = await served.post("/tokenize", content=text, parse_special=False)
        assert len(plain.json()["tokens"]) > len(tokens)
        response = await served.post("/detokenize", tokens=[300])
        assert (response.status_code, error(response)["param"]) == (400, "tokens")


async def test_bodies_are_bounded_before_they_are_there(serve: Serve) -> None:
    settings = Settings(max_body_bytes=2000)
    async with serve(settings=settings) as served:
        assert (await served.post("/tokenize", content="x" * 1900)).status_code == 200
        response = await served.post("/tokenize", content="x" * 2000)
        assert (response.status_code, error(response)["code"]) == (413, "body_too_large")
        num_sent = 0

        async def endless() -> Any:
            nonlocal num_sent
            while True:
                num_sent += 1000
                yield b"x" * 1000

        response = await served.client.post("/tokenize", content=endless())
        assert (response.status_code, num_sent) == (413, 3000)
        assert response.headers["connection"] == "close"
        assert served.state.bodies.num_bytes == 0


async def test_a_body_that_does_not_come_is_not_waited_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.05)

    async def slow() -> Any:
        yield b"{"
        await asyncio.sleep(30)

    async with serve() as served:
        response = await served.client.post("/tokenize", content=slow())
        assert response.status_code == 408
        error(response)


async def test_without_keys_only_this_machine_is_answered(serve: Serve) -> None:
    async with serve() as served:
        for headers, status in (
            ({}, 200),
            ({"origin": "http://127.0.0.1:8080"}, 200),
            ({"origin": "https://evil.example"}, 403),
            ({"host": "evil.example"}, 403),
        ):
            response = await served.client.get("/v1/models", headers=headers)
            assert response.status_code == status, headers
        assert (await served.client.get("/health", headers={"host": "a"})).status_code == 200


async def test_with_keys_all_but_the_probes_needs_one(serve: Serve) -> None:
    async with serve(keys=ApiKeys([KEY.encode()])) as served:
        for path in ("/health", "/ready"):
            assert (await served.client.get(path)).status_code == 200
        for path in ("/v1/models", "/metrics", "/props", "/openapi.json", "/nothing"):
            response = await served.client.get(path)
            assert (response.status_code, error(response)["code"]) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
            headers = {"authorization": f"Bearer {KEY}", "host": "moe.example"}
            response = await served.client.get(path, headers=headers)
            assert response.status_code == (404 if path == "/nothing" else 200)
        wrong = {"authorization": f"Bearer {KEY}x"}
        assert (await served.client.get("/v1/models", headers=wrong)).status_code == 401


async def test_before_the_model_is_there_and_after_the_end_nothing_is_taken(serve: Serve) -> None:
    async with serve(is_opened=False) as served:
        for status, code in (("loading", "loading"), ("draining", "shutting_down")):
            served.state.is_draining = status == "draining"
            response = await served.client.get("/ready")
            assert (response.status_code, response.json()["status"]) == (503, status)
            assert (await served.client.get("/health")).status_code == 200
            response = await served.post("/v1/completions", prompt="x")
            assert (response.status_code, error(response)["code"]) == (503, code)
            assert int(response.headers["retry-after"]) >= 1
        await asyncio.wrap_future(served.state.worker.opened)


async def test_a_failure_while_computing_has_a_status_if_nothing_is_sent_yet(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [DaemonUnavailable("cpu0 is gone; daemons are required"), ValueError("a bug")]

    def fail(*arguments: object, **options: object) -> Any:
        raise failures[0]
        yield

    monkeypatch.setattr(Engine, "generate", fail)
    async with serve() as served:
        for status, message in ((503, "cpu0 is gone; daemons are required"), (500, "internal")):
            for stream in (False, True):
                response = await served.post("/v1/completions", prompt="x", stream=stream)
                assert response.status_code == status
                assert error(response)["message"].startswith(message)
                assert error(response)["type"] == "server_error"
            failures.pop(0)
    assert "a bug" in caplog.text
    assert "cpu0" not in caplog.text


@pytest.mark.usefixtures("slow_generation")
async def test_a_stream_that_waits_says_that_it_is_still_there(serve: Serve) -> None:
    async with serve() as served:
        response = await served.post("/v1/completions", prompt="x", stream=True, max_tokens=2)
        assert response.text.startswith(": still here\n\n")
        assert response.text.endswith("data: [DONE]\n\n")


async def test_props_and_metrics_say_what_was_done(serve: Serve) -> None:
    async with serve() as served:
        before = (await served.client.get("/props")).json()
        await served.post("/v1/completions", prompt="hello", max_tokens=4, **GREEDY)
        after = (await served.client.get("/props")).json()
        assert before["schema_version"] == 1
        assert before["model"]["id"] == "small"
        assert before["placement"] == {"local": {"0": [0, 1, 2, 3], "1": [0, 1, 2, 3]}}
        assert before["owners"]["local"]["requests"] == 0 < after["owners"]["local"]["requests"]
        text = (await served.client.get("/metrics")).text
        for line in (
            'dflash_moe_owner_requests_total{kind="local",owner="local"} 8.0',
            "dflash_moe_generation_tokens_total 4.0",
            "dflash_moe_prompt_tokens_total 4.0",
            "dflash_moe_num_requests_running 0.0",
            "dflash_moe_num_requests_waiting 0.0",
            'dflash_moe_requests_finished_total{reason="length"} 1.0',
            'dflash_moe_http_requests_total{endpoint="/v1/completions",status="200"} 1.0',
            'dflash_moe_owner_generation_wait_seconds_count{owner="local"} 1.0',
            "dflash_moe_time_to_first_token_seconds_count 1.0",
        ):
            assert line in text.splitlines(), line
