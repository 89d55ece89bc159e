"""A server's log as JSON, of the parent and its daemon: an object a line, a line a request."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from support.random_models import Qwen3MoeShape, write_qwen3moe
from support.serving import NO_TLS, running_server

pytestmark = pytest.mark.e2e

SHAPE = Qwen3MoeShape(num_layers=2, num_experts=4, num_experts_used=2, vocab_size=300)
SECRET = "a-key-of-32-characters-or-so-----"
PROMPT = "words that are nobody's business"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_all_lines_are_json_and_one_of_them_is_the_request(tmp_path: Path) -> None:
    model = write_qwen3moe(tmp_path / "small.gguf", SHAPE, seed=1, tokenizer="bytes")
    keys = tmp_path / "keys"
    keys.write_text(f"# name: alice\n{SECRET}\n")
    keys.chmod(0o600)
    with running_server(
        model,
        *("--backend", "reference", "--daemon", "cpu", "--api-key-file", str(keys)),
        *("--log-format", "json", "--log-level", "info"),
        DFLASH_MOE_EXPERT_COMPUTE_BACKEND="reference",
    ) as server:
        listening = next(line for line in server.lines if "listening on" in line)
        url = re.findall(r"http://[0-9.:]+", json.loads(listening)["message"])[0]
        response = httpx.post(
            f"{url}/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True},
            headers={"authorization": f"Bearer {SECRET}", "traceparent": TRACE},
            verify=NO_TLS,
        )
        answer = response.raise_for_status().json()
    records = [json.loads(line) for line in server.lines]
    assert {each["program"] for each in records} <= {"dflash-moe", "dflash-daemon"}
    assert all({"time", "level", "message"} <= each.keys() for each in records)
    [request] = [each for each in records if each.get("logger") == "dflash_runtime.requests"]
    assert request["request_id"] == answer["id"]
    assert (request["key"], request["end"], request["generated_tokens"]) == ("alice", "length", 3)
    assert request["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert request["trace_id"] == TRACE[3:35]
    text = "\n".join(server.lines)
    assert SECRET not in text
    assert PROMPT not in text
