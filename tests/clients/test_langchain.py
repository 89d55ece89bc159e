"""langchain-openai against a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.clients import run_python
from support.serving import RunningServer

pytestmark = pytest.mark.e2e


def test_langchain_binds_tools_and_structures_output(server: RunningServer, tmp_path: Path) -> None:
    found = run_python("use_langchain.py", server.url, tmp_path)
    assert found["whole"]
    assert found["streamed"] == found["whole"]
    assert 0 < found["usage"] <= 10
    assert found["free"] == "AIMessage"
    for calls in (found["calls"], found["any"], found["responses calls"]):
        assert calls[0]["name"] == "Weather"
        assert len(calls[0]["args"]["city"]) <= 5
    assert found["then"] in ("stop", "length")
    for city in (*found["cities"], found["streamed city"], found["responses city"]):
        assert set(city) == {"is_large", "district"}
    assert found["responses"]
    assert len(found["completions"]) == 2
