"""``/status/requests``: what runs and waits, and why; the last hundred; never a text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from dflash_runtime.serving.access import ApiKeys
from dflash_runtime.serving.request_record import RequestRecord
from dflash_runtime.serving.status import bytes_of_experts
from support.processes import ROOT

Serve = Callable[..., AbstractAsyncContextManager[Any]]
PATH = "/status/requests"
SECRET = "words that are nobody's business"


def documented(what: str) -> set[str]:
    """Names in code within one row of the document's table."""
    table = (ROOT / "docs/serving.md").read_text().partition("| `GET /status/requests` | |")[2]
    rows = dict(re.findall(r"^\| (`.*?) \| (.*) \|$", table.partition("\n\n")[0], re.MULTILINE))
    return {*re.findall(r"`(\w+)`", rows[what] if what else " ".join(rows))}


@pytest.mark.asyncio
async def test_it_shows_what_runs_what_waits_and_what_has_ended(serve: Serve) -> None:
    async with serve() as served:
        assert (await served.client.get(PATH)).json() == {
            "schema_version": 1,
            "running": [],
            "num_waiting": 0,
            "waiting": [],
            "latest": [],
            "last_hour": [],
        }
        body = {"prompt": SECRET, "max_tokens": 400, "ignore_eos": True}
        tasks = [asyncio.create_task(served.post("/v1/completions", **body)) for _ in range(3)]
        while True:
            now = (await served.client.get(PATH)).json()
            if now["num_waiting"] == 2 and now["running"] and now["running"][0]["first_token_s"]:
                break
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while len((after := (await served.client.get(PATH)).json())["latest"]) < 3:
            await asyncio.sleep(0.01)
    fields = RequestRecord().as_fields().keys()
    [running] = now["running"]
    assert running.keys() == fields | {"reading"}
    assert running["reading"] is None
    assert running["end"] is None
    assert 0 < running["prompt_tokens"] <= len(SECRET)
    assert running["whole_s"] >= running["first_token_s"] > 0
    first, second = now["waiting"]
    assert first.keys() == fields | {"num_before", "why"}
    assert [first["num_before"], second["num_before"]] == [0, 1]
    assert first["why"] == "next: the model computes one request at a time"
    assert second["why"] == "behind the one that runs and 1 other; clients take turns"
    ids = {running["request_id"], first["request_id"], second["request_id"]}
    assert {each["request_id"] for each in after["latest"]} == ids
    assert {each["end"] for each in after["latest"]} == {"cancelled"}
    assert after["running"] == after["waiting"] == []
    assert sum(each["requests"] for each in after["last_hour"]) == 3
    assert SECRET not in str([now, after])

    text = (ROOT / "docs/serving.md").read_text().partition("A request is `request_id`")[2]
    named = {"request_id", *re.findall(r"`(\w+)`", text.partition("\n\n")[0])}
    assert named == fields
    assert {"schema_version"} | documented("") == now.keys()
    assert documented("`last_hour`") == after["last_hour"][0].keys()


@pytest.mark.asyncio
async def test_a_prompt_that_is_read_is_shown_with_its_progress(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as served:
        worker = served.state.worker
        seen = []
        forward = type(served.state.engine._steps).forward

        def noted(*args: Any, **options: Any) -> Any:
            seen.append(worker.reading)
            return forward(*args, **options)

        monkeypatch.setattr(type(served.state.engine._steps), "forward", noted)
        await served.post("/v1/completions", prompt="hello", max_tokens=1)
    assert seen[0] == (0, 4)


@pytest.mark.asyncio
async def test_it_is_for_those_who_may_use_the_server(serve: Serve) -> None:
    async with serve(keys=ApiKeys([b"a-key-of-32-characters-or-so-----"])) as served:
        assert (await served.client.get(PATH)).status_code == 401


@pytest.mark.asyncio
async def test_memory_of_owners_and_of_keys_and_values_is_told(serve: Serve) -> None:
    async with serve() as served:
        engine = served.state.engine
        await served.post("/v1/completions", prompt="hello", max_tokens=4, ignore_eos=True)
        found = (await served.client.get("/status")).json()
        moe = engine.spec.moe
        whole = sum(each.num_experts * each.expert_bytes for each in moe.layers)
        assert bytes_of_experts(moe, engine.placement) == {"local": whole}
    [owner] = found["owners"]
    assert owner["expert_bytes"] == whole > 0
    assert found["cache"]["type"] == "f32"
    assert found["cache"]["num_positions"] == 512
    assert found["cache"]["num_bytes"] > 0
    assert 4 <= found["cache"]["num_cached"] <= 8
