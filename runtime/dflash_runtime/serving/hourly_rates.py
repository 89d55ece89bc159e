"""Latency and rates over the last hour, minute by minute, in bounded memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dflash_runtime.serving.request_record import RequestRecord

NUM_MINUTES = 60


@dataclass(slots=True)
class MinuteRates:
    """Requests that ended within one minute."""

    minute: int
    """Since the server's clock began."""
    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    """Those that were computed."""
    generated_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    """Those that `decode_s` was for: all but the first of each request."""
    decode_s: float = 0.0
    first_tokens: int = 0
    """Requests that had one."""
    first_token_s: float = 0.0
    """Sum of these requests."""
    first_token_most_s: float = 0.0

    def add(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        stats = record.stats
        self.requests += 1
        self.errors += record.end == "error"
        self.generated_tokens += record.num_generated
        if stats.prefill_s:
            self.prompt_tokens += stats.num_prompt_tokens - stats.num_reused_tokens
            self.prefill_s += stats.prefill_s
        self.decode_tokens += max(0, stats.num_generated_tokens - 1)
        self.decode_s += stats.decode_s
        if record.first_token_s is not None:
            self.first_tokens += 1
            self.first_token_s += record.first_token_s
            self.first_token_most_s = max(self.first_token_most_s, record.first_token_s)


class HourlyRates:
    """The last `NUM_MINUTES` minutes. For one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._minutes: deque[MinuteRates] = deque(maxlen=NUM_MINUTES)

    def add(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        minute = self._now()
        if not self._minutes or self._minutes[-1].minute != minute:
            self._minutes.append(MinuteRates(minute))
        self._minutes[-1].add(record)

    def as_records(self) -> list[dict[str, Any]]:
        """The minutes of the last hour in which a request ended, oldest first; ``ago`` is how many
        minutes have begun since."""
        now = self._now()
        return [
            {"ago": now - each.minute, **_without_minute(each)}
            for each in self._minutes
            if now - each.minute < NUM_MINUTES
        ]

    def _now(self) -> int:
        return int(self._clock() // 60)


def _without_minute(rates: MinuteRates) -> dict[str, Any]:
    fields = asdict(rates)
    del fields["minute"]
    return fields
