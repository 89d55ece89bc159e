"""Simon Willison's llm against a server, by its file of OpenAI-compatible models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.clients import VENV, program_of, run
from support.serving import RunningServer

pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {"is_large": {"type": "boolean"}},
    "required": ["is_large"],
    "additionalProperties": False,
}


def test_llm_chats_goes_on_and_follows_a_schema(server: RunningServer, tmp_path: Path) -> None:
    one = {"model_name": "dflash-demo", "api_base": f"{server.url}/v1"}
    models = [
        {"model_id": "chat", **one, "supports_tools": True, "supports_schema": True},
        {"model_id": "text", **one, "completion": True},
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    program = program_of(VENV / "bin" / "llm")

    def llm(*arguments: str) -> str:
        return run([program, *arguments], tmp_path, LLM_USER_PATH=str(tmp_path))

    options = ["-o", "max_tokens", "20", "-o", "seed", "1"]
    streamed = llm("-m", "chat", "hello", *options)
    assert llm("-m", "chat", "hello", "--no-stream", *options) == streamed
    assert llm("-c", "again", *options)
    made = llm("-m", "chat", "hello", "--schema", json.dumps(SCHEMA), "-o", "max_tokens", "60")
    assert isinstance(json.loads(made)["is_large"], bool)
    assert llm("-m", "chat", "hello", "-T", "llm_version", *options)
    assert llm("-m", "text", "def ", "-o", "max_tokens", "5")
