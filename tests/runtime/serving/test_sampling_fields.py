"""The fields of a body that say how tokens are sampled: what they become, and that they act."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from dflash_runtime.engine.breakers import DEFAULT_BREAKERS, Breakers
from dflash_runtime.serving.requests import ChatBody, CompletionBody, parse_body

Serve = Callable[..., AbstractAsyncContextManager[Any]]
GREEDY: dict[str, Any] = {
    "prompt": [5, 6, 7, 5, 6], "temperature": 0, "ignore_eos": True, "max_tokens": 24,
}  # fmt: skip


def completion(**fields: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"prompt": "x", **fields}).encode())


def test_dry_is_off_or_has_llama_cpps_defaults() -> None:
    for fields in ({}, {"dry_multiplier": 0, "dry_base": 2.0}, {"dry_allowed_length": 3},
                   {"dry_multiplier": 1.0, "dry_penalty_last_n": 0}):  # fmt: skip
        assert completion(**fields).breakers is None
        assert completion(**fields).penalties().dry is None
    body = completion(dry_multiplier=0.8)
    compiled = Breakers({1: frozenset({()})})
    dry = body.penalties(compiled).dry
    assert body.breakers == DEFAULT_BREAKERS
    assert dry is not None
    assert (dry.multiplier, dry.base, dry.allowed_length, dry.window) == (0.8, 1.75, 2, None)
    assert dry.breakers is compiled
    given = completion(dry_multiplier=1, dry_penalty_last_n=9, dry_sequence_breakers=["a", "b"])
    assert given.breakers == ("a", "b")
    windowed = given.penalties().dry
    assert windowed is not None
    assert windowed.window == 9


def test_typical_p_is_taken() -> None:
    assert completion(typical_p=0.3).sampling().typical_p == 0.3
    chat = {"messages": [{"role": "user", "content": "x"}], "typical_p": 0.3}
    assert parse_body(ChatBody, json.dumps(chat).encode()).sampling().typical_p == 0.3


@pytest.mark.asyncio
async def test_they_act(serve: Serve) -> None:
    async with serve() as served:

        async def text(**fields: Any) -> str:
            response = await served.post("/v1/completions", **{**GREEDY, **fields})
            assert response.status_code == 200, response.text
            return str(response.json()["choices"][0]["text"])

        repeated = [[next(iter(GREEDY["prompt"])), 3.0]]
        free = await text(logit_bias=repeated)
        dry = {"dry_multiplier": 100.0, "dry_allowed_length": 0, "logit_bias": repeated}
        assert await text(**dry) != free
        # Where every token breaks sequences, nothing is repeated.
        every = served.state.engine.tokenizer.decode(range(32, 127))
        letters = sorted({letter for letter in every if letter.isprintable()})
        assert await text(**dry, dry_sequence_breakers=letters[:64]) != await text(**dry)
        typical = {"temperature": 1.5, "seed": 4, "typical_p": 0.2}
        assert await text(**typical) == await text(**typical, logprobs=1)
        assert await text(**typical) != await text(**{**typical, "typical_p": 1.0})
        for fields, param in (
            ({"dry_multiplier": -1}, "dry_multiplier"),
            ({"dry_multiplier": 1, "dry_base": 0.5}, "dry_base"),
            ({"dry_multiplier": 1, "dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
            ({"typical_p": 1.5}, "typical_p"),
        ):
            response = await served.post("/v1/completions", **{**GREEDY, **fields})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
