"""Answers as OpenAI's JSON objects: chunks of a stream, and whole ones."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dflash_adapters.text.answers import AnswerEvent, Content, Reasoning, ToolCall
from dflash_runtime.engine.answer_text import Delta
from dflash_runtime.engine.engine import GenerationStats
from dflash_runtime.serving.answers import Answer, events_of
from dflash_runtime.serving.wire import EVENTS_UNTIL_DONE, Chunk
from dflash_runtime.serving.worker import Finished

_LEAST_LOGPROB = -9999.0
"""OpenAI's value for impossible tokens: JSON has no infinity."""


@dataclass(kw_only=True)
class OpenAIAnswer(Answer):
    """One answer. `token_bytes` gives the bytes of a token id."""

    model: str
    token_bytes: Callable[[int], bytes]
    has_logprobs: bool
    stream_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(init=False)

    wire = EVENTS_UNTIL_DONE
    prefix: ClassVar[str]
    """What `id` begins with."""
    whole_kind: ClassVar[str]
    """The ``object`` of a whole answer."""
    chunk_kind: ClassVar[str]
    """The ``object`` of a chunk."""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"

    @property
    def request_id(self) -> str:
        return self.id

    def next_chunks(self, delta: Delta) -> list[Chunk]:
        """The chunks of text that became final; with log-probabilities at least one."""
        parts, logprobs = self._parts(delta.events), self._logprobs([delta])
        if not parts and logprobs is not None:
            parts = [self._part("")]
        chunks = [self._chunk(part, None, None) for part in parts]
        if chunks:
            chunks[0]["choices"][0]["logprobs"] = logprobs
        return chunks

    def last_chunks(self, finished: Finished) -> list[Chunk]:
        """The chunks after the last token."""
        last = self._chunk(self._part(None), None, self._finish_reason(finished.finish_reason))
        last["timings"] = timings(finished.stats)
        usage_chunk = {**self._envelope(self.chunk_kind, []), "usage": usage(finished.stats)}
        return [last, usage_chunk] if self.stream_usage else [last]

    def whole(self, deltas: Sequence[Delta], finished: Finished) -> dict[str, Any]:
        """The answer as one object."""
        choice = {
            "index": 0,
            **self._whole(events_of(deltas)),
            "logprobs": self._logprobs(deltas),
            "finish_reason": self._finish_reason(finished.finish_reason),
        }
        envelope = self._envelope(self.whole_kind, [choice])
        stats = finished.stats
        return {**envelope, "usage": usage(stats), "timings": timings(stats)}

    def _finish_reason(self, reason: str) -> str:
        return reason

    @abstractmethod
    def _parts(self, events: Sequence[AnswerEvent]) -> list[dict[str, Any]]:
        """Events as the fields of choices of chunks."""

    @abstractmethod
    def _part(self, text: str | None) -> dict[str, Any]:
        """The text of a chunk as a choice's fields; None: the last chunk, which has no text."""

    @abstractmethod
    def _whole(self, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        """All events as a choice's fields."""

    @abstractmethod
    def _logprobs(self, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        """Log-probabilities of the tokens of deltas; None if they are not asked for."""

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _chunk(
        self, part: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": 0, **part, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = self._envelope(self.chunk_kind, [choice])
        if self.stream_usage:
            chunk["usage"] = None
        return chunk


@dataclass(kw_only=True)
class ChatAnswer(OpenAIAnswer):
    """``/v1/chat/completions``."""

    _num_calls: int = field(init=False, default=0)

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_chunks(self, num_prompt_tokens: int) -> list[Chunk]:
        """The assistant's role."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}}, None, None)]

    def _part(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def _parts(self, events: Sequence[AnswerEvent]) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for event in events:
            match event:
                case Content():
                    parts.append({"content": event.text})
                case Reasoning():
                    parts.append({"reasoning_content": event.text})
                case ToolCall():
                    place = {"index": self._num_calls}
                    parts.append({"tool_calls": [{**place, **self._call(event)}]})
        return [{"delta": part} for part in parts]

    def _call(self, call: ToolCall) -> dict[str, Any]:
        self._num_calls += 1
        return {
            "id": call.call_id or f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _whole(self, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        content = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls = [self._call(event) for event in events if isinstance(event, ToolCall)]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {"message": message}

    def _finish_reason(self, reason: str) -> str:
        return "tool_calls" if self._num_calls and reason == "stop" else reason

    def _logprobs(self, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None

        content = [entry for delta in deltas for entry in logprobs_of(delta, self.token_bytes)]
        return {"content": content, "refusal": None}


class CompletionAnswer(OpenAIAnswer):
    """``/v1/completions``."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _part(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def _parts(self, events: Sequence[AnswerEvent]) -> list[dict[str, Any]]:
        return [self._part(event.text) for event in events if isinstance(event, Content)]

    def _whole(self, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        return {"text": "".join(event.text for event in events if isinstance(event, Content))}

    def _logprobs(self, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets = [offset for delta in deltas for offset in delta.offsets]
        for token in (token for delta in deltas for token in delta.tokens):
            chosen = token_text(self.token_bytes(token.token_id))
            if token.logprobs is None:  # the first of a prompt that is repeated
                tokens.append(chosen)
                logprobs.append(None)
                tops.append(None)
                continue
            top = {token_text(self.token_bytes(i)): lp for i, lp in token.logprobs.top}
            if top:  # OpenAI always lists the chosen token, last if it is unlikely
                top.setdefault(chosen, token.logprobs.logprob)
            tokens.append(chosen)
            logprobs.append(max(token.logprobs.logprob, _LEAST_LOGPROB))
            tops.append({text: max(lp, _LEAST_LOGPROB) for text, lp in top.items()})
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops if any(tops) else None,
            "text_offset": offsets,
        }


def logprobs_of(delta: Delta, token_bytes: Callable[[int], bytes]) -> list[dict[str, Any]]:
    """The log-probabilities of tokens, as chats have them."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(token_id)
        logprob = max(logprob, _LEAST_LOGPROB)
        return {"token": token_text(data), "logprob": logprob, "bytes": list(data)}

    entries = []
    for token in delta.tokens:
        assert token.logprobs is not None
        top = [entry(*each) for each in token.logprobs.top]
        entries.append({**entry(token.token_id, token.logprobs.logprob), "top_logprobs": top})
    return entries


def token_text(data: bytes) -> str:
    """A token as text; incomplete UTF-8 as ``bytes:\\x..``, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def usage(stats: GenerationStats) -> dict[str, Any]:
    """Token counts, as OpenAI's ``usage``."""
    return {
        "prompt_tokens": stats.num_prompt_tokens,
        "completion_tokens": stats.num_generated_tokens,
        "total_tokens": stats.num_prompt_tokens + stats.num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.num_reused_tokens},
    }


def timings(stats: GenerationStats) -> dict[str, float]:
    """Times, as llama.cpp's server gives them."""
    return {
        "cache_n": stats.num_reused_tokens,
        "prompt_n": stats.num_prompt_tokens - stats.num_reused_tokens,
        "prompt_ms": stats.prefill_s * 1e3,
        "prompt_per_second": stats.prefill_tokens_per_s,
        "predicted_n": stats.num_generated_tokens,
        "predicted_ms": stats.decode_s * 1e3,
        "predicted_per_second": stats.decode_tokens_per_s,
    }
