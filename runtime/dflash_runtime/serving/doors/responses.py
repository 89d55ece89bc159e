"""OpenAI's responses, which are kept for an hour unless the client says no."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from dflash_protocol.process.output import ascii_json
from dflash_runtime.serving.access import KEY
from dflash_runtime.serving.core import Visit, visit
from dflash_runtime.serving.doors.door import Door
from dflash_runtime.serving.doors.responses_answers import ResponsesAnswer
from dflash_runtime.serving.doors.responses_bodies import NAMES, ResponsesBody
from dflash_runtime.serving.doors.responses_items import ITEMS
from dflash_runtime.serving.doors.responses_pages import page_of, read_items
from dflash_runtime.serving.doors.responses_store import ResponseStore, StoredResponse
from dflash_runtime.serving.errors import ApiError, JSONResponse
from dflash_runtime.serving.json_values import has_more_values
from dflash_runtime.serving.requests import MOST_MESSAGES
from dflash_runtime.serving.state import ServerState
from dflash_runtime.serving.status import model_id

_PATH = "/v1/responses"
_BODIES_KEPT = 8
"""Kept responses hold at most as many bytes as this number of the largest bodies."""


def _add_routes(app: FastAPI, state: ServerState) -> None:
    store = ResponseStore(_BODIES_KEPT * state.settings.max_body_bytes)

    @app.post(_PATH)
    async def create(request: Request) -> Response:
        with visit(state, request, names=NAMES) as asked:
            body = await asked.body(ResponsesBody)
            before = _before(asked, store, body)
            own = ITEMS.dump_json(body.input, exclude_none=True)

            def keep(response: dict[str, Any]) -> None:
                # From more items no conversation could go on.
                if body.store is False or len(response["output"]) > MOST_MESSAGES:
                    return
                output = ITEMS.validate_python(response["output"])
                items = (*before, own, ITEMS.dump_json(output, exclude_none=True))
                text = ascii_json(response).encode()
                store.put(response["id"], StoredResponse(asked.key, items, text))

            answer = ResponsesAnswer(
                model_id(asked.engine),
                echo=body.echo(),
                keep=keep,
                token_bytes=asked.token_bytes if body.has_logprobs else None,
            )
            items = [item for part in before for item in ITEMS.validate_json(part)]
            return await asked.chat(body.chat(items), answer)

    def kept(request: Request, name: str) -> StoredResponse:
        found = store.get(name, key=request.scope[KEY])
        if found is None:
            raise ApiError(404, "there is no response with this id", code="response_not_found")
        return found

    @app.get(f"{_PATH}/{{name}}")
    async def retrieve(request: Request, name: str) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise ApiError(400, "stream: a kept response is not streamed", param="stream")
        return Response(kept(request, name).response, media_type="application/json")

    @app.get(f"{_PATH}/{{name}}/input_items")
    async def input_items(request: Request, name: str) -> Response:
        page = page_of(request.query_params)
        return JSONResponse(page.of(read_items(kept(request, name).items[:-1], name)))

    @app.delete(f"{_PATH}/{{name}}")
    async def delete(request: Request, name: str) -> Response:
        kept(request, name)
        store.remove(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})


def _before(asked: Visit, store: ResponseStore, body: ResponsesBody) -> tuple[bytes, ...]:
    """JSON lists of the items of the conversation that a body goes on with. Raises: ApiError."""
    field = "previous_response_id"
    name = body.previous_response_id
    if name is None:
        return ()
    stored = store.get(name, key=asked.key)
    if stored is None:
        raise ApiError(
            400,
            f"{field}: there is no response with this id; they are kept for an hour",
            param=field,
            code="previous_response_not_found",
        )
    is_large = stored.items_bytes > asked.state.settings.max_body_bytes
    # Each of its bodies had few values; parsing those of all would keep other clients waiting.
    if is_large or has_more_values(b",".join(stored.items), asked.most_values):
        raise ApiError(413, f"{field}: the conversation is too large", param=field)
    return stored.items


RESPONSES = Door(_add_routes)
