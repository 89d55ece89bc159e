"""The routes.

``requests`` checks the contents of bodies; ``bodies`` bounds their memory and that of their tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from dflash_adapters.text.grammar import Grammar, GrammarSource
from dflash_adapters.text.tokenizer import Tokenizer
from dflash_protocol import __version__
from dflash_protocol.errors import ContextExceeded, GrammarError, SettingsError
from dflash_runtime.engine.arguments import token_id_array
from dflash_runtime.engine.engine import Engine
from dflash_runtime.serving.access import CLIENT, KEY, RequestGate
from dflash_runtime.serving.answer_rules import AnswerRules
from dflash_runtime.serving.bodies import Body
from dflash_runtime.serving.constraints import constraint_of
from dflash_runtime.serving.errors import ApiError, JSONResponse, api_error
from dflash_runtime.serving.fair_queue import Turns
from dflash_runtime.serving.generation import GenerationResponse
from dflash_runtime.serving.requests import (
    FEW_VALUES,
    B,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from dflash_runtime.serving.responses import ChatAnswer, CompletionAnswer
from dflash_runtime.serving.state import ServerState
from dflash_runtime.serving.status import chat_template, expert_map, model_id, props, status
from dflash_runtime.serving.status_page import page_routes
from dflash_runtime.serving.text import TextRules
from dflash_runtime.serving.tools import parameters_of
from dflash_runtime.serving.worker import Channel, Job, TokenOptions

T = TypeVar("T")


def create_app(state: ServerState) -> ASGIApp:
    """The whole server as an ASGI application."""
    app = FastAPI(
        title="dflash-moe",
        version=__version__,
        # Their pages load scripts from other sites.
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
    async def properties() -> Response:
        return JSONResponse(props(state, state.ready_engine()))

    @app.get("/status")
    async def page_status() -> Response:
        return JSONResponse(status(state, state.ready_engine()))

    @app.get("/status/experts")
    async def page_experts() -> Response:
        engine = state.ready_engine()
        return JSONResponse(expert_map(engine, state.worker.stats.selections))

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
        engine = state.ready_engine()
        tokenizer = _tokenizer(engine)
        with _body(state, request) as received:
            body = await _parsed(TokenizeBody, received, engine)
            ids = tokenizer.encoded(
                body.content, add_special=body.add_special, parse_special=body.parse_special
            )
            # JSON is made in the thread too: it takes long, and needs less memory than the ids.
            parts = await _in_turns(received, (",".join(map(str, part)) for part in ids), "content")
        return _json('{"tokens":[', ",".join(filter(None, parts)), "]}")

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        engine = state.ready_engine()
        tokenizer = _tokenizer(engine)
        with _body(state, request) as received:
            body = await _parsed(DetokenizeBody, received, engine)
            if (largest := max(body.tokens, default=0)) >= tokenizer.vocab_size:
                raise ApiError(400, f"tokens: {largest} is no token", param="tokens")
            texts = tokenizer.decoded(body.tokens)
            escaped = (json.dumps(part)[1:-1] for part in texts)
            parts = await _in_turns(received, escaped, "tokens")
        return _json('{"content":"', "".join(parts), '"}')

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        engine = state.ready_engine()
        with _body(state, request) as received:
            body = await _parsed(CompletionBody, received, engine)
            prompt = body.one_prompt
            if isinstance(prompt, str):
                prompt = await _prompt(engine, received, prompt, "prompt")
            grammar = await _grammar(
                engine, received, constraint_of(body), turns=state.bodies.compiling
            )
        return _generation(state, request, engine, body=body, token_ids=prompt, grammar=grammar)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        engine = state.ready_engine()
        with _body(state, request) as received:
            body = await _parsed(ChatBody, received, engine)
            messages = [message.for_template() for message in body.messages]
            tools = body.offered_tools()
            template = chat_template(state, engine) or ""
            variables = {
                **body.template_variables(template, tools),
                **(body.chat_template_kwargs or {}),
            }

            def text() -> Iterator[str]:
                yield engine.chat_text(messages, template=state.chat_template, extra=variables)

            [rendered] = await _in_turns(received, text(), "messages", turns=state.bodies.rendering)
            prompt = await _prompt(engine, received, rendered, "messages", is_chat=True)
            rules = AnswerRules.of(
                engine, template=template, tools=parameters_of(tools), rendered=rendered
            )
            constraint = constraint_of(body)
            if (calls := body.call_rules(tools)) is not None:
                if constraint is not None:
                    raise ApiError(
                        400,
                        f"{calls.field}: an answer follows that or {constraint[0]}, not both",
                        param=calls.field,
                    )
                constraint = calls.field, rules.call_source(engine, calls)
            grammar = await _grammar(engine, received, constraint, turns=state.bodies.compiling)
            grammar = rules.after_reasoning(engine, grammar, has_channels=calls is not None)
        divided = None if body.reasoning_format == "none" else rules
        return _generation(
            state, request, engine, body=body, token_ids=prompt, grammar=grammar, rules=divided
        )

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
    endpoints = frozenset(path for path in paths if "{" not in path)
    return RequestGate(app, keys=state.keys, metrics=state.metrics, endpoints=endpoints)


def _model_record(engine: Engine) -> dict[str, Any]:
    created = int(engine.model_path.stat().st_mtime) if engine.model_path.exists() else 0
    return {
        "id": model_id(engine),
        "object": "model",
        "created": created,
        "owned_by": "dflash-moe",
        "meta": {"n_ctx": engine.num_positions, "n_vocab": engine.spec.vocab_size},
    }


def _generation(
    state: ServerState,
    request: Request,
    engine: Engine,
    *,
    body: CompletionBody | ChatBody,
    token_ids: list[int],
    grammar: Grammar | None,
    rules: AnswerRules | None = None,
) -> GenerationResponse:
    """The answer to a checked body, whose prompt is these tokens; `rules` divide that of a chat.

    Raises: ApiError.
    """
    is_chat = isinstance(body, ChatBody)
    field = "messages" if is_chat else "prompt"
    try:
        token_id_array(
            token_ids,
            vocab_size=engine.spec.vocab_size,
            num_positions=engine.num_positions,
            model_positions=engine.spec.context_length,
        )
    except ContextExceeded as error:
        raise _too_long(field, str(error.num_tokens), error.num_positions) from error
    except SettingsError as error:
        raise ApiError(400, str(error), param=field) from error
    if not token_ids:
        raise ApiError(400, "the prompt is empty", param=field)
    try:
        options = TokenOptions(
            sampling=body.sampling(),
            penalties=body.penalties(),
            grammar=grammar,
            ignore_eos=bool(body.ignore_eos),
            stop_ids=tuple(body.stop_token_ids or ()),
            top_logprobs=body.top_logprobs_wanted,
        )
    except SettingsError as error:
        raise api_error(error) from error
    job = Job(
        client=request.scope[CLIENT],
        prompt=token_ids,
        max_tokens=min(body.most_tokens or engine.num_positions, engine.num_positions),
        options=options,
        channel=Channel(asyncio.get_running_loop()),
        text=TextRules(body.stops, is_chat, None if rules is None else rules.shown),
        key=request.scope[KEY],
    )
    tokenizer = engine.tokenizer
    answer = (ChatAnswer if is_chat else CompletionAnswer)(
        model_id(engine),
        tokenizer.token_bytes if tokenizer is not None else lambda token_id: b"",
        has_logprobs=options.top_logprobs is not None,
        stream_usage=body.wants_usage,
    )
    if isinstance(answer, ChatAnswer) and isinstance(body, ChatBody):
        answer.parser = None if rules is None else rules.parser()
        answer.has_reasoning = body.include_reasoning is not False
    return GenerationResponse(state, job, answer, is_stream=bool(body.stream))


def _tokenizer(engine: Engine) -> Tokenizer:
    if engine.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")
    return engine.tokenizer


def _body(state: ServerState, request: Request) -> AbstractContextManager[Body]:
    return state.bodies.body_of(request, request.scope[CLIENT])


async def _parsed(kind: type[B], received: Body, engine: Engine) -> B:
    """Raises: ApiError. A prompt of token ids has as many values as the context may hold."""
    most_values = FEW_VALUES + engine.num_positions
    return parse_body(kind, await received.receive(), most_values=most_values)


async def _prompt(
    engine: Engine, received: Body, text: str, field: str, *, is_chat: bool = False
) -> list[int]:
    """The tokens of a text. Raises: ApiError."""

    def parts() -> Iterator[list[int]]:
        num_tokens = 0
        for part in engine.prompt_parts(text, is_chat=is_chat):
            num_tokens += len(part)
            if num_tokens > engine.num_positions:
                raise ContextExceeded(num_tokens, engine.num_positions)
            yield part

    return list(chain.from_iterable(await _in_turns(received, parts(), field)))


async def _grammar(
    engine: Engine, received: Body, constraint: tuple[str, GrammarSource] | None, *, turns: Turns
) -> Grammar | None:
    """What the answer is to follow, compiled in a thread by `turns`. Raises: ApiError."""
    if constraint is None:
        return None
    field, source = constraint

    def compiled() -> Iterator[Grammar]:
        yield engine.grammars.compile(source)

    try:
        [grammar] = await received.made(compiled(), turns=turns)
    except GrammarError as error:
        raise ApiError(400, f"{field}: {error}", param=field, code="unsupported_value") from error
    return grammar


async def _in_turns(
    received: Body, parts: Iterator[T], field: str, *, turns: Turns | None = None
) -> list[T]:
    """The `parts` made from a body's `field`, in threads. Raises: ApiError."""
    try:
        return await received.made(parts, turns=turns)
    except ContextExceeded as error:
        raise _too_long(field, f"at least {error.num_tokens}", error.num_positions) from error
    except Exception as error:
        refusal = api_error(error)
        if refusal.status == 500:
            raise
        raise refusal from error


def _too_long(field: str, num_tokens: str, num_positions: int) -> ApiError:
    return ApiError(
        400,
        f"a prompt of {num_tokens} tokens does not fit the context of {num_positions} positions; "
        "shorten it",
        param=field,
        code="context_length_exceeded",
    )


def _json(*parts: str) -> Response:
    return Response("".join(parts), media_type="application/json")
