"""The prompt as a part of its answer, as programs that score texts ask for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.ids import F64Array
from dflash_runtime import Engine
from dflash_runtime.serving import core

pytestmark = pytest.mark.asyncio

Serve = Callable[..., AbstractAsyncContextManager[Any]]
TEXT = "Grüße an Zoë, 3 < 4!"
PATH = "/v1/completions"
SCORE: dict[str, Any] = {
    "model": "small", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True,
}  # fmt: skip
"""What lm-eval's `local-completions` sends for `loglikelihood`."""


def log_softmax(model: Path, prompt: list[int]) -> F64Array:
    with Engine.open(model, backend="reference") as engine:
        logits = engine.logits(prompt).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


def choice(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    (found,) = response.json()["choices"]
    return found  # type: ignore[no-any-return]


def lm_evals_score(found: dict[str, Any], context_length: int) -> tuple[float, bool]:
    """How lm-eval reads an answer: the last token is the generated one."""
    logprobs = found["logprobs"]["token_logprobs"][context_length:-1]
    tops = found["logprobs"]["top_logprobs"][context_length:-1]
    return sum(logprobs), all(
        each == max(top.values()) for each, top in zip(logprobs, tops, strict=True)
    )


async def test_a_score_is_that_of_the_logits(serve: Serve, model: Path) -> None:
    async with serve() as served:
        ids = (await served.post("/tokenize", content=TEXT)).json()["tokens"]
        token_bytes = served.state.engine.tokenizer.token_bytes
        table = log_softmax(model, ids)
        expected = [table[i, token_id] for i, token_id in enumerate(ids[1:])]
        for prompt in ([ids], ids, TEXT, [TEXT]):
            found = choice(await served.post(PATH, prompt=prompt, **SCORE))
            logprobs = found["logprobs"]
            assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
            assert logprobs["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-6)
            assert found["text"].startswith(TEXT)
            before = [b"".join(map(token_bytes, ids[:i])) for i in range(len(ids))]
            offsets = [len(data.decode(errors="ignore")) for data in before]
            assert logprobs["text_offset"][:-1] == offsets
            assert logprobs["text_offset"][len(ids)] == len(TEXT)
            assert {len(values) for values in logprobs.values()} == {len(ids) + 1}
            score, is_greedy = lm_evals_score(found, 5)
            assert score == pytest.approx(sum(expected[4:]), abs=1e-6)
            assert not is_greedy
        best = [*ids, int(table[-1].argmax())]
        assert lm_evals_score(choice(await served.post(PATH, prompt=best, **SCORE)), len(ids))[1]


async def test_a_text_that_ends_is_scored_all_the_same(serve: Serve) -> None:
    async with serve() as served:
        eos_id = served.state.engine.tokenizer.eos_id
        fields = {**SCORE, "prompt": [5, 6, 7]}
        found = choice(await served.post(PATH, **fields, logit_bias={str(eos_id): 100}))
        assert len(found["logprobs"]["token_logprobs"]) == 4


async def test_the_prompt_alone_or_with_what_follows(serve: Serve) -> None:
    fields: dict[str, Any] = {"prompt": TEXT, "echo": True, "temperature": 0, "ignore_eos": True}
    async with serve() as served:
        alone = (await served.post(PATH, **fields, max_tokens=0)).json()
        assert alone["choices"][0]["text"] == TEXT
        assert alone["choices"][0]["finish_reason"] == "length"
        assert alone["usage"]["completion_tokens"] == 0
        only = choice(await served.post(PATH, **fields, max_tokens=0, logprobs=0))
        assert len(only["logprobs"]["tokens"]) == alone["usage"]["prompt_tokens"]
        whole = choice(await served.post(PATH, **fields, max_tokens=20, logprobs=2))
        after = choice(
            await served.post(PATH, **{**fields, "echo": False}, max_tokens=20, logprobs=2)
        )
        assert whole["text"] == TEXT + after["text"]
        assert whole["logprobs"]["tokens"][-20:] == after["logprobs"]["tokens"]
        shifted = [len(TEXT) + offset for offset in after["logprobs"]["text_offset"]]
        assert whole["logprobs"]["text_offset"][-20:] == shifted
        # A stop string is searched in what follows.
        stopped = choice(await served.post(PATH, **fields, max_tokens=20, stop=["Zo", " an"]))
        assert stopped["text"].startswith(TEXT)
        stream = await served.post(PATH, **fields, max_tokens=20, logprobs=2, stream=True)
        chunks = [
            json.loads(block.removeprefix("data: "))["choices"][0]
            for block in stream.text.split("\n\n")
            if block.startswith("data: {")
        ]
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
        logprobs = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
        tokens = [token for each in logprobs for token in each["tokens"]]
        assert tokens == whole["logprobs"]["tokens"]


async def test_what_cannot_be_is_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MOST_ECHOED", 30)
    async with serve() as served:
        for fields, param in (
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 0, "echo": False}, "max_tokens"),
            ({"echo": True, "prompt": ""}, "prompt"),
            ({"echo": "yes"}, "echo"),
            ({"echo": True, "logprobs": 1, "prompt": "x" * 16}, "echo"),
        ):
            response = await served.post(PATH, **{"prompt": "x", **fields})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
        for fields in ({"logprobs": 1, "prompt": "x" * 14}, {"prompt": "x" * 99}):
            body = {"echo": True, "max_tokens": 0, **fields}
            assert choice(await served.post(PATH, **body))["text"] == fields["prompt"]
        chat = {"messages": [{"role": "user", "content": "x"}], "echo": True}
        assert (await served.post("/v1/chat/completions", **chat)).status_code == 400
