"""What is kept and logged of requests: numbers of each that ended, never a text or a key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.process.output import FIELDS, REQUESTS
from dflash_protocol.settings import Settings
from dflash_runtime.compute.reference.backend import ReferenceBackend
from dflash_runtime.engine.generation import GenerationStats
from dflash_runtime.serving.access import ApiKeys
from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.hourly_rates import HourlyRates
from dflash_runtime.serving.refusal_log import MOST_A_MINUTE, RefusalLog
from dflash_runtime.serving.request_log import NUM_KEPT, RequestLog
from dflash_runtime.serving.request_record import RequestRecord

Serve = Callable[..., AbstractAsyncContextManager[Any]]
SECRET = "a-key-of-32-characters-or-so-----"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=REQUESTS)
    return caplog


def fields_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [getattr(each, FIELDS) for each in caplog.records if each.name == REQUESTS]


@pytest.mark.asyncio
async def test_a_line_for_each_request(
    serve: Serve, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunking = replace(ReferenceBackend.chunking, preferred=8)  # it keeps whole chunks only
    monkeypatch.setattr(ReferenceBackend, "chunking", chunking)
    body: dict[str, Any] = {"prompt": "hello you " * 8, "max_tokens": 5, "ignore_eos": True}
    async with serve() as served:
        first = await served.post("/v1/completions", **body)
        again = await served.post("/v1/completions", **body, stream=True)
        assert again.status_code == 200
    one, other = fields_of(lines)
    assert one["request_id"] == first.json()["id"]
    assert one["prompt_tokens"] == first.json()["usage"]["prompt_tokens"]
    assert (one["cached_tokens"], one["generated_tokens"], one["end"]) == (0, 5, "length")
    assert one["key"] is None
    assert 0 <= one["queue_s"] <= one["first_token_s"] <= one["whole_s"]
    assert one["tokens_per_s"] > 0
    assert other["cached_tokens"] > 0
    message = lines.records[0].getMessage()
    assert message.startswith(f"request {one['request_id']}: {one['prompt_tokens']} tokens in (0 ")
    assert message.endswith(" tokens/s, length")
    assert "hello" not in lines.text


@pytest.mark.asyncio
async def test_keys_are_known_by_their_names(
    serve: Serve, tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# name: alice\n{SECRET}\n# old: {SECRET}x\n{SECRET}2\n")
    file.chmod(0o600)
    keys = ApiKeys.load(file)
    assert keys.names == ("alice", "key 2")
    log = RequestLog(keys.names)
    async with serve(keys=keys) as served:
        served.state.worker.requests = log
        for suffix in ("", "2"):
            headers = {"authorization": f"Bearer {SECRET}{suffix}", "traceparent": TRACE}
            body = {"prompt": "a", "max_tokens": 1}
            await served.client.post("/v1/completions", json=body, headers=headers)
    assert [each["key"] for each in fields_of(lines)] == ["alice", "key 2"]
    assert {each["trace_id"] for each in fields_of(lines)} == {TRACE[3:35]}
    assert " of alice: " in lines.text
    assert SECRET not in lines.text
    assert SECRET not in str(log.latest())


@pytest.mark.asyncio
async def test_every_end_is_told(
    serve: Serve, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {"prompt": "a", "max_tokens": 500, "ignore_eos": True}
    async with serve(settings=Settings(queue_capacity=2)) as served:

        async def ask() -> int:
            return int((await served.post("/v1/completions", **long)).status_code)

        tasks = [asyncio.create_task(ask())]
        while served.state.worker.running is None:
            await asyncio.sleep(0.005)
        tasks += [asyncio.create_task(ask()) for _ in range(2)]
        while fields_of(lines) == []:  # the third finds the client's half of the queue full
            await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while len(fields_of(lines)) < 3:
            await asyncio.sleep(0.005)

        def fails(*_: object, **__: object) -> None:
            raise DaemonUnavailable("it is gone")

        monkeypatch.setattr(served.state.engine, "generate", fails)
        await served.post("/v1/completions", prompt="a", max_tokens=1)
    ends = [each["end"] for each in fields_of(lines)]
    assert ends[0] == "queue_full"
    assert sorted(ends[1:3]) == ["cancelled", "cancelled"]
    assert ends[3:] == ["error"]
    assert [each["end"] for each in served.state.worker.requests.latest()] == ends[::-1]


@pytest.mark.parametrize(
    "parent", ["", "x", TRACE + "0", TRACE.upper(), TRACE.replace("0af", "xyz"), "00-" * 40]
)
def test_a_trace_that_is_none_has_no_id(parent: str) -> None:
    assert RequestRecord(trace={"traceparent": parent}).trace_id is None
    assert RequestRecord(trace={"traceparent": TRACE}).trace_id == TRACE[3:35]


def test_memory_is_bounded() -> None:
    log = RequestLog()
    for number in range(NUM_KEPT + 20):
        log.ended(RequestRecord(request_id=str(number), end="stop"))
    latest = log.latest()
    assert [each["request_id"] for each in latest[:2]] == ["119", "118"]
    assert len(latest) == NUM_KEPT


def test_an_hour_is_kept_by_minutes() -> None:
    now_s = 59.0
    rates = HourlyRates(lambda: now_s)
    stats = GenerationStats(100, 40, 21, 0.5, 2.0)
    rates.add(RequestRecord(first_token_s=0.5, num_generated=21, end="stop", stats=stats))
    rates.add(RequestRecord(first_token_s=1.5, num_generated=21, end="error", stats=stats))
    now_s = 60.0
    rates.add(RequestRecord(end="queue_full"))
    assert rates.as_records() == [
        {
            "ago": 1,
            "requests": 2,
            "errors": 1,
            "prompt_tokens": 120,
            "generated_tokens": 42,
            "prefill_s": 1.0,
            "decode_tokens": 40,
            "decode_s": 4.0,
            "first_tokens": 2,
            "first_token_s": 2.0,
            "first_token_most_s": 1.5,
        },
        {"ago": 0, "requests": 1} | dict.fromkeys(
            (
                "errors", "prompt_tokens", "generated_tokens", "prefill_s", "decode_tokens",
                "decode_s", "first_tokens", "first_token_s", "first_token_most_s",
            ),
            0,
        ),
    ]  # fmt: skip
    now_s = 3600.0
    assert [each["ago"] for each in rates.as_records()] == [59]
    for minute in range(200):
        now_s = 3600.0 + 60 * minute
        rates.add(RequestRecord(end="stop"))
    assert [each["ago"] for each in rates.as_records()] == [*range(59, -1, -1)]


@pytest.mark.asyncio
async def test_a_line_for_each_request_that_is_refused_before_the_queue(
    serve: Serve, tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# name: alice\n{SECRET}\n")
    file.chmod(0o600)
    ours = {"authorization": f"Bearer {SECRET}"}
    wrong = {"authorization": "Bearer somebody's-secret-key"}
    settings = Settings(max_body_bytes=2000)
    text = "nobody's business"
    async with serve(keys=ApiKeys.load(file), settings=settings) as served:

        async def post(path: str, headers: dict[str, str], **body: Any) -> int:
            answer = await served.client.post(path, json=body, headers=headers)
            return int(answer.status_code)

        path = "/v1/completions"
        small: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": text}]}
        statuses = [
            await post(path, wrong, prompt=text),
            await post(path, ours, prompt=text, temperature=-1),
            await post(path, ours, prompt=text, **{text: 1}),
            await post(path, ours, prompt=text * 1000),
            await post(f"/{text}", ours, prompt=text),
            await post("/api/chat", ours, model=text, messages=[]),
            await post("/api/chat", ours, **small, options={text: 1}),
        ]
        served.state.is_draining = True
        statuses.append(await post(path, ours, prompt=text))
        await served.client.get("/ready")  # a probe's answer is no refusal
    found = fields_of(lines)
    assert [each["status"] for each in found] == statuses
    assert statuses == [401, 400, 400, 413, 404, 404, 400, 503]
    assert [(each["path"], each["key"], each["code"], each["param"]) for each in found] == [
        (path, None, "invalid_api_key", None),
        (path, "alice", None, "temperature"),
        (path, "alice", "unknown_parameter", None),
        (path, "alice", "body_too_large", None),
        ("other", "alice", None, None),
        ("/api/chat", "alice", "model_not_found", "model"),
        ("/api/chat", "alice", "unknown_parameter", None),
        (path, "alice", "shutting_down", None),
    ]
    assert {each["end"] for each in found} == {"refused"}
    assert {each["method"] for each in found} == {"POST"}
    for secret in (text, SECRET, "somebody"):
        assert secret not in lines.text
        assert secret not in str(found)


def test_a_flood_of_refusals_has_few_lines(lines: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    log = RefusalLog(lambda: now_s)
    scope = {"method": "X-WORDS", "client": ("10.0.0.1", 5)}

    def refuse() -> None:
        log.refused(ApiError(400, "no", code="c"), scope, path="other", key="")

    for _ in range(1000):
        refuse()
    assert len(fields_of(lines)) == MOST_A_MINUTE
    now_s = 59.0
    refuse()
    assert len(fields_of(lines)) == MOST_A_MINUTE
    now_s = 60.0
    for _ in range(2):
        refuse()
    *_, first, second = fields_of(lines)
    assert (first["num_unlogged"], second["num_unlogged"]) == (1001 - MOST_A_MINUTE, 0)
    assert (first["method"], first["client"]) == ("other", "10.0.0.1")


@pytest.mark.asyncio
async def test_a_sink_of_spans_that_fails_costs_no_answer(
    serve: Serve, lines: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def add(self, record: RequestRecord) -> None:
            raise RuntimeError("of another project")

    async with serve() as served:
        served.state.worker.requests = RequestLog(spans=Failing())
        for _ in range(2):
            answer = await served.post("/v1/completions", prompt="a", max_tokens=1)
            assert answer.status_code == 200
        assert served.state.worker.is_well
    assert [each.exc_info is not None for each in lines.records] == [True, False] * 2
