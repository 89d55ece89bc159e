"""Anthropic's messages, and the number of their tokens."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from dflash_runtime.serving.core import visit
from dflash_runtime.serving.doors.anthropic_answers import MessagesAnswer
from dflash_runtime.serving.doors.anthropic_bodies import NAMES, CountBody, MessagesBody
from dflash_runtime.serving.doors.door import Door
from dflash_runtime.serving.errors import ApiError, JSONResponse
from dflash_runtime.serving.state import ServerState
from dflash_runtime.serving.status import model_id

_PATH = "/v1/messages"

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def _add_routes(app: FastAPI, state: ServerState) -> None:
    @app.post(_PATH)
    async def messages(request: Request) -> Response:
        with visit(state, request, names=NAMES) as asked:
            body = await asked.body(MessagesBody)
            answer = MessagesAnswer(model_id(asked.engine))
            return await asked.chat(body.chat(asked.template), answer)

    @app.post(f"{_PATH}/count_tokens")
    async def count(request: Request) -> Response:
        with visit(state, request, names=NAMES) as asked:
            body = await asked.body(CountBody)
            rendered = await asked.rendered(body.chat(asked.template))
        return JSONResponse({"input_tokens": len(rendered.token_ids)})


def _error(error: ApiError) -> dict[str, Any]:
    """Anthropic's error, with our fields beside its own."""
    kind = _KINDS.get(error.status, "invalid_request_error")
    found = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return {"type": "error", "error": found}


ANTHROPIC = Door(_add_routes, _error, (_PATH,))
