"""Answers as Ollama's JSON objects: lines of a stream, and whole ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dflash_adapters.text.answers import AnswerEvent, Content, Reasoning, ToolCall
from dflash_runtime.engine.answer_text import Delta
from dflash_runtime.serving.answers import Answer, events_of
from dflash_runtime.serving.doors.openai_answers import token_text
from dflash_runtime.serving.wire import JSON_LINES, Chunk
from dflash_runtime.serving.worker import Finished

_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


@dataclass(kw_only=True)
class OllamaAnswer(Answer):
    """``/api/chat`` or ``/api/generate``. `token_bytes` gives the bytes of a token id."""

    model: str
    is_chat: bool
    token_bytes: Callable[[int], bytes]
    has_logprobs: bool
    _started_ns: int = field(init=False, default_factory=time.monotonic_ns)

    wire = JSON_LINES

    def next_chunks(self, delta: Delta) -> list[Chunk]:
        """The lines of text that became final; with log-probabilities one."""
        if self.has_logprobs:
            return [{**self._line(self._part(delta.events)), "logprobs": self._logprobs([delta])}]
        return [self._line(self._part([event])) for event in delta.events]

    def last_chunks(self, finished: Finished) -> list[Chunk]:
        """The line after the last token."""
        return [{**self._line(self._part([])), **self._end(finished)}]

    def whole(self, deltas: Sequence[Delta], finished: Finished) -> dict[str, Any]:
        """The answer as one object."""
        whole = {**self._line(self._part(events_of(deltas))), **self._end(finished)}
        if self.has_logprobs:
            whole["logprobs"] = self._logprobs(deltas)
        return whole

    def nothing(self, reason: str) -> dict[str, Any]:
        """The whole answer to a request that asks for no text."""
        return {**self._line(self._part([])), "done": True, "done_reason": reason}

    def _line(self, part: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self.model, "created_at": now, **part, "done": False}

    def _part(self, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        content = "".join(event.text for event in events if isinstance(event, Content))
        thinking = "".join(event.text for event in events if isinstance(event, Reasoning))
        part: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self.is_chat:
            return {"response": content, **part}
        calls = [_call(event) for event in events if isinstance(event, ToolCall)]
        if calls:
            part["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": content, **part}}

    def _end(self, finished: Finished) -> dict[str, Any]:
        stats = finished.stats
        prompt_ns, written_ns = (int(s * 1e9) for s in (stats.prefill_s, stats.decode_s))
        total_ns = time.monotonic_ns() - self._started_ns
        return {
            "done": True,
            "done_reason": finished.finish_reason,
            "total_duration": total_ns,
            # The model is there; this is the time in which others had their turns.
            "load_duration": max(0, total_ns - prompt_ns - written_ns),
            "prompt_eval_count": stats.num_prompt_tokens,
            "prompt_eval_duration": prompt_ns,
            "eval_count": stats.num_generated_tokens,
            "eval_duration": written_ns,
        }

    def _logprobs(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        found = []
        for token in (token for delta in deltas for token in delta.tokens):
            assert token.logprobs is not None
            top = [self._token(*each) for each in token.logprobs.top]
            chosen = self._token(token.token_id, token.logprobs.logprob)
            found.append({**chosen, "top_logprobs": top} if top else chosen)
        return found

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self.token_bytes(token_id)
        logprob = max(logprob, _LEAST_LOGPROB)
        return {"token": token_text(data), "logprob": logprob, "bytes": list(data)}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    return {"id": call.call_id, "function": function} if call.call_id else {"function": function}
