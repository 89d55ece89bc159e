"""opencode says hi to a server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from support.clients import NODE, TOOLS_TEMPLATE, program_of, run
from support.random_models import Qwen3MoeShape, write_qwen3moe
from support.serving import running_server

pytestmark = pytest.mark.e2e

# Its prompt and its tools take 28,000 characters, here as many tokens.
SHAPE = Qwen3MoeShape(
    num_layers=1, num_experts=4, num_experts_used=2, vocab_size=300, context_length=65536
)


def test_opencode_gets_an_answer(tmp_path: Path) -> None:
    program = program_of(NODE / "node_modules" / ".bin" / "opencode")
    model = write_qwen3moe(tmp_path / "wide.gguf", SHAPE, seed=1, tokenizer="bytes")
    template = tmp_path / "chat.jinja"
    template.write_text(TOOLS_TEMPLATE)
    folder = tmp_path / "project"
    folder.mkdir()
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    with running_server(model, "--chat-template-file", str(template)) as server:
        limits = {"context": SHAPE.context_length, "output": 200}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{server.url}/v1"},
            "models": {"wide": {"limit": limits}},
        }
        settings = {
            "autoupdate": False,
            "share": "disabled",
            "provider": {"dflash": provider},
            "model": "dflash/wide",
            "small_model": "dflash/wide",
        }
        (folder / "opencode.json").write_text(json.dumps(settings))
        written = run([program, "run", "hi"], tmp_path, cwd=folder)
        assert written.strip()
        refused = 'dflash_moe_http_requests_total{code="400",endpoint="/v1/chat/completions"}'
        assert server.metric(refused) == 0
        latest = server.get("/status/requests").json()["latest"]
        assert any(each["prompt_tokens"] > 10_000 for each in latest)  # the one with tools
        assert {each["end"] for each in latest} <= {"stop", "length"}
