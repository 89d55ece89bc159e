"""Vercel's AI SDK against a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.clients import run_node
from support.processes import wait_until
from support.serving import RunningServer

pytestmark = pytest.mark.e2e


def test_the_ai_sdk_streams_calls_tools_and_makes_objects(
    server: RunningServer, tmp_path: Path
) -> None:
    found = run_node("use_ai_sdk.mjs", server.url, tmp_path)
    assert found["whole"]
    assert found["streamed"] == found["whole"]
    assert 0 < found["usage"] <= 10
    assert found["steps"][0][1] == "tool-calls"
    assert found["steps"][1][0] == 0
    assert found["results"][0].endswith(": 3")
    assert {"tool-call", "tool-result", "finish"} <= set(found["events"])
    assert "error" not in found["events"]
    for city in found["objects"]:
        assert set(city) == {"isLarge", "district"}
    assert found["choice"] in ("a", "b")
    assert found["completed"] == found["completion"]
    assert found["before"] >= 3
    status, message = found["image"]
    assert status == 400
    assert "image_url" in message
    # The stream that it gave up does not run on.
    wait_until(
        lambda: server.get("/status").json()["queue"]["running"] == 0, "the server to be idle"
    )
