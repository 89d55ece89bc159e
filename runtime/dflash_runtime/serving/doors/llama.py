"""llama-server's own endpoints, beside those that it shares with OpenAI."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from dflash_runtime.engine.engine import Engine
from dflash_runtime.serving.core import Visit, visit
from dflash_runtime.serving.doors.door import Door
from dflash_runtime.serving.doors.llama_answers import LlamaAnswer
from dflash_runtime.serving.errors import ApiError, JSONResponse, unavailable
from dflash_runtime.serving.llama_fields import LlamaCompletionBody
from dflash_runtime.serving.requests import ChatBody
from dflash_runtime.serving.state import ServerState
from dflash_runtime.serving.status import model_id


def _add_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/completion")
    @app.post("/completions")
    async def completion(request: Request) -> Response:
        with visit(state, request) as asked:
            body = await asked.body(LlamaCompletionBody)
            prompt = body.one_prompt
            if not isinstance(prompt, str):
                prompt = await _text_of(prompt, asked)
            answer = LlamaAnswer(
                model=model_id(asked.engine),
                body=body,
                prompt=prompt,
                num_positions=asked.engine.num_positions,
                token_bytes=asked.token_bytes,
            )
            return await asked.completion(body, answer)

    @app.post("/apply-template")
    async def apply_template(request: Request) -> Response:
        with visit(state, request) as asked:
            rendered = await asked.rendered(await asked.body(ChatBody))
            return JSONResponse({"prompt": rendered.text})

    @app.get("/slots")
    async def slots(request: Request) -> Response:
        found = _slot(state, state.ready_engine())
        if found["is_processing"] and request.query_params.get("fail_on_no_slot"):
            raise unavailable(
                "no slot is free", "no_slot", retry_after_s=state.worker.retry_after_s()
            )
        return JSONResponse([found])


LLAMA = Door(_add_routes)


async def _text_of(token_ids: list[int], asked: Visit) -> str:
    """Raises: ApiError."""
    tokenizer = asked.engine.tokenizer
    if tokenizer is None:
        return ""
    if (largest := max(token_ids, default=0)) >= tokenizer.vocab_size:
        raise ApiError(400, f"prompt: {largest} is no token", param="prompt")
    return "".join(await asked.made(tokenizer.decoded(token_ids), "prompt"))


def _slot(state: ServerState, engine: Engine) -> dict[str, Any]:
    """The one sequence that is computed at a time. Nothing of its text: that is its client's."""
    job, reading = state.worker.running, state.worker.reading
    return {
        "id": 0,
        "n_ctx": engine.num_positions,
        "speculative": False,
        "is_processing": job is not None,
        "n_prompt_tokens": 0 if job is None else len(job.prompt),
        "n_prompt_tokens_processed": 0 if reading is None else reading[0],
        "next_token": [{"has_next_token": job is not None}],
    }
