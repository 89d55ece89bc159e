"""The outermost ASGI layer: admits each request before its route, and counts its status."""

from __future__ import annotations

import logging

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_runtime.serving.access import is_of_another_site
from dflash_runtime.serving.errors import ApiError, api_error
from dflash_runtime.serving.state import ServerState
from dflash_runtime.serving.status_page import PAGE_PATHS

_LOG = logging.getLogger(__name__)

OPEN_TO_ALL = frozenset({"/health", "/ready"})
"""Paths without a key: probes have none, and that the server runs is no secret."""

CLIENT = "dflash.client"
"""Key of the request's scope for the client that takes turns in the queue."""

KEY = "dflash.key"
"""Key of the request's scope for the index of its API key; empty if the server has none."""


class RequestGate:
    """The outermost ASGI application."""

    def __init__(self, app: ASGIApp, state: ServerState, endpoints: frozenset[str]) -> None:
        self._app = app
        self._state = state
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status = 500
        is_started = False

        async def counted(message: Message) -> None:
            nonlocal status, is_started
            if message["type"] == "http.response.start":
                status, is_started = message["status"], True
            await send(message)

        try:
            self._admit(scope)
            await self._app(scope, receive, counted)
        except Exception as error:
            refusal = api_error(error)
            if refusal is not error:
                # docs: a bug, with its traceback: report it. The client got status 500
                _LOG.exception("%s %s failed", scope["method"], scope["path"])
            if not is_started:
                await refusal.response()(scope, receive, counted)
        finally:
            path = scope["path"] if scope["path"] in self._endpoints else "other"
            self._state.metrics.http_requests.labels(path, str(status)).inc()

    def _admit(self, scope: Scope) -> None:
        """Set the scope's client and key. Raises: ApiError if the request is not allowed."""
        headers = Headers(scope=scope)
        host = scope["client"][0] if scope.get("client") else ""
        scope[CLIENT], scope[KEY] = host, ""
        if scope["path"] in OPEN_TO_ALL:
            return
        if self._state.keys is None:
            if is_of_another_site(headers.get("host", ""), headers.get("origin")):
                raise ApiError(
                    403,
                    "without a key, requests must be addressed to localhost, and not come from "
                    "web pages of other sites",
                    code="forbidden",
                )
            return
        if scope["path"] in PAGE_PATHS:
            return
        key = self._state.keys.index_of(headers.get("authorization", "").encode("latin-1"))
        if key is None:
            raise ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        scope[CLIENT], scope[KEY] = f"{key} {host}", str(key)
