"""Answers as llama-server's JSON objects: chunks of a stream, and whole ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_runtime.engine.answer_text import Delta
from dflash_runtime.serving.answers import Answer
from dflash_runtime.serving.doors.openai_answers import timings, token_text
from dflash_runtime.serving.llama_fields import LlamaCompletionBody
from dflash_runtime.serving.wire import EVENTS, Chunk
from dflash_runtime.serving.worker import Finished

_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


@dataclass(kw_only=True)
class LlamaAnswer(Answer):
    """``/completion``. `prompt` is its text; `token_bytes` gives the bytes of a token id."""

    model: str
    body: LlamaCompletionBody
    prompt: str
    num_positions: int
    token_bytes: Callable[[int], bytes]
    has_logprobs: bool = True
    """Chunks have the ids of their tokens."""
    _num_prompt: int = field(init=False, default=0)
    _num_written: int = field(init=False, default=0)
    _has_new_line: bool = field(init=False, default=False)

    wire = EVENTS

    def first_chunks(self, num_prompt_tokens: int) -> list[Chunk]:
        """None, but the number of tokens is kept."""
        self._num_prompt = num_prompt_tokens
        return []

    def next_chunks(self, delta: Delta) -> list[Chunk]:
        """The chunk of some text; it may be empty."""
        self._num_written += len(delta.tokens)
        chunk = self._chunk(delta.text, [token.token_id for token in delta.tokens])
        if self.body.n_probs:
            chunk["completion_probabilities"] = self._probabilities([delta])
        return [chunk]

    def last_chunks(self, finished: Finished) -> list[Chunk]:
        """The chunk after the last token."""
        return [self.body.wanted(self._last("", [], finished))]

    def whole(self, deltas: Sequence[Delta], finished: Finished) -> dict[str, Any]:
        """The answer as one object."""
        ids = [token.token_id for delta in deltas for token in delta.tokens]
        text = "".join(delta.text for delta in deltas)
        whole = self._last(text, ids if self.body.return_tokens else [], finished)
        if self.body.n_probs:
            whole["completion_probabilities"] = self._probabilities(deltas)
        return self.body.wanted(whole)

    def _chunk(self, text: str, token_ids: list[int]) -> dict[str, Any]:
        self._has_new_line = self._has_new_line or "\n" in text
        return {
            "index": 0,
            "content": text,
            "tokens": token_ids,
            "id_slot": 0,
            "stop": False,
            "tokens_predicted": self._num_written,
            "tokens_evaluated": self._num_prompt,
        }

    def _last(self, text: str, token_ids: list[int], finished: Finished) -> dict[str, Any]:
        stats, reason = finished.stats, "limit"
        if finished.finish_reason == "stop":
            reason = "eos" if finished.stop is None else "word"
        num_tokens = stats.num_prompt_tokens + stats.num_generated_tokens
        return {
            **self._chunk(text, token_ids),
            "stop": True,
            "model": self.model,
            "tokens_predicted": stats.num_generated_tokens,
            "tokens_evaluated": stats.num_prompt_tokens,
            "generation_settings": self.body.settings(),
            "prompt": self.prompt,
            "has_new_line": self._has_new_line,
            "truncated": reason == "limit" and num_tokens > self.num_positions,
            "stop_type": reason,
            "stopping_word": finished.stop or "",
            "tokens_cached": max(0, num_tokens - 1),
            "timings": timings(stats),
        }

    def _probabilities(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        found = []
        for token in (token for delta in deltas for token in delta.tokens):
            assert token.logprobs is not None
            top = [self._token(*each) for each in token.logprobs.top]
            chosen = self._token(token.token_id, token.logprobs.logprob)
            found.append({**chosen, "top_logprobs": top})
        return found

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self.token_bytes(token_id)
        return {
            "id": token_id,
            "token": token_text(data),
            "bytes": list(data),
            "logprob": max(logprob, _LEAST_LOGPROB),
        }
