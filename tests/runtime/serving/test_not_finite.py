"""A model whose logits become NaN: clients are told so, and get JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dflash_runtime import Engine
from dflash_runtime.serving.wire import EVENTS, JSON_LINES, NAMED_EVENTS
from support.not_finite import EMBEDDINGS, with_nan
from support.random_models import Qwen3MoeShape, write_qwen3moe

Serve = Callable[..., AbstractAsyncContextManager[Any]]

SHAPE = Qwen3MoeShape(
    num_layers=1, num_experts=2, num_experts_used=1, vocab_size=300, context_length=64
)
WELL, ILL = [10, 11, 12], [10, 200, 12]
"""Prompts; the token 200 makes logits NaN, and so does the third of the first one's text."""
BODY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
BEGINNING = {"max_tokens": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    options: dict[str, Any] = {"seed": 1, "tokenizer": "bytes"}
    good = write_qwen3moe(folder / "good.gguf", SHAPE, **options)
    with Engine.open(good, backend="reference") as engine:
        *_, third = [token.token_id for token in engine.generate(WELL, 3, ignore_eos=True)]

    def change(tensors: Any) -> Any:
        for token_id in (200, third):
            tensors = with_nan(EMBEDDINGS, (token_id, 0))(tensors)
        return tensors

    return write_qwen3moe(folder / "ill.gguf", SHAPE, change=change, **options)


def refuse(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=refuse)


@pytest.mark.asyncio
@pytest.mark.parametrize("logprobs", [{}, {"logprobs": 2}])
async def test_a_client_is_told_in_a_whole_answer_and_in_a_stream(
    serve: Serve, logprobs: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as served:

        async def ask(prompt: list[int], **more: Any) -> Any:
            body = {"prompt": prompt, **BODY, **logprobs, **more}
            return await served.post("/v1/completions", **body)

        expected = strict((await ask(WELL, **BEGINNING)).text)["choices"]
        for prompt in (ILL, WELL):
            answer = await ask(prompt)
            assert answer.status_code == 500
            error = strict(answer.text)["error"]
            assert (error["type"], error["code"]) == ("server_error", "not_finite")
            assert "logits" in error["message"]
        # Before anything was sent the status says it, too.
        answer = await ask(ILL, stream=True)
        assert (answer.status_code, strict(answer.text)["error"]) == (500, error)
        answer = await ask(WELL, stream=True)
        assert answer.status_code == 200
        *chunks, last, nothing = answer.text.split("\n\n")
        assert (strict(last.removeprefix("data: ")), nothing) == ({"error": error}, "")
        assert chunks
        text = "".join(
            strict(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks
        )
        assert expected[0]["text"].startswith(text)
        # Nobody else's request is spoilt by it.
        assert strict((await ask(WELL, **BEGINNING)).text)["choices"] == expected
        metrics = (await served.client.get("/metrics")).text
        assert 'dflash_moe_requests_finished_total{reason="error"} 4.0' in metrics
    lines = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert len(lines) == 4
    assert all(error["message"] in line for line in lines)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_no_event_of_a_stream_has_what_is_not_json(value: float) -> None:
    for wire in (EVENTS, NAMED_EVENTS, JSON_LINES):
        with pytest.raises(ValueError, match="not JSON compliant"):
            wire.bytes_of([{"type": "x", "logprob": value}])
