"""Answers as Anthropic's messages: whole, and as streams of content blocks."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dflash_adapters.text.answers import AnswerEvent, Content, Reasoning, ToolCall
from dflash_runtime.engine.answer_text import Delta, joined_events
from dflash_runtime.engine.engine import GenerationStats
from dflash_runtime.serving.answers import Answer, events_of
from dflash_runtime.serving.wire import NAMED_EVENTS, Chunk
from dflash_runtime.serving.worker import Finished

_PING: Chunk = {"type": "ping"}


class MessagesAnswer(Answer):
    """``/v1/messages``. A block is open from its first text until another kind of event comes."""

    wire = replace(NAMED_EVENTS, keep_alive=NAMED_EVENTS.encoded(_PING))

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = f"msg_{secrets.token_hex(12)}"
        self._num_blocks = 0
        """Blocks that are closed."""
        self._open: type[Content | Reasoning] | None = None
        self._has_calls = False

    @property
    def request_id(self) -> str:
        return self._id

    def first_chunks(self, num_prompt_tokens: int) -> list[Chunk]:
        """The message without content; how much of the prompt was cached is said at the end."""
        started = self._message([], GenerationStats(num_prompt_tokens=num_prompt_tokens))
        return [{"type": "message_start", "message": started}, _PING]

    def next_chunks(self, delta: Delta) -> list[Chunk]:
        """Beginnings, parts and ends of blocks."""
        chunks: list[Chunk] = []
        for event in delta.events:
            if not isinstance(event, self._open or ToolCall):
                chunks += self._closed()
            match event:
                case Content():
                    if self._open is None:
                        self._open = Content
                        chunks.append(self._start({"type": "text", "text": ""}))
                    chunks.append(self._delta({"type": "text_delta", "text": event.text}))
                case Reasoning():
                    if self._open is None:
                        self._open = Reasoning
                        chunks.append(
                            self._start({"type": "thinking", "thinking": "", "signature": ""})
                        )
                    chunks.append(self._delta({"type": "thinking_delta", "thinking": event.text}))
                case ToolCall():
                    chunks += [
                        self._start({**self._block(event), "input": {}}),
                        self._delta({"type": "input_json_delta", "partial_json": event.arguments}),
                        self._stop(),
                    ]
        return chunks

    def last_chunks(self, finished: Finished) -> list[Chunk]:
        """The end of the last block, then why it ended, and the counts."""
        chunks = self._closed()
        delta = {"type": "message_delta", "delta": self._why(finished)}
        return [*chunks, {**delta, "usage": _usage(finished.stats)}, {"type": "message_stop"}]

    def whole(self, deltas: Sequence[Delta], finished: Finished) -> dict[str, Any]:
        """The message."""
        content = [self._block(event) for event in joined_events(events_of(deltas))]
        return {**self._message(content, finished.stats), **self._why(finished)}

    def _message(self, content: list[dict[str, Any]], stats: GenerationStats) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(stats),
        }

    def _block(self, event: AnswerEvent) -> dict[str, Any]:
        match event:
            case Content():
                return {"type": "text", "text": event.text}
            case Reasoning():
                return {"type": "thinking", "thinking": event.text, "signature": ""}
        self._has_calls = True
        return {
            "type": "tool_use",
            "id": event.call_id or f"toolu_{secrets.token_hex(12)}",
            "name": event.name,
            "input": json.loads(event.arguments),
        }

    def _why(self, finished: Finished) -> dict[str, Any]:
        """Why the message ended; a stop string has come before a call was complete, or after."""
        reason = "max_tokens"
        if finished.finish_reason == "stop":
            reason = "end_turn" if finished.stop is None else "stop_sequence"
            reason = "tool_use" if self._has_calls else reason
        stop = finished.stop if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stop}

    def _start(self, block: dict[str, Any]) -> Chunk:
        return {
            "type": "content_block_start",
            "index": self._num_blocks,
            "content_block": block,
        }

    def _delta(self, delta: dict[str, Any]) -> Chunk:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _stop(self) -> Chunk:
        self._num_blocks += 1
        return {"type": "content_block_stop", "index": self._num_blocks - 1}

    def _closed(self) -> list[Chunk]:
        """The chunks that close the open block."""
        kind, self._open = self._open, None
        if kind is None:
            return []
        if kind is Reasoning:
            return [self._delta({"type": "signature_delta", "signature": ""}), self._stop()]
        return [self._stop()]


def _usage(stats: GenerationStats) -> dict[str, int]:
    return {
        "input_tokens": stats.num_prompt_tokens - stats.num_reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.num_reused_tokens,
        "output_tokens": stats.num_generated_tokens,
    }
