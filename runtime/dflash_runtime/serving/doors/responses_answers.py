"""Answers as OpenAI's responses: whole, and as streams of events of their items."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from dflash_adapters.text.answers import AnswerEvent, Content, Reasoning, ToolCall
from dflash_runtime.engine.answer_text import Delta, joined_events
from dflash_runtime.engine.engine import GenerationStats
from dflash_runtime.serving.answers import Answer, events_of
from dflash_runtime.serving.doors.openai_answers import logprobs_of
from dflash_runtime.serving.errors import ApiError, ErrorForm
from dflash_runtime.serving.wire import NAMED_EVENTS, Chunk
from dflash_runtime.serving.worker import Finished

_PARTS: dict[type[AnswerEvent], tuple[str, str]] = {
    Content: ("output_text", "response.output_text"),
    Reasoning: ("reasoning_text", "response.reasoning_text"),
}
"""Of kinds of text: the type of a part, and what the types of its events begin with."""


class ResponsesAnswer(Answer):
    """``/v1/responses``. `echo` are the fields of the request that it repeats, and `keep` is called
    with the response once it is complete. With `token_bytes`, which gives the bytes of a token id,
    texts have log-probabilities."""

    wire = NAMED_EVENTS

    def __init__(
        self,
        model: str,
        *,
        echo: dict[str, Any],
        keep: Callable[[dict[str, Any]], None],
        token_bytes: Callable[[int], bytes] | None = None,
    ) -> None:
        self.id = f"resp_{secrets.token_hex(24)}"
        self._model = model
        self._echo = echo
        self._keep = keep
        self._created_s = int(time.time())
        self._output: list[dict[str, Any]] = []
        """Items that are complete."""
        self._open: tuple[Content | Reasoning, str] | None = None
        """The text of the item that is being written, and the item's id."""
        self._num_events = 0
        self._token_bytes, self.has_logprobs = token_bytes, token_bytes is not None
        self._logprobs: list[dict[str, Any]] = []
        """Of the text that is being written."""
        self._waiting: list[dict[str, Any]] = []
        """Of tokens of which it is not certain yet what they are part of."""

    @property
    def request_id(self) -> str:
        return self.id

    def first_chunks(self, num_prompt_tokens: int) -> list[Chunk]:
        """The response without output."""
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def next_chunks(self, delta: Delta) -> list[Chunk]:
        """Beginnings, parts and ends of items."""
        chunks: list[Chunk] = []
        logprobs = self._certain_logprobs(delta)
        for event in delta.events:
            if self._open is not None and not isinstance(event, type(self._open[0])):
                chunks += self._closed("completed")
            match event:
                case ToolCall():
                    chunks += self._call_chunks(event)
                case Reasoning():
                    chunks += self._text_chunks(event, [])
                case Content():
                    chunks += self._text_chunks(event, logprobs)
                    logprobs = []
        return chunks

    def last_chunks(self, finished: Finished) -> list[Chunk]:
        """The end of the last item, then the whole response."""
        status = _status(finished)
        chunks = self._closed(status)
        response = self._ended(status, finished)
        return [*chunks, self._event(f"response.{status}", response=response)]

    def whole(self, deltas: Sequence[Delta], finished: Finished) -> dict[str, Any]:
        """The response."""
        if not self.has_logprobs:
            deltas = [Delta(tuple(joined_events(events_of(deltas))))]
        for delta in deltas:
            self.next_chunks(delta)
        status = _status(finished)
        self._closed(status)
        return self._ended(status, finished)

    def error_chunks(self, error: ApiError, form: ErrorForm) -> list[Chunk]:
        """The response as one that failed."""
        failure = {"code": error.code or "server_error", "message": error.message}
        response = {**self._response("failed"), "error": failure}
        return [self._event("response.failed", response=response)]

    def _ended(self, status: str, finished: Finished) -> dict[str, Any]:
        response = {**self._response(status), "usage": _usage(finished.stats)}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        self._keep(response)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [*self._output],
            "usage": None,
            **self._echo,
        }

    def _certain_logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        """Log-probabilities of the content of a delta; those of other tokens are not given."""
        if self._token_bytes is None:
            return []
        self._waiting += logprobs_of(delta, self._token_bytes)
        if not delta.events:
            return []
        found, self._waiting = self._waiting, []
        if not delta.text:
            return []
        if self._open is None or not isinstance(self._open[0], Content):
            # Before the text were markers, and space that is no part of it.
            num_more = sum(len(each["bytes"]) for each in found) - len(delta.text.encode())
            while num_more > 0 and len(found[0]["bytes"]) <= num_more:
                num_more -= len(found.pop(0)["bytes"])
        return found

    def _text_chunks(
        self, event: Content | Reasoning, logprobs: list[dict[str, Any]]
    ) -> list[Chunk]:
        chunks: list[Chunk] = []
        kind, prefix = _PARTS[type(event)]
        if self._open is None:
            item = _item(type(event)(""), "in_progress")
            part, item["content"] = item["content"][0], []
            self._open = type(event)(""), item["id"]
            chunks = [
                self._event("response.output_item.added", item=item),
                self._event("response.content_part.added", item_id=item["id"], part=part),
            ]
        before, item_id = self._open
        self._open = type(event)(before.text + event.text), item_id
        delta = self._event(f"{prefix}.delta", item_id=item_id, delta=event.text)
        self._logprobs += logprobs
        return [*chunks, _with_logprobs(delta, kind, logprobs)]

    def _closed(self, status: str) -> list[Chunk]:
        """The chunks that complete the item that is being written."""
        if self._open is None:
            return []
        (event, item_id), self._open = self._open, None
        kind, prefix = _PARTS[type(event)]
        logprobs = [*self._logprobs, *self._waiting] if isinstance(event, Content) else []
        self._logprobs, self._waiting = [], []
        item = {**_item(event, status, logprobs), "id": item_id}
        done = self._event(f"{prefix}.done", item_id=item_id, text=event.text)
        part = item["content"][0]
        chunks = [
            _with_logprobs(done, kind, logprobs),
            self._event("response.content_part.done", item_id=item_id, part=part),
            self._event("response.output_item.done", item=item),
        ]
        self._output.append(item)
        return chunks

    def _call_chunks(self, event: ToolCall) -> list[Chunk]:
        item = _item(event, "completed")
        started = {**item, "arguments": "", "status": "in_progress"}
        prefix, item_id = "response.function_call_arguments", item["id"]
        chunks = [
            self._event("response.output_item.added", item=started),
            self._event(f"{prefix}.delta", item_id=item_id, delta=event.arguments),
            self._event(
                f"{prefix}.done", item_id=item_id, name=event.name, arguments=event.arguments
            ),
            self._event("response.output_item.done", item=item),
        ]
        self._output.append(item)
        return chunks

    def _event(self, kind: str, **fields: Any) -> Chunk:
        """An event; those of parts and items have their places."""
        event: Chunk = {"type": kind, "sequence_number": self._num_events}
        self._num_events += 1
        if "response" not in fields:
            event["output_index"] = len(self._output)
        if "text" in kind.split(".")[1] or "content_part" in kind:
            event["content_index"] = 0
        return {**event, **fields}


def _status(finished: Finished) -> str:
    return "completed" if finished.finish_reason == "stop" else "incomplete"


def _with_logprobs(event: Chunk, kind: str, logprobs: list[dict[str, Any]]) -> Chunk:
    """Events of text have a list of log-probabilities; it may be empty."""
    return {**event, "logprobs": logprobs} if kind == "output_text" else event


def _item(
    event: AnswerEvent, status: str, logprobs: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    match event:
        case Content():
            text: dict[str, Any] = {"type": "output_text", "text": event.text, "annotations": []}
            part = {**text, "logprobs": [*logprobs]}
            item = {"type": "message", "role": "assistant", "content": [part]}
            return {"id": f"msg_{secrets.token_hex(24)}", "status": status, **item}
        case Reasoning():
            part = {"type": "reasoning_text", "text": event.text}
            item = {"type": "reasoning", "summary": [], "content": [part]}
            return {"id": f"rs_{secrets.token_hex(24)}", "status": status, **item}
    return {
        "id": f"fc_{secrets.token_hex(24)}",
        "type": "function_call",
        "call_id": event.call_id or f"call_{secrets.token_hex(12)}",
        "name": event.name,
        "arguments": event.arguments,
        "status": status,
    }


def _usage(stats: GenerationStats) -> dict[str, Any]:
    """Token counts. Those of reasoning are not counted apart."""
    return {
        "input_tokens": stats.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.num_reused_tokens},
        "output_tokens": stats.num_generated_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": stats.num_prompt_tokens + stats.num_generated_tokens,
    }
