"""The response of a generation: streamed, or whole; cancelled if its client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from dflash_runtime.serving.errors import ApiError, api_error
from dflash_runtime.serving.fair_queue import QueueFull
from dflash_runtime.serving.responses import Answer
from dflash_runtime.serving.state import ServerState
from dflash_runtime.serving.text import Delta
from dflash_runtime.serving.worker import Finished, Job, JobEvent

KEEP_ALIVE_S = 15.0
"""After this time without an event a stream sends a comment to keep the connection alive."""

_GATHER_S = 0.04
"""Tokens that come faster than this are sent together, as one chunk unless log-probabilities are
asked for: waking up for every token takes cores from computing the next."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """Submits a job and sends its events."""

    def __init__(
        self,
        state: ServerState,
        job: Job,
        answer: Answer,
        *,
        is_stream: bool,
    ) -> None:
        self._state = state
        self._job = job
        self._answer = answer
        self._is_stream = is_stream
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, job = self._state, self._job
        try:
            state.ready_engine()
            state.worker.submit(job)
        except (ApiError, QueueFull) as error:
            refusal = error if isinstance(error, ApiError) else _queue_full(state)
            await refusal.response()(scope, receive, send)
            return
        state.begin()
        watcher = asyncio.create_task(self._cancel_on_disconnect(receive))
        try:
            if self._is_stream:
                await self._send_stream(scope, receive, send)
            else:
                await self._send_whole(scope, receive, send)
        finally:
            state.worker.cancel(job)  # does nothing if it has ended
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
            state.end()

    async def _cancel_on_disconnect(self, receive: Receive) -> None:
        """Cancel the job once its client has disconnected."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._state.worker.cancel(self._job)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._job.channel.ended()
        *texts, last = await self._job.channel.take()
        if (failure := _failure(last)) is not None:
            await failure.response()(scope, receive, send)
            return
        assert isinstance(last, Finished)
        deltas = [each for each in texts if isinstance(each, Delta)]
        body = self._answer.whole(deltas, last.finish_reason, last.stats)
        await JSONResponse(body)(scope, receive, send)

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = await self._next_events()
        # Before anything is sent, an error can have a status.
        if events and (failure := _failure(events[0])) is not None:
            await failure.response()(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        data, sent_s = _events(self._answer.first_chunks()), time.monotonic()
        while True:
            is_last = False
            for event in events if self._answer.has_logprobs else _joined(events):
                is_last = not isinstance(event, Delta)
                if (failure := _failure(event)) is not None:
                    data += _events([failure.body])
                elif isinstance(event, Finished):
                    last = self._answer.last_chunks(event.finish_reason, event.stats)
                    data += _events(last) + b"data: [DONE]\n\n"
                elif isinstance(event, Delta) and (event.text or self._answer.has_logprobs):
                    data += _events(self._answer.chunks(event))
            # Events may come that have no text yet, as of a call that is being written.
            if not data and (not events or time.monotonic() - sent_s > KEEP_ALIVE_S):
                data = b": still here\n\n"
            if data:
                sent_s = time.monotonic()
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            if is_last:
                return
            await self._job.channel.pause(_GATHER_S)
            events, data = await self._next_events(), b""

    async def _next_events(self) -> list[JobEvent]:
        """The next events; none after `KEEP_ALIVE_S`."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                return await self._job.channel.take()
        except TimeoutError:
            return []


def _joined(events: Sequence[JobEvent]) -> list[JobEvent]:
    """The same events, with the texts of neighbouring deltas joined."""
    joined: list[JobEvent] = []
    for is_text, group in itertools.groupby(events, lambda event: isinstance(event, Delta)):
        if is_text:
            text = "".join(event.text for event in group if isinstance(event, Delta))
            joined.append(Delta(text, (), ()))
        else:
            joined.extend(group)
    return joined


def _queue_full(state: ServerState) -> ApiError:
    return ApiError(
        429,
        "too many requests are waiting; try again later",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(state.worker.retry_after_s())},
    )


def _failure(event: JobEvent) -> ApiError | None:
    """The error that a job's event is; None if it is none."""
    match event:
        case Finished(finish_reason="cancelled"):  # its client is still there: the server is ending
            return ApiError(
                503, "the server is shutting down", kind="server_error", code="shutting_down"
            )
        case BaseException():
            return api_error(event)
    return None


def _events(chunks: Sequence[dict[str, Any]]) -> bytes:
    """Server-sent events. Raises: ValueError for NaN or infinity, which JSON lacks."""
    return b"".join(
        b"data: "
        + json.dumps(chunk, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        + b"\n\n"
        for chunk in chunks
    )
