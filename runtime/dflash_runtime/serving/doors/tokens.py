"""Text to tokens and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from fastapi import FastAPI, Request, Response

from dflash_adapters.text.tokenizer import Tokenizer
from dflash_runtime.serving.core import visit
from dflash_runtime.serving.doors.door import Door
from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.requests import DetokenizeBody, TokenizeBody
from dflash_runtime.serving.state import ServerState


def _add_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        with visit(state, request) as asked:
            tokenizer = asked.tokenizer
            body = await asked.body(TokenizeBody)
            ids = tokenizer.encoded(
                body.content, add_special=body.add_special, parse_special=body.parse_special
            )
            shown: Callable[[int], str] = (
                partial(_with_piece, tokenizer) if body.with_pieces else str
            )
            # JSON is made in the thread too: it takes long, and needs less memory than the ids.
            parts = await asked.made((",".join(map(shown, part)) for part in ids), "content")
        return _json('{"tokens":[', ",".join(filter(None, parts)), "]}")

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        with visit(state, request) as asked:
            tokenizer = asked.tokenizer
            body = await asked.body(DetokenizeBody)
            if (largest := max(body.tokens, default=0)) >= tokenizer.vocab_size:
                raise ApiError(400, f"tokens: {largest} is no token", param="tokens")
            texts = tokenizer.decoded(body.tokens)
            parts = await asked.made((json.dumps(part)[1:-1] for part in texts), "tokens")
        return _json('{"content":"', "".join(parts), '"}')


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
