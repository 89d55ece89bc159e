"""What is known of one request while it waits, runs, and after its end: numbers, and no text."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_runtime.engine.generation import GenerationStats

_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request. Times in seconds; those that end something are None before."""

    request_id: str = field(default_factory=lambda: f"req-{secrets.token_hex(12)}")
    """That of the answer, where it has one."""
    key: str = ""
    """The name of its API key; empty if the server has none."""
    num_prompt: int = 0
    max_tokens: int = 0
    asked_unix_s: float = field(default_factory=time.time)
    trace: Mapping[str, str] = field(default_factory=dict)
    """Its headers ``traceparent`` and ``tracestate``, as they came."""
    num_generated: int = 0
    """Tokens so far."""
    queue_s: float | None = None
    first_token_s: float | None = None
    """From asking to the first token."""
    whole_s: float | None = None
    end: str = ""
    """``stop``, ``length``, ``cancelled``, ``error`` or ``queue_full``; empty before the end."""
    stats: GenerationStats = field(default_factory=GenerationStats)
    """Counts and times of the engine, once it has ended."""

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that were not computed again."""
        return self.stats.num_reused_tokens

    @property
    def trace_id(self) -> str | None:
        """The id of the trace that it belongs to, if its client has named one."""
        found = _TRACE_PARENT.fullmatch(self.trace.get("traceparent", ""))
        return None if found is None else found[1]

    def as_fields(self) -> dict[str, Any]:
        """Its numbers by name, for logs, spans and the status page."""
        return {
            "request_id": self.request_id,
            "key": self.key or None,
            "prompt_tokens": self.num_prompt,
            "cached_tokens": self.num_cached,
            "generated_tokens": self.num_generated,
            "max_tokens": self.max_tokens,
            "asked_unix_s": self.asked_unix_s,
            "queue_s": self.queue_s,
            "first_token_s": self.first_token_s,
            "tokens_per_s": self.stats.decode_tokens_per_s or None,
            "whole_s": self.whole_s,
            "end": self.end or None,
        }
