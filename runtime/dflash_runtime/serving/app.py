"""The routes.

Bodies are received and bounded here and checked in ``requests``; text is made into tokens in
threads of their own, so that a large one holds up nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from dflash_adapters.tokenizer import Tokenizer
from dflash_protocol import __version__
from dflash_protocol.errors import ContextExceeded, SettingsError
from dflash_runtime.engine.arguments import token_id_array
from dflash_runtime.engine.engine import Engine
from dflash_runtime.serving.ascii_json import JSONResponse
from dflash_runtime.serving.description import describe, model_id
from dflash_runtime.serving.errors import ApiError, api_error
from dflash_runtime.serving.gate import CLIENT, Gate
from dflash_runtime.serving.generation import GenerationResponse
from dflash_runtime.serving.jobs import Channel, Job
from dflash_runtime.serving.requests import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from dflash_runtime.serving.responses import ChatAnswer, CompletionAnswer
from dflash_runtime.serving.state import ServerState
from dflash_runtime.serving.status import expert_map, status
from dflash_runtime.serving.status_page import page_routes

BODY_S = 30.0
"""For a body to arrive."""
_LARGE_BYTES = 64 << 10
_DRAINED_BYTES = 64 << 20
"""A body that is too large is received to its end if it is no larger: many clients do not read the
answer before they have sent all."""

T = TypeVar("T")


def create_app(state: ServerState) -> ASGIApp:
    """The whole server as an ASGI application."""
    app = FastAPI(
        title="dflash-moe",
        version=__version__,
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        routes=page_routes(),
    )

    @app.get("/health")
    async def health() -> Response:
        is_well = state.worker.is_well
        return JSONResponse({"status": "ok" if is_well else "failed"}, 200 if is_well else 503)

    @app.get("/ready")
    async def ready() -> Response:
        if state.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        if state.engine is None:
            return JSONResponse({"status": "loading", "stage": state.worker.stage}, 503)
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/props")
    async def props() -> Response:
        return JSONResponse(describe(state, state.ready_engine()))

    @app.get("/status")
    async def page_status() -> Response:
        return JSONResponse(status(state, state.ready_engine()))

    @app.get("/status/experts")
    async def page_experts() -> Response:
        return JSONResponse(expert_map(state.ready_engine()))

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model_record(state.ready_engine())]})

    @app.get("/v1/models/{name}")
    async def model(name: str) -> Response:
        record = _model_record(state.ready_engine())
        if record["id"] != name:
            raise ApiError(404, f"the model is called {record['id']}", code="model_not_found")
        return JSONResponse(record)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        engine, data = state.ready_engine(), await _receive(state, request)
        body = parse_body(TokenizeBody, data)
        tokenizer = _tokenizer(engine)

        def encode() -> list[int]:
            return tokenizer.encode(
                body.content, add_special=body.add_special, parse_special=body.parse_special
            )

        return JSONResponse({"tokens": await _aside(state, len(data), encode)})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        engine, data = state.ready_engine(), await _receive(state, request)
        body = parse_body(DetokenizeBody, data)
        tokenizer = _tokenizer(engine)
        for token_id in body.tokens:
            if token_id >= tokenizer.vocab_size:
                raise ApiError(400, f"tokens: {token_id} is no token", param="tokens")
        return JSONResponse(
            {"content": await _aside(state, len(data), lambda: tokenizer.decode(body.tokens))}
        )

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        engine, data = state.ready_engine(), await _receive(state, request)
        body = parse_body(CompletionBody, data)
        body.refuse_what_is_missing()
        prompt = body.one_prompt

        def encode() -> list[int]:
            return engine.encode_prompt(prompt) if isinstance(prompt, str) else prompt

        token_ids = await _aside(state, len(data), encode)
        answer = CompletionAnswer(
            model_id(engine),
            _tokenizer_bytes(engine),
            has_logprobs=body.logprobs is not None,
            stream_usage=body.wants_usage,
        )
        job = _job(request, engine, body, token_ids)
        return GenerationResponse(state, job, answer, is_stream=bool(body.stream))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        engine, data = state.ready_engine(), await _receive(state, request)
        body = parse_body(ChatBody, data)
        body.refuse_what_is_missing()
        messages = [message.for_template() for message in body.messages]

        def encode() -> list[int]:
            return engine.encode_chat(
                messages, template=state.chat_template, extra=body.chat_template_kwargs
            )

        async with state.chats:
            token_ids = await _aside(state, len(data), encode)
        answer = ChatAnswer(
            model_id(engine),
            _tokenizer_bytes(engine),
            has_logprobs=bool(body.logprobs),
            stream_usage=body.wants_usage,
        )
        job = _job(request, engine, body, token_ids)
        return GenerationResponse(state, job, answer, is_stream=bool(body.stream))

    @app.exception_handler(ApiError)
    async def refused(_request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(Exception)
    async def failed(_request: Request, error: Exception) -> Response:
        return api_error(error).response()

    @app.exception_handler(HTTPException)
    async def no_route(_request: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    paths = (getattr(route, "path", "") for route in app.routes)
    return Gate(app, state, frozenset(path for path in paths if "{" not in path))


def _model_record(engine: Engine) -> dict[str, Any]:
    created = int(engine.model_path.stat().st_mtime) if engine.model_path.exists() else 0
    return {
        "id": model_id(engine),
        "object": "model",
        "created": created,
        "owned_by": "dflash-moe",
        "meta": {"n_ctx": engine.num_positions, "n_vocab": engine.spec.vocab_size},
    }


def _job(
    request: Request, engine: Engine, body: CompletionBody | ChatBody, token_ids: list[int]
) -> Job:
    """Raises: ApiError if it cannot be done."""
    field = "prompt" if isinstance(body, CompletionBody) else "messages"
    try:
        token_id_array(
            token_ids,
            vocab_size=engine.spec.vocab_size,
            num_positions=engine.num_positions,
            model_positions=engine.spec.context_length,
        )
    except ContextExceeded as error:
        raise ApiError(400, str(error), param=field, code="context_length_exceeded") from error
    except SettingsError as error:
        raise ApiError(400, str(error), param=field) from error
    if not token_ids:
        raise ApiError(400, "the prompt is empty", param=field)
    try:
        sampling = body.sampling()
    except SettingsError as error:
        raise api_error(error) from error
    most = body.most_tokens or engine.num_positions
    return Job(
        client=request.scope[CLIENT],
        prompt=token_ids,
        max_tokens=min(most, engine.num_positions),
        sampling=sampling,
        channel=Channel(asyncio.get_running_loop()),
        stops=body.stops,
        top_logprobs=body.top_logprobs_wanted,
        ignore_eos=bool(body.ignore_eos),
    )


def _tokenizer(engine: Engine) -> Tokenizer:
    if engine.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")
    return engine.tokenizer


def _tokenizer_bytes(engine: Engine) -> Callable[[int], bytes]:
    tokenizer = engine.tokenizer
    return tokenizer.token_bytes if tokenizer is not None else lambda token_id: b""


async def _aside(state: ServerState, num_bytes: int, work: Callable[[], T]) -> T:
    """Do this in another thread; of large texts one at a time. Raises: ApiError."""
    try:
        if num_bytes <= _LARGE_BYTES:
            return await asyncio.to_thread(work)
        async with state.large_texts:
            return await asyncio.to_thread(work)
    except Exception as error:
        refusal = api_error(error)
        if refusal.status == 500:
            raise
        raise refusal from error


async def _receive(state: ServerState, request: Request) -> bytes:
    """The body. Raises: ApiError if it is too large, too late, or cut short."""
    limit = state.settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit, is_drained=int(declared) <= _DRAINED_BYTES)
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "the client went away")
                part = message.get("body", b"")
                parts.append(part)
                num_bytes += len(part)
                state.num_body_bytes += len(part)
                if num_bytes > limit:
                    raise _too_large(limit, is_drained=False)
                if state.num_body_bytes > state.max_body_bytes_at_once:
                    raise ApiError(
                        429,
                        "too much is being received at once; try again later",
                        kind="rate_limit_error",
                        code="bodies_full",
                        headers={"Retry-After": "1", "Connection": "close"},
                    )
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {BODY_S:.0f} s", headers={"Connection": "close"}
        ) from None
    finally:
        state.num_body_bytes -= num_bytes


def _too_large(limit: int, *, is_drained: bool) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {limit} bytes",
        code="body_too_large",
        headers={} if is_drained else {"Connection": "close"},
    )
