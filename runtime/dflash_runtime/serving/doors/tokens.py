"""Text to tokens and back, as llama-server and vLLM have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from fastapi import FastAPI, Request, Response

from dflash_adapters.text.tokenizer import Tokenizer
from dflash_runtime.serving.core import tokenizer_of, visit
from dflash_runtime.serving.doors.door import Door
from dflash_runtime.serving.errors import ApiError, JSONResponse
from dflash_runtime.serving.requests import DetokenizeBody, TokenizeBody
from dflash_runtime.serving.state import ServerState
from dflash_runtime.serving.status import chat_template


def _add_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        engine = state.ready_engine()
        tokenizer = tokenizer_of(engine)
        return JSONResponse(
            {
                "bos_token": tokenizer.bos_text or None,
                "eos_token": tokenizer.eos_text or None,
                "chat_template": chat_template(state, engine),
            }
        )

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        with visit(state, request) as asked:
            tokenizer = asked.tokenizer
            body = await asked.body(TokenizeBody)
            ids = tokenizer.encoded(
                body.text, add_special=body.adds_special, parse_special=body.parse_special
            )
            shown: Callable[[int], str] = (
                partial(_with_piece, tokenizer) if body.with_pieces else str
            )
            # JSON is made in the thread too: it takes long, and needs less memory than the ids.
            made = ((len(part), ",".join(map(shown, part))) for part in ids)
            parts = await asked.made(made, "content" if body.prompt is None else "prompt")
        sizes = ""
        if body.prompt is not None:
            count = sum(num_ids for num_ids, _ in parts)
            sizes = f',"count":{count},"max_model_len":{asked.engine.num_positions}'
        return _json('{"tokens":[', ",".join(text for _, text in parts if text), f"]{sizes}}}")

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        with visit(state, request) as asked:
            tokenizer = asked.tokenizer
            body = await asked.body(DetokenizeBody)
            if (largest := max(body.tokens, default=0)) >= tokenizer.vocab_size:
                raise ApiError(400, f"tokens: {largest} is no token", param="tokens")
            texts = tokenizer.decoded(body.tokens)
            parts = await asked.made((json.dumps(part)[1:-1] for part in texts), "tokens")
        text = "".join(parts)
        return _json('{"content":"', text, '","prompt":"', text, '"}')


TOKENS = Door(_add_routes)


def _with_piece(tokenizer: Tokenizer, token_id: int) -> str:
    """A token with its text, or its bytes if they are no text."""
    data = tokenizer.token_bytes(token_id)
    try:
        piece: str | list[int] = data.decode()
    except UnicodeDecodeError:
        piece = list(data)
    return json.dumps({"id": token_id, "piece": piece}, separators=(",", ":"))


def _json(*parts: str) -> Response:
    return Response("".join(parts), media_type="application/json")
