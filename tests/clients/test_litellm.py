"""litellm against a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.clients import run_python
from support.serving import RunningServer

pytestmark = pytest.mark.e2e


def test_litellm_chats_calls_tools_and_parses(server: RunningServer, tmp_path: Path) -> None:
    found = run_python("use_litellm.py", server.url, tmp_path)
    for provider in ("openai", "hosted_vllm"):
        of_one = found[provider]
        assert of_one["whole"]
        assert of_one["streamed"] == of_one["whole"]
        [[name, arguments]] = of_one["calls"]
        assert name == "weather"
        assert len(arguments["city"]) <= 5
        assert of_one["streamed calls"] == of_one["calls"]
        assert of_one["then"] in ("stop", "length")
        assert set(of_one["city"]) == {"is_large", "district"}
    others = found["others"]
    assert 0 < others["completion"] <= 5
    assert 0 < others["response"] <= 16
    assert others["ollama"] is not None
    assert others["anthropic"] is not None
    assert others["anthropic calls"][0][0] == "weather"
