"""Requests as browsers send them from web pages of other origins."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import Settings
from dflash_runtime.serving.access import ApiKeys
from dflash_runtime.serving.cors import check_origins

Serve = Callable[..., AbstractAsyncContextManager[Any]]
KEY = "a-key-of-32-characters-or-so-----"
PAGE = "https://chat.example"
ALLOWED = "access-control-allow-origin"


async def asked_whether(served: Any, origin: str, **more: str) -> httpx.Response:
    """What a browser asks before it sends JSON, or a key, to another origin."""
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
        **more,
    }
    response = await served.client.options("/v1/chat/completions", headers=headers)
    assert isinstance(response, httpx.Response)
    return response


@pytest.mark.asyncio
@pytest.mark.parametrize("keys", [None, ApiKeys([KEY.encode()])])
async def test_only_pages_that_are_named_are_let_in(serve: Serve, keys: ApiKeys | None) -> None:
    settings = Settings(cors=(PAGE, "http://localhost:3000"))
    async with serve(settings=settings, keys=keys) as served:
        answer = await asked_whether(served, PAGE)
        assert (answer.status_code, answer.headers[ALLOWED]) == (204, PAGE)
        assert answer.headers["vary"] == "Origin"
        assert "POST" in answer.headers["access-control-allow-methods"]
        names = answer.headers["access-control-allow-headers"].split(",")
        assert names == ["authorization", "content-type", "x-stainless-os"]
        assert "access-control-allow-private-network" not in answer.headers
        local = {"access-control-request-private-network": "true"}
        answer = await asked_whether(served, PAGE, **local)
        assert answer.headers["access-control-allow-private-network"] == "true"
        for other in (
            "https://evil.example",
            "null",
            f"{PAGE}.evil.example",
            "http://chat.example",
        ):
            answer = await asked_whether(served, other)
            assert answer.status_code == (403 if keys is None else 401)
            assert ALLOWED not in answer.headers
        for origin, is_allowed in ((PAGE, True), ("https://evil.example", False)):
            headers = {"origin": origin, "authorization": f"Bearer {KEY}"}
            answer = await served.client.get("/v1/models", headers=headers)
            assert answer.headers.get(ALLOWED) == (origin if is_allowed else None)
            assert answer.status_code == (200 if is_allowed or keys else 403)


@pytest.mark.asyncio
async def test_errors_and_streams_can_be_read_too(serve: Serve) -> None:
    settings = Settings(cors=(PAGE,))
    async with serve(settings=settings, keys=ApiKeys([KEY.encode()])) as served:
        for headers, path, body, status in (
            ({}, "/v1/completions", {"prompt": "x"}, 401),
            ({"x-api-key": KEY}, "/v1/completions", {"n": 2}, 400),
            ({"x-api-key": KEY}, "/v1/nothing", {}, 404),
            ({"x-api-key": KEY}, "/v1/messages", {}, 400),
            ({"x-api-key": KEY}, "/v1/completions", {"prompt": "x", "stream": True}, 200),
        ):
            answer = await served.client.post(path, json=body, headers={"origin": PAGE, **headers})
            assert (answer.status_code, answer.headers[ALLOWED]) == (status, PAGE)
            assert "Retry-After" in answer.headers["access-control-expose-headers"]


@pytest.mark.asyncio
async def test_without_the_setting_nothing_is_said_to_browsers(serve: Serve) -> None:
    async with serve() as served:
        answer = await asked_whether(served, PAGE)
        assert answer.status_code == 403
        own = await served.client.get("/v1/models", headers={"origin": "http://127.0.0.1:8080"})
        for response in (answer, own):
            assert not [name for name in response.headers if name.startswith("access-control")]
            assert "vary" not in response.headers


@pytest.mark.asyncio
async def test_all_pages_may_be_let_in_but_not_by_a_foreign_name(serve: Serve) -> None:
    async with serve(settings=Settings(cors=("*",))) as served:
        headers = {"origin": "https://any.example"}
        answer = await served.client.get("/v1/models", headers=headers)
        assert (answer.status_code, answer.headers[ALLOWED]) == (200, headers["origin"])
        headers["host"] = "rebound.example"
        assert (await served.client.get("/v1/models", headers=headers)).status_code == 403
        # What the browser asks for goes back as a header: nothing but names of headers does.
        strange = {"access-control-request-headers": "a: b; c"}
        answer = await asked_whether(served, PAGE, **strange)
        assert "access-control-allow-headers" not in answer.headers


def test_with_keys_pages_have_to_be_named() -> None:
    check_origins(("*",), has_keys=False)
    check_origins((PAGE,), has_keys=True)
    with pytest.raises(SettingsError, match="cors="):
        check_origins((PAGE, "*"), has_keys=True)
