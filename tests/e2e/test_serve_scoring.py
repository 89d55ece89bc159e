"""Programs that score texts, as lm-eval does, against a server of the demo model."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from dflash_runtime import Engine
from dflash_runtime.engine.demo_model import demo_model_path
from support.serving import NO_TLS, RunningServer, running_server

pytestmark = pytest.mark.e2e

PAIRS = [
    ("The capital of France is", " Paris."),
    ("Once upon a time there was", " a king who had three daughters"),
    ("2 + 2 =", " 4"),
]
"""Contexts and continuations."""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(None, "--device", "cpu") as server:
        yield server


def test_lm_evals_requests_get_what_the_logits_say(server: RunningServer) -> None:
    with Engine.open(demo_model_path(), device="cpu") as engine:
        for context, continuation in PAIRS:
            ids = engine.encode_prompt(context + continuation)
            num_context = len(engine.encode_prompt(context))
            # As `lm_eval --model local-completions` sends it, and reads the answer.
            body = {
                "model": "dflash-demo",
                "prompt": [ids],
                "temperature": 0,
                "max_tokens": 1,
                "logprobs": 1,
                "seed": 1234,
                "echo": True,
            }
            answer = httpx.post(
                f"{server.url}/v1/completions", json=body, timeout=60, verify=NO_TLS
            ).raise_for_status()
            (choice,) = answer.json()["choices"]
            found = choice["logprobs"]["token_logprobs"][num_context:-1]
            tops = choice["logprobs"]["top_logprobs"][num_context:-1]
            logits = engine.logits(ids).astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
            rows = range(num_context - 1, len(ids) - 1)
            expected = [logits[row, ids[row + 1]] for row in rows]
            assert found == pytest.approx(expected, abs=1e-6)
            is_greedy = [each == max(top.values()) for each, top in zip(found, tops, strict=True)]
            assert is_greedy == [int(logits[row].argmax()) == ids[row + 1] for row in rows]
