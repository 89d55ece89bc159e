"""OpenAI's models, completions and chats."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from dflash_runtime.engine.engine import Engine
from dflash_runtime.serving.core import Visit, visit
from dflash_runtime.serving.doors.door import Door
from dflash_runtime.serving.doors.openai_answers import ChatAnswer, CompletionAnswer, OpenAIAnswer
from dflash_runtime.serving.errors import ApiError, JSONResponse
from dflash_runtime.serving.requests import ChatBody, CompletionBody
from dflash_runtime.serving.state import ServerState
from dflash_runtime.serving.status import model_id


def _add_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model_record(state.ready_engine())]})

    @app.get("/v1/models/{name}")
    async def model(name: str) -> Response:
        record = _model_record(state.ready_engine())
        if record["id"] != name:
            raise ApiError(404, f"the model is called {record['id']}", code="model_not_found")
        return JSONResponse(record)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        with visit(state, request) as asked:
            body = await asked.body(CompletionBody)
            return await asked.completion(body, _answer(CompletionAnswer, asked, body))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        with visit(state, request) as asked:
            body = await asked.body(ChatBody)
            return await asked.chat(body, _answer(ChatAnswer, asked, body))

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        raise ApiError(
            501,
            "this server computes no embeddings: its models are trained to write text, and one "
            "that is made for embeddings is smaller and better at it",
            code="not_implemented",
        )


OPENAI = Door(_add_routes)


def _answer(
    kind: type[OpenAIAnswer], asked: Visit, body: CompletionBody | ChatBody
) -> OpenAIAnswer:
    return kind(
        model=model_id(asked.engine),
        token_bytes=asked.token_bytes,
        has_logprobs=body.top_logprobs_wanted is not None,
        stream_usage=body.wants_usage,
    )


def _model_record(engine: Engine) -> dict[str, Any]:
    created = int(engine.model_path.stat().st_mtime) if engine.model_path.exists() else 0
    return {
        "id": model_id(engine),
        "object": "model",
        "created": created,
        "owned_by": "dflash-moe",
        "meta": {"n_ctx": engine.num_positions, "n_vocab": engine.spec.vocab_size},
    }
