"""Answers as OpenAI's JSON objects: chunks of a stream, and whole ones."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_runtime.engine.engine import GeneratedToken, GenerationStats
from dflash_runtime.serving.text import Delta

TokenBytes = Callable[[int], bytes]

_LEAST_LOGPROB = -9999.0
"""OpenAI's value for impossible tokens: JSON has no infinity."""


@dataclass(slots=True)
class _Answer:
    """One answer. `token_bytes` gives the bytes of a token id."""

    model: str
    token_bytes: TokenBytes
    has_logprobs: bool
    stream_usage: bool
    prefix: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = ""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _chunk(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._envelope(kind, [choice])
        if self.stream_usage:
            chunk["usage"] = None
        return chunk


class ChatAnswer(_Answer):
    """``/v1/chat/completions``."""

    def __init__(
        self, model: str, token_bytes: TokenBytes, *, has_logprobs: bool, stream_usage: bool
    ) -> None:
        super().__init__(model, token_bytes, has_logprobs, stream_usage, "chatcmpl")

    def first_chunks(self) -> list[dict[str, Any]]:
        """The chunks before the first token."""
        return [self._delta({"role": "assistant", "content": ""}, None, None)]

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._delta({"content": delta.text}, self._logprobs(delta.tokens), None)

    def last_chunks(self, finish_reason: str, stats: GenerationStats) -> list[dict[str, Any]]:
        """The chunks after the last token."""
        last = self._delta({}, None, finish_reason)
        last["timings"] = timings(stats)
        usage_chunk = {**self._envelope("chat.completion.chunk", []), "usage": usage(stats)}
        return [last, usage_chunk] if self.stream_usage else [last]

    def whole(
        self, deltas: list[Delta], finish_reason: str, stats: GenerationStats
    ) -> dict[str, Any]:
        tokens = [token for delta in deltas for token in delta.tokens]
        choice = {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "".join(delta.text for delta in deltas),
                "refusal": None,
            },
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish_reason,
        }
        envelope = self._envelope("chat.completion", [choice])
        return {**envelope, "usage": usage(stats), "timings": timings(stats)}

    def _delta(
        self,
        delta: dict[str, str],
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._chunk("chat.completion.chunk", choice)

    def _logprobs(self, tokens: Iterable[GeneratedToken]) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            data = self.token_bytes(token_id)
            logprob = max(logprob, _LEAST_LOGPROB)
            return {"token": token_text(data), "logprob": logprob, "bytes": list(data)}

        content = []
        for token in tokens:
            assert token.logprobs is not None
            top = [entry(*each) for each in token.logprobs.top]
            content.append({**entry(token.token_id, token.logprobs.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}


class CompletionAnswer(_Answer):
    """``/v1/completions``."""

    def __init__(
        self, model: str, token_bytes: TokenBytes, *, has_logprobs: bool, stream_usage: bool
    ) -> None:
        super().__init__(model, token_bytes, has_logprobs, stream_usage, "cmpl")

    def first_chunks(self) -> list[dict[str, Any]]:
        """The chunks before the first token."""
        return []

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._text(delta.text, self._logprobs([delta]), None)

    def last_chunks(self, finish_reason: str, stats: GenerationStats) -> list[dict[str, Any]]:
        """The chunks after the last token."""
        last = self._text("", None, finish_reason)
        last["timings"] = timings(stats)
        usage_chunk = {**self._envelope("text_completion", []), "usage": usage(stats)}
        return [last, usage_chunk] if self.stream_usage else [last]

    def whole(
        self, deltas: list[Delta], finish_reason: str, stats: GenerationStats
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": "".join(delta.text for delta in deltas),
            "logprobs": self._logprobs(deltas),
            "finish_reason": finish_reason,
        }
        envelope = self._envelope("text_completion", [choice])
        return {**envelope, "usage": usage(stats), "timings": timings(stats)}

    def _text(
        self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._chunk("text_completion", choice)

    def _logprobs(self, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        tokens: list[str] = []
        logprobs: list[float] = []
        tops: list[dict[str, float]] = []
        offsets = [offset for delta in deltas for offset in delta.offsets]
        for token in (token for delta in deltas for token in delta.tokens):
            assert token.logprobs is not None
            chosen = token_text(self.token_bytes(token.token_id))
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
