"""The response of a generation: streamed, or whole; cancelled if its client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dflash_protocol.process.output import readable_json
from dflash_runtime.engine.answer_text import Delta, joined_events
from dflash_runtime.serving.answers import Answer, events_of
from dflash_runtime.serving.errors import (
    HAS_LINE,
    ApiError,
    api_error,
    error_form,
    error_response,
)
from dflash_runtime.serving.fair_queue import QueueFull
from dflash_runtime.serving.state import ServerState
from dflash_runtime.serving.worker import Finished, Job, JobEvent

KEEP_ALIVE_S = 15.0
"""After this time without an event a stream sends something to keep the connection alive."""

_GATHER_S = 0.04
"""Tokens that come faster than this are sent together, as one chunk unless log-probabilities are
asked for: waking up for every token takes cores from computing the next."""

_LONGEST_TRACE = 512
"""Characters of a header; W3C asks for that many."""

_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class GenerationResponse(Response):
    """Submits a job and sends its events as an answer."""

    def __init__(self, state: ServerState, job: Job, answer: Answer, *, is_stream: bool) -> None:
        self._state = state
        self._job = job
        self._answer = answer
        self._is_stream = is_stream
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, job = self._state, self._job
        if (request_id := self._answer.request_id) is not None:
            job.record.request_id = request_id
        job.record.trace = _trace_of(Headers(scope=scope))
        try:
            state.ready_engine()
            scope[HAS_LINE] = True
            state.worker.submit(job)
        except (ApiError, QueueFull) as error:
            refusal = error if isinstance(error, ApiError) else _queue_full(state)
            await error_response(refusal, scope)(scope, receive, send)
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
            await error_response(failure, scope)(scope, receive, send)
            return
        assert isinstance(last, Finished)
        deltas = [each for each in texts if isinstance(each, Delta)]
        text = readable_json(self._answer.whole(deltas, last))
        await Response(text, media_type="application/json")(scope, receive, send)

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, wire = self._answer, self._answer.wire
        events = await self._next_events()
        # Before anything is sent, an error can have a status.
        if events and (failure := _failure(events[0])) is not None:
            await error_response(failure, scope)(scope, receive, send)
            return
        headers = [(b"content-type", wire.media_type.encode()), *_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        data = wire.bytes_of(answer.first_chunks(len(self._job.prompt)))
        sent_s = time.monotonic()
        while True:
            is_last = False
            for event in events if answer.has_logprobs else _joined(events):
                is_last = not isinstance(event, Delta)
                if (failure := _failure(event)) is not None:
                    data += wire.bytes_of(answer.error_chunks(failure, error_form(scope)))
                elif isinstance(event, Finished):
                    data += wire.bytes_of(answer.last_chunks(event)) + wire.end
                elif isinstance(event, Delta) and (event.events or answer.has_logprobs):
                    data += wire.bytes_of(answer.next_chunks(event))
            # Events may come that have no text yet, as of a call that is being written.
            if not data and (not events or time.monotonic() - sent_s > KEEP_ALIVE_S):
                data = wire.keep_alive
            if data or is_last:
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


def _trace_of(headers: Headers) -> dict[str, str]:
    """W3C's headers of the trace that a request is part of."""
    found = {name: headers.get(name, "") for name in ("traceparent", "tracestate")}
    return {name: value for name, value in found.items() if 0 < len(value) <= _LONGEST_TRACE}


def _joined(events: Sequence[JobEvent]) -> list[JobEvent]:
    """The same events, with neighbouring deltas joined."""
    joined: list[JobEvent] = []
    for is_delta, group in itertools.groupby(events, lambda event: isinstance(event, Delta)):
        if is_delta:
            deltas = [event for event in group if isinstance(event, Delta)]
            joined.append(Delta(tuple(joined_events(events_of(deltas)))))
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
