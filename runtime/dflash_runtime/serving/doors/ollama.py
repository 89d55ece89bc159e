"""Ollama's interface."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from dflash_runtime.serving.core import Visit, visit
from dflash_runtime.serving.doors.door import Door
from dflash_runtime.serving.doors.ollama_answers import OllamaAnswer
from dflash_runtime.serving.doors.ollama_models import check_name, running, shown, tag
from dflash_runtime.serving.errors import ApiError, JSONResponse
from dflash_runtime.serving.ollama_bodies import (
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
from dflash_runtime.serving.ollama_options import FIELD_NAMES, OllamaBody
from dflash_runtime.serving.requests import ChatBody, CompletionBody, body_of
from dflash_runtime.serving.state import ServerState
from dflash_runtime.serving.status import chat_template

VERSION = "0.12.11"
"""Of Ollama's interface, whose clients look at it: the one in which log-probabilities came."""

_ABSENT = {
    "has no embeddings": ("/api/embed", "/api/embeddings"),
    "serves one model, and manages none": (
        "/api/copy", "/api/create", "/api/delete", "/api/pull", "/api/push",
    ),
}  # fmt: skip
"""What is not there, and why."""


def _add_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/api/chat")
    async def chat(request: Request) -> Response:
        with visit(state, request, names=FIELD_NAMES) as asked:
            body = await asked.body(OllamaChatBody)
            answer = _answer(asked, body, is_chat=True)
            if not body.messages:
                return _nothing(body, answer)
            fields = body.chat(_template(asked), asked.engine.num_positions)
            return await asked.chat(body_of(ChatBody, fields), answer)

    @app.post("/api/generate")
    async def generate(request: Request) -> Response:
        with visit(state, request, names=FIELD_NAMES) as asked:
            body = await asked.body(OllamaGenerateBody)
            answer = _answer(asked, body, is_chat=False)
            if not body.prompt:
                return _nothing(body, answer)
            template, num_positions = _template(asked), asked.engine.num_positions
            if template and not body.raw:
                fields = body.chat(template, num_positions)
                return await asked.chat(body_of(ChatBody, fields), answer)
            if body.system:
                raise ApiError(400, "system: this model has no chat template", param="system")
            completion = body_of(CompletionBody, body.completion(num_positions))
            return await asked.completion(completion, answer)

    @app.head("/api/tags")
    @app.get("/api/tags")
    async def tags() -> Response:
        return JSONResponse({"models": [tag(state.ready_engine())]})

    @app.get("/api/ps")
    async def models_running() -> Response:
        return JSONResponse({"models": [running(state.ready_engine())]})

    @app.head("/api/version")
    @app.get("/api/version")
    async def version() -> Response:
        return JSONResponse({"version": VERSION})

    @app.post("/api/show")
    async def show(request: Request) -> Response:
        with visit(state, request) as asked:
            body = await asked.body(OllamaShowBody)
            check_name(asked.engine, body.model or body.name or "")
            return JSONResponse(shown(asked.engine, _template(asked)))

    for why, paths in _ABSENT.items():
        for path in paths:
            method = "DELETE" if path == "/api/delete" else "POST"
            app.add_api_route(path, _absent(why), methods=[method])


def _error(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


OLLAMA = Door(_add_routes, error_form=_error, paths=("/api",))


def _absent(why: str) -> Any:
    async def refuse() -> Response:
        raise ApiError(501, f"this server {why}", kind="server_error", code="not_implemented")

    return refuse


def _template(asked: Visit) -> str:
    return chat_template(asked.state, asked.engine) or ""


def _answer(asked: Visit, body: OllamaBody, *, is_chat: bool) -> OllamaAnswer:
    """Raises: ApiError if the model is called otherwise."""
    check_name(asked.engine, body.model)
    return OllamaAnswer(
        model=body.model,
        is_chat=is_chat,
        token_bytes=asked.token_bytes,
        has_logprobs=bool(body.logprobs),
    )


def _nothing(body: OllamaBody, answer: OllamaAnswer) -> Response:
    """The answer to a request that only has a model be there, or gone; it stays."""
    return JSONResponse(answer.nothing("unload" if body.is_unload else "load"))
